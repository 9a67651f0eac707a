"""Where the time to the first token went, and the decoding after it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from engine.stage_clock import StageClock


class Stage(enum.Enum):
    QUEUE = "queue"
    RESTORE = "restore"
    PROTECTED_PREFILL = "protected_prefill"
    SPARSE_PREFILL = "sparse_prefill"
    DENSE_PREFILL = "dense_prefill"
    KICK_OFF = "kick_off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds. The first six add up to first_token_s; decode_s includes the turns of other jobs."""

    queue_s: float
    restore_s: float
    protected_prefill_s: float
    sparse_prefill_s: float
    dense_prefill_s: float
    kick_off_s: float
    first_token_s: float
    decode_s: float
    total_s: float


class RequestClock(StageClock[Stage]):
    """Attributes every moment up to the first token to a stage; what comes later is decoding."""

    def __init__(self, *, time_s: Callable[[], float], started_at: float) -> None:
        super().__init__(time_s=time_s, waiting=Stage.QUEUE, started_at=started_at)
        self._started_at = started_at
        self._first_token_s: float | None = None

    def enter(self, stage: Stage) -> None:
        """End the current stage and begin this one. After the first token nothing is counted."""
        if self._first_token_s is None:
            super().enter(stage)

    def first_token(self) -> Timings:
        """Close the books: what comes later is decoding."""
        assert self._first_token_s is None
        self.enter(self._stage)
        self._first_token_s = self._since - self._started_at
        return self._timings(self._first_token_s)

    def total(self) -> Timings:
        """The same, with the decoding up to now."""
        return self._timings(self._time_s() - self._started_at)

    def _timings(self, total_s: float) -> Timings:
        assert self._first_token_s is not None
        return Timings(
            **{f"{stage.value}_s": self._seconds.get(stage, 0.0) for stage in Stage},
            first_token_s=self._first_token_s,
            decode_s=total_s - self._first_token_s,
            total_s=total_s,
        )
