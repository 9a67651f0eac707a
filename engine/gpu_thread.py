"""One thread makes every torch call of a service; jobs take turns on it, one bounded step each.

A job is a generator: each `next()` is one prefill chunk or one decode step, and what it yields goes
to the event loop that submitted it. Cancelling closes the generator between two steps, so cleaning
up is an ordinary `finally`, and it always runs on this thread. A job whose reader has `events_max`
unread events is skipped until some are read, so a slow reader delays nobody else.

The thread runs in inference mode as a whole: a generator that entered it by itself would leave it
in another job's turn.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Generic, TypeVar

import torch

from serving.errors import InternalError, QueueFull, ServiceError, Unavailable

E = TypeVar("E")
T = TypeVar("T")

RETRY_AFTER_S = 1.0
# A stream dropped by a garbage collection on this very thread can miss the notification.
IDLE_WAIT_S = 1.0


class GpuThread:
    """Runs jobs round robin: at most `jobs_max`, waiting ones included.

    events_max: unread events of a job before it is skipped. on_fatal is called once, on this
    thread, after an AssertionError or a device error in a step, and after any error but a
    ServiceError while a generator is closed (what it held may have leaked). State is doubtful then:
    everything in flight fails with InternalError and the thread ends. Every other error ends only
    its own job and is raised to its reader. clock: seconds, for queue_s.
    """

    def __init__(
        self,
        *,
        name: str,
        jobs_max: int,
        events_max: int,
        on_fatal: Callable[[BaseException], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert jobs_max > 0
        assert events_max > 0
        self._jobs_max = jobs_max
        self._events_max = events_max
        self._on_fatal = on_fatal
        self._clock = clock
        self._changed = threading.Condition()
        self._jobs: set[_Job] = set()  # all that have not ended
        self._turns: deque[_Job] = deque()  # those that are not in a step at this moment
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; jobs submitted before this wait for it."""
        self._thread.start()

    def stop(self) -> None:
        """Close every job between two steps and join; their readers get Unavailable.

        May be repeated. Blocks for at most one step and the jobs' clean-up. on_fatal may call it,
        too.
        """
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        if self._thread.ident is None:
            self._end_all(Unavailable("the service is shutting down"))
        elif self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def jobs_running(self) -> int:
        """Jobs that have begun and not ended."""
        with self._changed:
            return sum(job.has_begun for job in self._jobs)

    @property
    def jobs_waiting(self) -> int:
        """Jobs that wait for their first step."""
        with self._changed:
            return sum(not job.has_begun for job in self._jobs)

    def submit(self, steps: Callable[[JobContext], Iterator[E | None]]) -> JobStream[E]:
        """Queue a job from a running event loop; read its stream on that loop and close it.

        steps: called on this thread, returns the generator. A yielded None is a step without an
        event. Raises QueueFull, or Unavailable once the thread is stopped.
        """
        job: _Job[E] = _Job(
            steps,
            context=JobContext(lambda: self._others_can_step(job)),
            changed=self._changed,
            submitted=self._clock(),
        )
        with self._changed:
            if not self._is_open:
                raise Unavailable("the service is shutting down")
            if len(self._jobs) >= self._jobs_max:
                raise QueueFull(
                    f"{self._jobs_max} requests are queued or running, the limit",
                    retry_after_s=RETRY_AFTER_S,
                )
            self._jobs.add(job)
            self._turns.append(job)
            self._changed.notify_all()
        return JobStream(job)

    async def call(self, fn: Callable[[], T]) -> T:
        """Run `fn` as a job of one step and return what it returns, or raise what it raises."""
        results: list[T] = []

        def once(_: JobContext) -> Iterator[None]:
            results.append(fn())
            yield from ()

        stream: JobStream[None] = self.submit(once)
        try:
            async for _ in stream:
                pass
        finally:
            await stream.aclose()
        return results[0]

    def _run(self) -> None:
        fatal: BaseException | None = None
        with torch.inference_mode():
            while fatal is None:
                job = self._next_turn()
                if job is None:
                    break
                fatal = self._turn(job)
            self._shut(fatal)

    def _next_turn(self) -> _Job | None:
        """Block until a job is to be closed or stepped, and take it out; None after stop."""
        with self._changed:
            while self._is_open:
                cancelled = (job for job in self._turns if job.is_cancelled)
                ready = (job for job in self._turns if self._can_step(job))
                job = next(cancelled, None) or next(ready, None)
                if job is not None:
                    self._turns.remove(job)
                    return job
                self._changed.wait(IDLE_WAIT_S)
        return None

    def _turn(self, job: _Job) -> BaseException | None:
        """One step, or the closing of a cancelled job. Returns the error if it is fatal."""
        if job.is_cancelled:
            error = job.close()
            is_over, is_fatal = True, error is not None and not isinstance(error, ServiceError)
        else:
            is_over, error = job.step(self._clock())
            is_fatal = error is not None and _is_fatal(error)
        if is_over and not is_fatal:
            self._end(job, error)
            return None
        with self._changed:
            self._turns.append(job)
        return error

    def _end(self, job: _Job, error: BaseException | None) -> None:
        """Off the books first: whoever sees the end of a stream finds the job's place free."""
        with self._changed:
            self._jobs.discard(job)
        job.post_end(error)

    def _shut(self, fatal: BaseException | None) -> None:
        with self._changed:
            self._is_open = False
        if fatal is None:
            self._end_all(Unavailable("the service is shutting down"))
            return
        try:
            self._on_fatal(fatal)
        finally:
            self._end_all(InternalError("the service stopped after an internal error"))

    def _end_all(self, error: ServiceError) -> None:
        """Close all jobs; each reader gets its own error, for a raised one collects tracebacks."""
        with self._changed:
            left, self._turns = list(self._turns), deque()
        for job in left:
            job.close()  # What it raises changes nothing any more: the job fails as all do.
            self._end(job, type(error)(error.message))

    def _can_step(self, job: _Job) -> bool:
        return not job.is_cancelled and job.unread < self._events_max

    def _others_can_step(self, job: _Job) -> bool:
        with self._changed:
            return any(other is not job and self._can_step(other) for other in self._turns)


class JobContext:
    """What a job may know about its turns. Used on the GPU thread.

    queue_s: seconds from submit to the first step.
    """

    def __init__(self, others_can_step: Callable[[], bool]) -> None:
        self._others_can_step = others_can_step
        self.queue_s = 0.0

    @property
    def others_waiting(self) -> bool:
        """True if another job has a step to run: then take a small one."""
        return self._others_can_step()


class JobStream(Generic[E]):
    """A job's events, for one reader on the loop that submitted it. Dropping it cancels the job."""

    def __init__(self, job: _Job[E]) -> None:
        self._job = job

    def __aiter__(self) -> JobStream[E]:
        return self

    async def __anext__(self) -> E:
        """The next event; raises, once, what ended the generator. After cancel() it just ends."""
        return await self._job.next_event()

    def cancel(self) -> None:
        """Ask for the job's end and drop its unread events; any thread may, nobody waits."""
        self._job.cancel()

    async def aclose(self) -> None:
        """cancel() and wait until the generator is closed; at once if the job has ended.

        If the waiting task is cancelled, the job is closed all the same.
        """
        self._job.cancel()
        await self._job.ended.wait()

    def __del__(self) -> None:
        self._job.cancel()


class _Job(Generic[E]):
    """One job, seen from both sides.

    Guarded by `changed`: unread, is_cancelled, has_begun. GPU thread only: step, close, post_end
    and the generator. Event loop only: next_event, ended, the events and the error.
    """

    def __init__(
        self,
        steps: Callable[[JobContext], Iterator[E | None]],
        *,
        context: JobContext,
        changed: threading.Condition,
        submitted: float,
    ) -> None:
        self.unread = 0
        self.is_cancelled = False
        self.has_begun = False
        self.ended = asyncio.Event()
        self._changed = changed
        self._steps = steps
        self._context = context
        self._submitted = submitted
        self._iterator: Iterator[E | None] | None = None
        self._loop = asyncio.get_running_loop()
        self._events: deque[E] = deque()
        self._error: BaseException | None = None
        self._news = asyncio.Event()  # an event or the end

    def step(self, now: float) -> tuple[bool, BaseException | None]:
        """Run the generator to its next yield: (is it over, the error that ended it)."""
        try:
            if self._iterator is None:
                self._begin(now)
            assert self._iterator is not None
            event = next(self._iterator)
        except StopIteration:
            return True, None
        except BaseException as error:  # noqa: BLE001 - this thread's edge: the reader raises it.
            return True, error
        if event is not None:
            self._post_event(event)
        return False, None

    def close(self) -> BaseException | None:
        """Close the generator, so that its finally runs; returns what that raised."""
        iterator, self._iterator = self._iterator, None
        try:
            if isinstance(iterator, Generator):
                iterator.close()
        except BaseException as error:  # noqa: BLE001 - as in step.
            return error
        return None

    def post_end(self, error: BaseException | None) -> None:
        """Tell the reader, and drop the generator: what it holds must not die on another thread."""
        self._iterator = None
        del self._steps
        self._post(self._on_end, error)

    def cancel(self) -> None:
        """Changes no container: a finaliser may come here while this thread holds the lock."""
        with self._changed:
            self.is_cancelled = True
            self._changed.notify_all()

    async def next_event(self) -> E:
        while not self._events and not self.ended.is_set():
            self._news.clear()
            await self._news.wait()
        if self._events and not self.is_cancelled:
            event = self._events.popleft()
            with self._changed:
                self.unread -= 1
                self._changed.notify_all()
            return event
        await self.ended.wait()
        error, self._error = self._error, None
        if error is None or self.is_cancelled:
            raise StopAsyncIteration
        raise error

    def _begin(self, now: float) -> None:
        with self._changed:
            self.has_begun = True
        self._context.queue_s = now - self._submitted
        self._iterator = self._steps(self._context)

    def _post_event(self, event: E) -> None:
        with self._changed:
            self.unread += 1
        if not self._post(self._on_event, event):
            self.cancel()

    def _post(self, callback: Callable[..., None], value: object) -> bool:
        """False if the loop is closed: nobody is left to read."""
        try:
            self._loop.call_soon_threadsafe(callback, value)
        except RuntimeError:
            return False
        return True

    def _on_event(self, event: E) -> None:
        if not self.is_cancelled:
            self._events.append(event)
            self._news.set()

    def _on_end(self, error: BaseException | None) -> None:
        self._error = error
        self.ended.set()
        self._news.set()


def _is_fatal(error: BaseException) -> bool:
    """A broken invariant or a broken device: never answer from doubtful state."""
    if isinstance(error, AssertionError | torch.AcceleratorError) or not isinstance(
        error, Exception
    ):
        return True
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)
