"""Metrics of the gateway's turns. Every series is there from the start."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.events import Delta, TurnEvent, TurnFinished, TurnPhase
from gateway.planner import Path, Reason
from gateway.timings import STAGES
from serving.finish import FinishReason
from serving.telemetry import (
    ITL_BUCKETS,
    STAGE_BUCKETS,
    TOKEN_BUCKETS,
    TTFT_BUCKETS,
    with_children,
)

FALLBACK_REASONS = (
    Reason.PROTECTED_EXCEEDS_BUDGET,
    Reason.PROMPT_EXCEEDS_DRAFT,
    Reason.SCORER_UNAVAILABLE,
    Reason.SCORER_ERROR,
    Reason.TOKENIZER_MISMATCH,
)


class GatewayMetrics:
    """What turns report. running: a gauge that the servicer keeps."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._first_token = Histogram(
            "gateway_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self._gap = Histogram(
            "gateway_inter_token_latency_seconds",
            "Gap before a token after the first.",
            buckets=ITL_BUCKETS,
            registry=registry,
        )
        self._request = Histogram(
            "gateway_request_seconds",
            "From a request's arrival to its last token.",
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self._stage = with_children(
            Histogram(
                "gateway_stage_seconds",
                "Time of a stage on the way to the first token, where the stage ran.",
                ("stage",),
                buckets=STAGE_BUCKETS,
                registry=registry,
            ),
            stage=STAGES,
        )
        self._count_turns(registry)
        self._count_tokens(registry)

    def _count_turns(self, registry: CollectorRegistry) -> None:
        self._turns = with_children(
            Counter(
                "gateway_turns_total",
                "Finished turns, by how the prompt was prefilled and why.",
                ("path", "reason"),
                registry=registry,
            ),
            path=_labels(Path),
            reason=_labels(Reason),
        )
        self._finished = with_children(
            Counter(
                "gateway_requests_finished_total",
                "Finished turns, by why the reply ended.",
                ("finish_reason",),
                registry=registry,
            ),
            finish_reason=_labels(FinishReason),
        )
        self._fallbacks = with_children(
            Counter(
                "gateway_scorer_fallbacks_total",
                "Turns that would have gone sparse and went dense, by why.",
                ("reason",),
                registry=registry,
            ),
            reason=[reason.name.lower() for reason in FALLBACK_REASONS],
        )
        self._cancelled = with_children(
            Counter(
                "gateway_turns_cancelled_total",
                "Turns that the client gave up, by where they were.",
                ("phase",),
                registry=registry,
            ),
            phase=[phase.value for phase in TurnPhase],
        )
        self.running = Gauge(
            "gateway_turns_running", "Turns in work or waiting for a place.", registry=registry
        )

    def _count_tokens(self, registry: CollectorRegistry) -> None:
        self._prompt_tokens = Counter(
            "gateway_prompt_tokens_total", "Prompt tokens of finished turns.", registry=registry
        )
        self._kept_tokens = Counter(
            "gateway_kept_tokens_total",
            "Prompt tokens that keep plans kept, of finished sparse turns.",
            registry=registry,
        )
        self._executed_tokens = Counter(
            "gateway_executed_tokens_total",
            "Prompt tokens that the target ran, of finished turns.",
            registry=registry,
        )
        self._generated_tokens = Counter(
            "gateway_generated_tokens_total", "Reply tokens of finished turns.", registry=registry
        )
        self._request_prompt_tokens = Histogram(
            "gateway_request_prompt_tokens",
            "Prompt tokens of a finished turn.",
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        self._request_generated_tokens = Histogram(
            "gateway_request_generated_tokens",
            "Reply tokens of a finished turn.",
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )

    def observe(self, event: TurnEvent) -> None:
        """Take in one event of a turn."""
        if isinstance(event, Delta):
            self._observe_gap(event)
        elif isinstance(event, TurnFinished):
            self._observe_finished(event)

    def cancelled(self, phase: TurnPhase) -> None:
        """The client gave up while the turn was in this phase."""
        self._cancelled.labels(phase.value).inc()

    def _observe_gap(self, delta: Delta) -> None:
        """Tokens that came together share the time since the ones before."""
        if delta.gap_s is not None and delta.token_ids:
            for _ in delta.token_ids:
                self._gap.observe(delta.gap_s / len(delta.token_ids))

    def _observe_finished(self, finished: TurnFinished) -> None:
        reason = finished.decision.reason
        self._turns.labels(finished.decision.path.name.lower(), reason.name.lower()).inc()
        self._finished.labels(finished.finish_reason.name.lower()).inc()
        if reason in FALLBACK_REASONS:
            self._fallbacks.labels(reason.name.lower()).inc()
        timings, counts = finished.timings, finished.counts
        self._first_token.observe(timings.time_to_first_token_s)
        self._request.observe(timings.total_s)
        for stage, seconds in timings.stages().items():
            if seconds > 0.0:
                self._stage.labels(stage).observe(seconds)
        self._prompt_tokens.inc(counts.prompt_tokens)
        self._executed_tokens.inc(counts.executed_tokens)
        self._generated_tokens.inc(counts.completion_tokens)
        if finished.decision.path is Path.SPARSE:
            self._kept_tokens.inc(counts.selected_tokens)
        self._request_prompt_tokens.observe(counts.prompt_tokens)
        self._request_generated_tokens.observe(counts.completion_tokens)


def _labels(names: type[Path] | type[Reason] | type[FinishReason]) -> list[str]:
    return [name.name.lower() for name in names]
