"""Stages that partition a job's time, whatever the other jobs do."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

S = TypeVar("S", bound=enum.Enum)


class StageClock(Generic[S]):
    """Attributes every moment since the job came in to exactly one stage."""

    def __init__(self, *, time_s: Callable[[], float], waiting: S, started_at: float) -> None:
        """waiting: the stage it begins in. started_at: when it came in, on time_s's clock."""
        self._time_s = time_s
        self._waiting = waiting
        self._stage, self._since = waiting, started_at
        self._seconds: dict[S, float] = {waiting: 0.0}

    def enter(self, stage: S) -> None:
        """End the current stage and begin this one."""
        now = self._time_s()
        self._seconds[self._stage] += now - self._since
        self._seconds.setdefault(stage, 0.0)
        self._stage, self._since = stage, now

    @contextlib.contextmanager
    def queued(self) -> Iterator[None]:
        """Around a yield: until its next turn the job waits, whatever stage it is in."""
        stage = self._stage
        self.enter(self._waiting)
        yield
        self.enter(stage)

    def seconds(self) -> Mapping[S, float]:
        """Seconds of each stage that was entered, up to now."""
        self.enter(self._stage)
        return dict(self._seconds)
