"""Jobs on the one thread take turns, and a slow reader delays nobody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from engine.gpu_thread import JobContext
from serving.errors import KvCacheFull, QueueFull
from tests.unit.engine.job_desk import EVENTS_MAX, JOBS_MAX, NAME, Desk, Gate, collect


async def test_events_arrive_in_order_and_the_stream_ends(desk: Desk) -> None:
    desk.gpu.start()
    stream = desk.gpu.submit(desk.counting("a", 10))
    assert [event async for event in stream] == list(range(10))
    assert [event async for event in stream] == []
    assert desk.closed == ["a"]
    await stream.aclose()


async def test_a_step_may_have_no_event(desk: Desk) -> None:
    def job(_: JobContext) -> Iterator[str | None]:
        yield None
        yield "only"
        yield None

    desk.gpu.start()
    assert [event async for event in desk.gpu.submit(job)] == ["only"]


async def test_jobs_take_turns_one_step_each(desk: Desk) -> None:
    streams = [desk.gpu.submit(desk.counting(name, 3)) for name in "abc"]
    desk.gpu.start()
    for stream in streams:
        assert [event async for event in stream] == [0, 1, 2]
    assert "".join(desk.log) == "abcabcabc"


async def test_a_job_that_comes_later_waits_one_turn_of_the_others(desk: Desk) -> None:
    gate = Gate()
    first = desk.gpu.submit(desk.gated(gate))
    desk.gpu.start()
    await gate.reached()
    second = desk.gpu.submit(desk.counting("b", 2))
    third = desk.gpu.submit(desk.counting("c", 2))
    gate.open()
    for stream in (first, second, third):
        assert [event async for event in stream] == [0, 1]
    assert "".join(desk.log) == "bcbc"


async def test_a_slow_reader_is_skipped_and_blocks_nobody(desk: Desk) -> None:
    slow = desk.gpu.submit(desk.counting("s", 10))
    fast = desk.gpu.submit(desk.counting("f", 40))
    desk.gpu.start()
    assert len([event async for event in fast]) == 40
    assert desk.log.count("s") == EVENTS_MAX
    assert [event async for event in slow] == list(range(10))


async def test_a_reader_that_never_reads_can_still_be_closed(desk: Desk) -> None:
    stream = desk.gpu.submit(desk.counting("a", 10))
    other = desk.gpu.submit(desk.counting("b", 5))
    desk.gpu.start()
    assert [event async for event in other] == list(range(5))
    await stream.aclose()
    assert sorted(desk.closed) == ["a", "b"]
    assert [event async for event in stream] == []


async def test_the_queue_is_bounded_and_a_job_that_ended_makes_room(desk: Desk) -> None:
    streams = [desk.gpu.submit(desk.counting(str(n), 1)) for n in range(JOBS_MAX)]
    with pytest.raises(QueueFull) as caught:
        desk.gpu.submit(desk.counting("one too many", 1))
    assert caught.value.retry_after_s is not None
    desk.gpu.start()
    assert await collect(streams[0]) == [0]
    assert await collect(desk.gpu.submit(desk.counting("again", 1))) == [0]


async def test_call_returns_what_the_function_returns(desk: Desk) -> None:
    desk.gpu.start()
    assert await desk.gpu.call(lambda: threading.current_thread().name) == NAME
    assert await desk.gpu.call(lambda: None) is None


async def test_call_raises_what_the_function_raises(desk: Desk) -> None:
    def full() -> None:
        raise KvCacheFull("no page is free")

    desk.gpu.start()
    with pytest.raises(KvCacheFull):
        await desk.gpu.call(full)


async def test_every_step_runs_in_inference_mode(desk: Desk) -> None:
    def asking(_: JobContext) -> Iterator[bool]:
        for _step in range(3):
            yield torch.is_inference_mode_enabled()

    streams = [desk.gpu.submit(asking) for _ in range(2)]
    desk.gpu.start()
    for stream in streams:
        assert [event async for event in stream] == [True, True, True]


async def test_queue_time_ends_with_the_first_step(desk: Desk) -> None:
    def job(context: JobContext) -> Iterator[float]:
        yield context.queue_s
        desk.now_s += 100
        yield context.queue_s

    stream = desk.gpu.submit(job)
    desk.now_s = 2.5
    desk.gpu.start()
    assert [event async for event in stream] == [2.5, 2.5]


async def test_others_waiting_sees_only_jobs_that_can_step(desk: Desk) -> None:
    def asking(context: JobContext) -> Iterator[bool]:
        while True:
            yield context.others_waiting

    alone = desk.gpu.submit(asking)
    desk.gpu.start()
    assert [await anext(alone) for _ in range(EVENTS_MAX + 1)][-1] is False
    other = desk.gpu.submit(desk.counting("o", 1000))
    while not await anext(alone):
        pass
    # The other one's reader reads nothing, so after EVENTS_MAX steps it cannot step.
    while await anext(alone):
        pass
    assert desk.log.count("o") == EVENTS_MAX
    await other.aclose()
    await alone.aclose()
