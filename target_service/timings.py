"""Where the time to the first token went: stages that partition it, whatever the other jobs do."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass


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


class StageClock:
    """Attributes every moment up to the first token to exactly one stage."""

    def __init__(self, *, time_s: Callable[[], float], started_at: float) -> None:
        """started_at: when the request came in, on the same clock as time_s."""
        self._time_s = time_s
        self._started_at = started_at
        self._since = started_at
        self._stage = Stage.QUEUE
        self._seconds = dict.fromkeys(Stage, 0.0)
        self._first_token_s: float | None = None

    def enter(self, stage: Stage) -> None:
        """End the current stage and begin this one. After the first token nothing is counted."""
        if self._first_token_s is not None:
            return
        now = self._time_s()
        self._seconds[self._stage] += now - self._since
        self._stage, self._since = stage, now

    @contextlib.contextmanager
    def queued(self) -> Iterator[None]:
        """While other jobs take their turns this one waits: queueing, whatever stage it is in."""
        stage = self._stage
        self.enter(Stage.QUEUE)
        yield
        self.enter(stage)

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
            **{f"{stage.value}_s": seconds for stage, seconds in self._seconds.items()},
            first_token_s=self._first_token_s,
            decode_s=total_s - self._first_token_s,
            total_s=total_s,
        )
