"""The target's metrics; every series exists from the start."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from serving.finish import FinishReason
from serving.telemetry import (
    ITL_BUCKETS,
    STAGE_BUCKETS,
    TOKEN_BUCKETS,
    TTFT_BUCKETS,
    stage_histograms,
    with_children,
)
from target_service.events import Finished
from target_service.prefill import PrefillKind
from target_service.timings import Timings


class Outcome(enum.Enum):
    """How a Generate call ended. REFUSED: by a check of ours, before or during the work."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    FAILED = "failed"


# The kick-off token counts as sparse or dense, as the prefill before it.
TokenKind = Literal[
    "protected_executed",
    "sparse_executed",
    "dense_executed",
    "dense_restored",
    "sparse_restored",
    "generated",
]


class TargetMetrics:
    """Counts and times what requests did. Safe to call from any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._stages = stage_histograms(
            registry,
            "target",
            {
                "queue": "Seconds a request waited for its turns before its first token.",
                "restore": "Seconds to find and fork a base and to promise pages.",
                "kick_off": "Seconds of the last prompt token's forward and the first sampling.",
                "decode_step": "Seconds of one decode step, without other requests' turns.",
            },
        )
        self._prefill = with_children(
            Histogram(
                "target_prefill_seconds",
                "Seconds of prefill, by kind, of the requests that had any.",
                ("kind",),
                buckets=STAGE_BUCKETS,
                registry=registry,
            ),
            kind=[kind.value for kind in PrefillKind],
        )
        self._first_token = Histogram(
            "target_first_token_seconds",
            "Seconds from a request's arrival to its first token.",
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self._inter_token = Histogram(
            "target_inter_token_seconds",
            "Seconds between two tokens of a reply, other requests' turns included.",
            buckets=ITL_BUCKETS,
            registry=registry,
        )
        self._count(registry)

    def _count(self, registry: CollectorRegistry) -> None:
        self._prompt_tokens = Histogram(
            "target_prompt_tokens",
            "Tokens of the prompts that were answered.",
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        self._tokens = with_children(
            Counter(
                "target_tokens_total",
                "Tokens by what became of them; restored ones are counted in positions.",
                ("kind",),
                registry=registry,
            ),
            kind=get_args(TokenKind),
        )
        self._requests = with_children(
            Counter(
                "target_requests_total",
                "Generate requests by how they ended.",
                ("outcome",),
                registry=registry,
            ),
            outcome=[outcome.value for outcome in Outcome],
        )
        self._replies = with_children(
            Counter(
                "target_replies_total",
                "Complete replies by why they ended.",
                ("finish_reason",),
                registry=registry,
            ),
            finish_reason=[reason.name.lower() for reason in FinishReason],
        )

    def export(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge `target_<name>` that is read when it is scraped, on the metrics port's thread."""
        Gauge(f"target_{name}", text, registry=self._registry).set_function(read)

    def observe_first_token(self, timings: Timings, *, kinds: Collection[PrefillKind]) -> None:
        """kinds: the parts of the prefill that ran; the others are no observation of 0."""
        self._stages["queue"].observe(timings.queue_s)
        self._stages["restore"].observe(timings.restore_s)
        self._stages["kick_off"].observe(timings.kick_off_s)
        seconds = {
            PrefillKind.PROTECTED: timings.protected_prefill_s,
            PrefillKind.SPARSE: timings.sparse_prefill_s,
            PrefillKind.DENSE: timings.dense_prefill_s,
        }
        for kind in kinds:
            self._prefill.labels(kind.value).observe(seconds[kind])
        self._first_token.observe(timings.first_token_s)

    def observe_decode_step(self, *, step_s: float, gap_s: float) -> None:
        self._stages["decode_step"].observe(step_s)
        self._inter_token.observe(gap_s)

    def observe_finished(self, finished: Finished) -> None:
        self._prompt_tokens.observe(finished.counts.prompt)
        self._replies.labels(finished.reason.name.lower()).inc()

    def count_tokens(self, kind: TokenKind, tokens: int) -> None:
        """Count tokens as the work is done, so that those of cancelled requests are among them."""
        self._tokens.labels(kind).inc(tokens)

    def observe_outcome(self, outcome: Outcome) -> None:
        self._requests.labels(outcome.value).inc()
