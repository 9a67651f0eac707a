"""A job that is cancelled at any point is closed on the one thread and leaves nothing."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Iterator

import pytest

from engine.gpu_thread import GpuThread, JobContext, JobStream
from tests.unit.engine.job_desk import NAME, Desk, Gate, collect, drained


async def test_a_stream_that_is_dropped_cancels_its_job(desk: Desk) -> None:
    desk.gpu.start()
    async for _ in desk.gpu.submit(desk.counting("a", 1000)):
        break
    gc.collect()
    await drained(desk.gpu)
    assert desk.closed == ["a"]


async def test_cancel_waits_for_the_step_and_then_closes_the_generator(desk: Desk) -> None:
    gate = Gate()
    stream = desk.gpu.submit(desk.gated(gate))
    desk.gpu.start()
    await gate.reached()
    stream.cancel()
    assert desk.closed == []
    gate.open()
    assert [event async for event in stream] == []  # The unread event 0 is dropped with the rest.
    assert desk.closed == ["gated"]


async def test_a_reader_that_waits_wakes_up_when_another_task_cancels(desk: Desk) -> None:
    gate = Gate()
    stream = desk.gpu.submit(desk.gated(gate))
    desk.gpu.start()
    assert await anext(stream) == 0
    reader = asyncio.create_task(collect(stream))
    await gate.reached()
    await asyncio.to_thread(stream.cancel)
    gate.open()
    assert await reader == []


async def test_a_job_cancelled_before_its_first_step_never_begins(desk: Desk) -> None:
    stream = desk.gpu.submit(desk.counting("a", 3))
    assert (desk.gpu.jobs_waiting, desk.gpu.jobs_running) == (1, 0)
    stream.cancel()
    desk.gpu.start()
    await stream.aclose()
    assert (desk.log, desk.closed) == ([], [])


async def test_a_cancelled_reader_closes_its_job_in_finally(desk: Desk) -> None:
    gate, finished = Gate(), asyncio.Event()

    async def read(stream: JobStream[int]) -> None:
        try:
            async for _ in stream:
                pass
        finally:
            await stream.aclose()
            finished.set()

    task = asyncio.create_task(read(desk.gpu.submit(desk.gated(gate))))
    desk.gpu.start()
    await gate.reached()
    task.cancel()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert finished.is_set()
    assert desk.closed == ["gated"]


async def test_a_job_is_closed_though_its_closing_task_is_cancelled(desk: Desk) -> None:
    gate = Gate()
    stream = desk.gpu.submit(desk.gated(gate))
    desk.gpu.start()
    await gate.reached()
    task = asyncio.create_task(stream.aclose())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.open()
    await drained(desk.gpu)
    assert desk.closed == ["gated"]


async def test_a_thousand_jobs_cancelled_at_random_leave_nothing_behind() -> None:
    rng = random.Random(20240607)
    gpu = GpuThread(name=NAME, jobs_max=1000, events_max=2, on_fatal=lambda error: None)
    begun, closed, places = [], [], asyncio.Semaphore(40)

    def job(_: JobContext) -> Iterator[int]:
        begun.append(threading.current_thread().name)
        try:
            yield from range(rng.randrange(6))
        finally:
            closed.append(threading.current_thread().name)

    async def use(reads: int, ending: str) -> None:
        async with places:
            stream = gpu.submit(job)
            try:
                for _ in range(reads):
                    await anext(stream, None)
                if ending == "cancel":
                    stream.cancel()
            finally:
                await stream.aclose()

    gpu.start()
    tasks = []
    for _ in range(1000):
        ending = rng.choice(["cancel", "close", "kill"])
        task = asyncio.create_task(use(rng.randrange(5), ending))
        tasks.append(task)
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        if ending == "kill":
            task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
    await drained(gpu)
    gpu.stop()
    assert 100 < len(begun) == len(closed)
    assert set(begun + closed) == {NAME}
