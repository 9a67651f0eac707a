"""What ends one job, what ends them all, and that clean-up runs in either case."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
import torch

from engine.gpu_thread import GpuThread, JobContext
from serving.errors import InternalError, KvCacheFull, ServiceError, Unavailable
from tests.unit.engine.job_desk import NAME, Desk, Gate, collect, drained


@pytest.mark.parametrize("error", [KvCacheFull("no page is free"), ValueError("a bug")])
async def test_an_error_ends_only_its_own_job(desk: Desk, error: Exception) -> None:
    def failing(_: JobContext) -> Iterator[int]:
        yield 7
        raise error

    bad = desk.gpu.submit(failing)
    good = desk.gpu.submit(desk.counting("g", 9))
    desk.gpu.start()
    assert await anext(bad) == 7
    with pytest.raises(type(error)) as caught:
        await anext(bad)
    assert caught.value is error
    assert [event async for event in bad] == []
    assert [event async for event in good] == list(range(9))
    assert desk.fatals == []


async def test_a_cancelled_stream_just_ends_though_its_step_fails_meanwhile(desk: Desk) -> None:
    gate = Gate()

    def failing(_: JobContext) -> Iterator[int]:
        gate.pass_through()
        raise KvCacheFull("no page is free")
        yield 0

    stream = desk.gpu.submit(failing)
    desk.gpu.start()
    await gate.reached()
    stream.cancel()
    gate.open()
    assert await collect(stream) == []


async def test_an_error_before_the_first_yield_reaches_the_reader(desk: Desk) -> None:
    def refusing(_: JobContext) -> Iterator[int]:
        raise KvCacheFull("no page is free")

    desk.gpu.start()
    with pytest.raises(KvCacheFull):
        await anext(desk.gpu.submit(refusing))


FATAL = [
    AssertionError("a broken invariant"),
    torch.AcceleratorError("device-side assert triggered"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", FATAL, ids=lambda error: type(error).__name__)
async def test_a_broken_invariant_or_device_ends_everything(
    desk: Desk, error: BaseException
) -> None:
    def failing(_: JobContext) -> Iterator[int]:
        yield 0
        raise error

    running = desk.gpu.submit(desk.counting("r", 10))
    broken = desk.gpu.submit(failing)
    desk.gpu.start()
    for stream in (broken, running):
        with pytest.raises(InternalError):
            await collect(stream)
    assert desk.fatals == [error]
    assert desk.closed == ["r"]
    with pytest.raises(Unavailable):
        desk.gpu.submit(desk.counting("late", 1))


async def test_running_out_of_device_memory_ends_only_its_own_job(desk: Desk) -> None:
    def failing(_: JobContext) -> Iterator[int]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    desk.gpu.start()
    with pytest.raises(torch.OutOfMemoryError):
        await collect(desk.gpu.submit(failing))
    assert await desk.gpu.call(lambda: 1) == 1


def failing_clean_up(error: Exception) -> Callable[[JobContext], Iterator[int]]:
    def job(_: JobContext) -> Iterator[int]:
        try:
            while True:
                yield 0
        finally:
            raise error

    return job


async def test_clean_up_that_fails_is_fatal_since_pages_may_have_leaked(desk: Desk) -> None:
    desk.gpu.start()
    stream = desk.gpu.submit(failing_clean_up(KeyError("sequence")))
    await anext(stream)
    other = desk.gpu.submit(desk.counting("o", 1000))
    await stream.aclose()
    with pytest.raises(InternalError):
        await collect(other)
    assert [type(error) for error in desk.fatals] == [KeyError]


async def test_a_service_error_in_clean_up_is_not_fatal(desk: Desk) -> None:
    desk.gpu.start()
    stream = desk.gpu.submit(failing_clean_up(ServiceError("no room to keep the state")))
    await anext(stream)
    await stream.aclose()
    assert await desk.gpu.call(lambda: 1) == 1


async def test_on_fatal_may_stop_the_thread() -> None:
    stopped: list[BaseException] = []

    def on_fatal(error: BaseException) -> None:
        gpu.stop()
        stopped.append(error)

    def broken() -> None:
        raise AssertionError

    gpu = GpuThread(name=NAME, jobs_max=1, events_max=1, on_fatal=on_fatal)
    gpu.start()
    with pytest.raises(InternalError):
        await gpu.call(broken)
    gpu.stop()
    assert len(stopped) == 1


async def test_stop_closes_what_runs_and_tells_the_readers(desk: Desk) -> None:
    gate = Gate()
    streams = [desk.gpu.submit(desk.endless(gate)), desk.gpu.submit(desk.counting("c", 1000))]
    desk.gpu.start()
    await gate.reached()
    stopping = asyncio.create_task(asyncio.to_thread(desk.gpu.stop))
    gate.open()
    await stopping
    for stream in streams:
        with pytest.raises(Unavailable):
            await collect(stream)
    assert "endless" in desk.closed
    assert desk.log.count("c") == 0 or "c" in desk.closed
    desk.gpu.stop()
    with pytest.raises(Unavailable):
        desk.gpu.submit(desk.counting("late", 1))


async def test_stop_before_start_ends_what_was_queued(desk: Desk) -> None:
    stream = desk.gpu.submit(desk.counting("a", 5))
    desk.gpu.stop()
    with pytest.raises(Unavailable):
        await collect(stream)
    assert desk.log == []


def test_a_loop_that_closes_under_a_running_job_ends_that_job_only(desk: Desk) -> None:
    gate, streams = Gate(), []

    async def leave_it_running() -> None:
        streams.append(desk.gpu.submit(desk.endless(gate)))
        desk.gpu.start()
        await gate.reached()

    async def come_later() -> int:
        await drained(desk.gpu)
        return await desk.gpu.call(lambda: 42)

    asyncio.run(leave_it_running())
    gate.open()
    assert asyncio.run(come_later()) == 42
    assert desk.closed == ["endless"]
    assert desk.fatals == []
