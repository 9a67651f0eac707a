"""Where the time of a scoring went: stages that partition it, whatever the other jobs do."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Mapping


class Stage(enum.Enum):
    # Before the first step, and while other jobs take their turns.
    QUEUE = "queue"
    RESTORE = "restore"
    PREFILL = "prefill"
    LOOKAHEAD = "lookahead"
    K_PASS = "k_pass"
    SELECT = "select"


class StageClock:
    """Attributes every moment since the job was queued to exactly one stage."""

    def __init__(self, *, time_s: Callable[[], float], queue_s: float) -> None:
        """queue_s: how long the job has waited until now."""
        self._time_s = time_s
        self._since = time_s()
        self._stage = Stage.QUEUE
        self._seconds = {Stage.QUEUE: queue_s}

    def enter(self, stage: Stage) -> None:
        """End the current stage and begin this one."""
        now = self._time_s()
        self._seconds[self._stage] += now - self._since
        self._seconds.setdefault(stage, 0.0)
        self._stage, self._since = stage, now

    @contextlib.contextmanager
    def queued(self) -> Iterator[None]:
        """Around a yield: until its next turn the job waits, whatever stage it is in."""
        stage = self._stage
        self.enter(Stage.QUEUE)
        yield
        self.enter(stage)

    def seconds(self) -> Mapping[Stage, float]:
        """Seconds of each stage that was entered, up to now."""
        self.enter(self._stage)
        return dict(self._seconds)
