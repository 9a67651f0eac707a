"""Tokens gathered into batches, on a clock moved by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from serving.errors import KvCacheFull
from target_service.coalesce import TokenBatch, coalesced
from target_service.events import Event, Sampled, Started
from target_service.timings import Timings

TIMINGS = Timings(
    queue_s=0,
    restore_s=0,
    protected_prefill_s=0,
    sparse_prefill_s=0,
    dense_prefill_s=0,
    kick_off_s=0,
    first_token_s=0,
    decode_s=0,
    total_s=0,
)
FIRST = Sampled(1, TIMINGS)


class Source:
    """Events by hand: a number is seconds that pass before the next event."""

    def __init__(self, *script: Event | float | Exception) -> None:
        self.now = 0.0
        self.closed = False
        self._script = script

    def time_s(self) -> float:
        return self.now

    async def events(self) -> AsyncIterator[Event]:
        for item in self._script:
            if isinstance(item, float):
                self.now += item
            elif isinstance(item, Exception):
                raise item
            else:
                yield item


async def batches(*script: Event | float, interval_s: float = 1.0) -> list[Any]:
    source = Source(*script)
    found = coalesced(source.events(), interval_s=interval_s, time_s=source.time_s)
    return [e.token_ids if isinstance(e, TokenBatch) else type(e).__name__ async for e in found]


async def test_the_first_token_comes_at_once_and_alone_with_its_timings() -> None:
    source = Source(Started(0), FIRST, Sampled(2))
    found = [
        event async for event in coalesced(source.events(), interval_s=1.0, time_s=source.time_s)
    ]
    assert found == [Started(0), TokenBatch((1,), TIMINGS), TokenBatch((2,), None)]


async def test_tokens_within_the_interval_share_a_message() -> None:
    script = (FIRST, 0.4, Sampled(2), 0.4, Sampled(3), 0.4, Sampled(4), 0.4, Sampled(5))
    assert await batches(*script) == [(1,), (2, 3, 4), (5,)]


async def test_slow_tokens_come_one_by_one() -> None:
    script = (FIRST, 1.1, Sampled(2), 1.1, Sampled(3))
    assert await batches(*script) == [(1,), (2,), (3,)]


async def test_without_an_interval_every_token_has_its_message() -> None:
    assert await batches(FIRST, Sampled(2), Sampled(3), interval_s=0.0) == [(1,), (2,), (3,)]


async def test_held_tokens_come_before_any_other_event() -> None:
    assert await batches(FIRST, Sampled(2), Started(9), Sampled(3)) == [
        (1,),
        (2,),
        "Started",
        (3,),
    ]


async def test_a_held_token_does_not_wait_for_the_next_one() -> None:
    """On the real clock: the source never ends, so only the interval can bring the token."""
    loop = asyncio.get_running_loop()

    async def events() -> AsyncIterator[Event]:
        yield FIRST
        yield Sampled(2)
        await asyncio.Event().wait()

    async with aclosing(coalesced(events(), interval_s=0.01, time_s=loop.time)) as found:
        async with asyncio.timeout(10):
            assert (await anext(found)) == TokenBatch((1,), TIMINGS)
            assert (await anext(found)) == TokenBatch((2,), None)


async def test_an_error_of_the_job_is_raised_to_the_reader() -> None:
    source = Source(FIRST, 2.0, Sampled(2), KvCacheFull("full"))
    found = coalesced(source.events(), interval_s=1.0, time_s=source.time_s)
    assert (await anext(found)) == TokenBatch((1,), TIMINGS)
    assert (await anext(found)) == TokenBatch((2,), None)
    with pytest.raises(KvCacheFull):
        await anext(found)


async def test_leaving_early_cancels_the_read_ahead() -> None:
    is_left = asyncio.Event()

    async def events() -> AsyncIterator[Event]:
        yield FIRST
        yield Sampled(2)
        try:
            await asyncio.Event().wait()
        finally:
            is_left.set()

    loop = asyncio.get_running_loop()
    async with aclosing(coalesced(events(), interval_s=0.0, time_s=loop.time)) as found:
        await anext(found)
        reading = asyncio.create_task(anext(found))
        await reading
        waiting = asyncio.create_task(anext(found))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert is_left.is_set()
