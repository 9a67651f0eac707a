from __future__ import annotations

import asyncio

import pytest

from gateway.admission import TurnSlots
from serving.errors import QueueFull


def _slots(running_max: int, waiting_max: int) -> TurnSlots:
    ticks = iter(range(1000))
    return TurnSlots(
        running_max=running_max, waiting_max=waiting_max, clock=lambda: float(next(ticks))
    )


async def test_a_free_place_is_taken_at_once_and_given_back() -> None:
    slots = _slots(1, 0)
    for _ in range(3):
        async with slots.taken() as waited_s:
            assert waited_s == 1.0
            assert slots.running == 1
        assert slots.running == 0


async def test_whoever_cannot_even_wait_is_told_to_come_back() -> None:
    slots = _slots(1, 0)
    async with slots.taken():
        with pytest.raises(QueueFull) as refused:
            async with slots.taken():
                pass
    assert refused.value.retry_after_s == 1.0


async def test_turns_get_places_in_the_order_of_asking() -> None:
    slots = _slots(1, 5)
    order: list[int] = []

    async def turn(number: int) -> None:
        async with slots.taken():
            order.append(number)

    async with slots.taken():
        waiting = [asyncio.create_task(turn(number)) for number in range(5)]
        await asyncio.sleep(0)
        assert slots.waiting == 5
        assert order == []
    await asyncio.gather(*waiting)
    assert order == [0, 1, 2, 3, 4]


async def test_a_turn_that_gives_up_waiting_leaves_no_trace() -> None:
    slots = _slots(1, 1)

    async def turn() -> None:
        async with slots.taken():
            pass

    async with slots.taken():
        waiting = asyncio.create_task(turn())
        await asyncio.sleep(0)
        assert slots.waiting == 1
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert slots.waiting == 0
    async with slots.taken():
        assert slots.running == 1
