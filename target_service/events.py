"""What a running request tells its caller, in order: Started, Progress, Sampled ..., Finished."""

from __future__ import annotations

from dataclasses import dataclass

from serving.finish import FinishReason
from target_service.prefill import PrefillKind
from target_service.timings import Timings


@dataclass(frozen=True, slots=True)
class Started:
    """The base was found and forked. restored_tokens: its length in positions."""

    restored_tokens: int


@dataclass(frozen=True, slots=True)
class Progress:
    kind: PrefillKind
    done_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token of the reply. timings: with the first one."""

    token_id: int
    timings: Timings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Prompt tokens by what became of them; restored ones are counted in positions.

    executed: really run, the kick-off token included. protected_executed: those of the head.
    """

    prompt: int
    dense_restored: int
    sparse_restored: int
    executed: int
    protected_executed: int
    completion: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """positions, slots: length of the sequence; the last sampled token has neither."""

    reason: FinishReason
    matched_stop_string: str | None
    matched_token_id: int | None
    counts: Counts
    timings: Timings
    positions: int
    slots: int
    sparse: bool


Event = Started | Progress | Sampled | Finished
