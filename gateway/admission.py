"""How many turns are in work at once, and how many may wait for a place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from serving.errors import QueueFull

RETRY_AFTER_S = 1.0


class TurnSlots:
    """Places for turns, given out in the order of asking."""

    def __init__(self, *, running_max: int, waiting_max: int, clock: Callable[[], float]) -> None:
        self._slots = asyncio.Semaphore(running_max)
        self._waiting_max = waiting_max
        self._clock = clock
        self.waiting = 0
        self.running = 0

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[float]:
        """Hold a place inside the block; gives the seconds waited. Raises QueueFull."""
        if self._slots.locked() and self.waiting >= self._waiting_max:
            raise QueueFull(
                f"{self.running} turns are in work and {self.waiting} wait, the limit",
                metadata={"running": str(self.running), "waiting": str(self.waiting)},
                retry_after_s=RETRY_AFTER_S,
            )
        asked_at = self._clock()
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield self._clock() - asked_at
        finally:
            self.running -= 1
            self._slots.release()
