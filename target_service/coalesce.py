"""Tokens of a fast decode in fewer messages: the first at once, later ones gathered a moment."""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass

from target_service.events import Event, Finished, Progress, Sampled, Started
from target_service.timings import Timings


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Tokens in one message. timings: with the first token of the reply."""

    token_ids: tuple[int, ...]
    timings: Timings | None


Answer = Started | Progress | TokenBatch | Finished


async def coalesced(
    events: AsyncIterator[Event], *, interval_s: float, time_s: Callable[[], float]
) -> AsyncGenerator[Answer, None]:
    """The events with their tokens in batches: one batch in interval_s, and no token held longer.

    What piles up while the reader takes its time becomes one batch, too.
    """
    ahead = _Ahead(events)
    held: list[int] = []
    due = -math.inf
    try:
        while True:
            event = await ahead.next(timeout_s=max(0.0, due - time_s()) if held else None)
            timings = event.timings if isinstance(event, Sampled) else None
            if isinstance(event, Sampled):
                held.append(event.token_id)
                if timings is None and time_s() < due:
                    continue
            if held:
                yield TokenBatch(tuple(held), timings)
                held.clear()
                due = time_s() + interval_s
            if event is _No.MORE:
                return
            if not isinstance(event, Sampled | _No):
                yield event
    finally:
        await ahead.aclose()


class _No(enum.Enum):
    EVENT_YET = "event_yet"
    MORE = "more"


class _Ahead:
    """Reads one event ahead, so that a wait can end early and lose nothing."""

    def __init__(self, events: AsyncIterator[Event]) -> None:
        self._events = events
        self._reading: asyncio.Task[Event | _No] | None = None

    async def next(self, *, timeout_s: float | None) -> Event | _No:
        """The next event, MORE (there is no more), or EVENT_YET (none came in time)."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        await asyncio.wait({self._reading}, timeout=timeout_s)
        if not self._reading.done():
            return _No.EVENT_YET
        reading, self._reading = self._reading, None
        return reading.result()

    async def aclose(self) -> None:
        """Stop reading; what was read and not taken is dropped."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
            if not self._reading.cancelled():
                self._reading.exception()  # Taken, so that nobody logs it as forgotten.

    async def _read(self) -> Event | _No:
        return await anext(self._events, _No.MORE)
