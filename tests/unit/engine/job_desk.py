"""A GPU thread under test, jobs that tell what happens to them, and a gate to stop a step at."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine.gpu_thread import GpuThread, JobContext, JobStream

NAME = "gpu-under-test"
WAIT_S = 20.0
EVENTS_MAX = 3
JOBS_MAX = 8


@dataclass
class Desk:
    """A GPU thread and what was seen on it."""

    fatals: list[BaseException] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.gpu = GpuThread(
            name=NAME,
            jobs_max=JOBS_MAX,
            events_max=EVENTS_MAX,
            on_fatal=self.fatals.append,
            clock=lambda: self.now_s,
        )

    def counting(self, name: str, steps: int) -> Callable[[JobContext], Iterator[int]]:
        """A job that yields 0 .. steps-1 and notes its steps and its clean-up."""

        def job(_: JobContext) -> Iterator[int]:
            try:
                for step in range(steps):
                    self.log.append(name)
                    yield step
            finally:
                assert threading.current_thread().name == NAME
                self.closed.append(name)

        return job

    def gated(self, gate: Gate) -> Callable[[JobContext], Iterator[int]]:
        """A job whose second step waits for the test."""

        def job(_: JobContext) -> Iterator[int]:
            try:
                yield 0
                gate.pass_through()
                yield 1
            finally:
                self.closed.append("gated")

        return job

    def endless(self, gate: Gate) -> Callable[[JobContext], Iterator[int]]:
        """A job that waits for the test and then ends only if it is closed."""

        def job(_: JobContext) -> Iterator[int]:
            try:
                gate.pass_through()
                while True:
                    yield 0
            finally:
                self.closed.append("endless")

        return job


class Gate:
    """Where a step stops until the test opens it."""

    def __init__(self) -> None:
        self._reached, self._opened = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        self._reached.set()
        assert self._opened.wait(WAIT_S)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, WAIT_S)

    def open(self) -> None:
        self._opened.set()


async def drained(gpu: GpuThread) -> None:
    """Take turns until there is no other job."""
    async with asyncio.timeout(WAIT_S):
        while gpu.jobs_running + gpu.jobs_waiting:
            await gpu.call(lambda: None)


async def collect(stream: JobStream[int]) -> list[int]:
    return [event async for event in stream]
