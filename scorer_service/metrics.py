"""The scorer's metrics: a histogram for each stage, token and request counters, occupancy."""

from __future__ import annotations

import enum
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from scorer_service.scoring import Scored
from scorer_service.timings import Stage
from serving.keep_plan import QueryMode
from serving.telemetry import stage_histograms, with_children

STAGES = {
    Stage.QUEUE: "Seconds a scoring waited for the GPU thread.",
    Stage.RESTORE: "Seconds to find and fork the stored draft sequence.",
    Stage.PREFILL: "Seconds of the draft's prefill of what was not stored, tail window included.",
    Stage.LOOKAHEAD: "Seconds of lookahead decoding; never in TAIL_WINDOW mode.",
    Stage.K_PASS: "Seconds of reading the prompt's keys for its importance.",
    Stage.SELECT: "Seconds of choosing the kept chunks.",
}


class Outcome(enum.Enum):
    OK = "ok"
    # The caller's doing: a request that is wrong or does not fit.
    REFUSED = "refused"
    FAILED = "failed"
    CANCELLED = "cancelled"


class ScorerMetrics:
    """All series exist, as zero, from the start."""

    def __init__(self, registry: CollectorRegistry) -> None:
        histograms = {stage.value: text for stage, text in STAGES.items()}
        histograms["score"] = "Seconds of a whole scoring, from the request to its result."
        self._histograms = stage_histograms(registry, "scorer", histograms)
        self._scored = Counter(
            "scorer_scored_tokens_total", "Prompt tokens that got an importance.", registry=registry
        )
        self._restored = Counter(
            "scorer_restored_tokens_total",
            "Prompt tokens whose draft KV was stored already.",
            registry=registry,
        )
        self._prefilled = Counter(
            "scorer_prefilled_tokens_total", "Prompt tokens the draft ran.", registry=registry
        )
        self._requests = with_children(
            Counter(
                "scorer_requests_total",
                "Score requests by query mode and outcome.",
                ("query_mode", "outcome"),
                registry=registry,
            ),
            query_mode=[mode.value for mode in QueryMode],
            outcome=[outcome.value for outcome in Outcome],
        )
        self._registry = registry

    def observe(self, scored: Scored, total_s: float) -> None:
        """Count what one scoring did; total_s: seconds from the request to its result."""
        for stage, seconds in scored.stages_s.items():
            self._histograms[stage.value].observe(seconds)
        self._histograms["score"].observe(total_s)
        self._scored.inc(scored.prompt_tokens)
        self._restored.inc(scored.restored_tokens)
        self._prefilled.inc(scored.prefilled_tokens)

    def count(self, mode: QueryMode, outcome: Outcome) -> None:
        """Count one request that ended."""
        self._requests.labels(mode.value, outcome.value).inc()

    def export(self, name: str, text: str, read: Callable[[], int]) -> None:
        """A gauge `scorer_<name>` that is read when it is scraped, on the metrics port's thread."""
        Gauge(f"scorer_{name}", text, registry=self._registry).set_function(read)
