"""Whether this process takes a request now: it is loaded, not stopping and not full."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from serving.errors import QueueFull, Unavailable
from serving.telemetry import split_method

RETRY_AFTER_S = 1.0


class State(enum.Enum):
    LOADING = "loading"
    SERVING = "serving"
    # Load balancers are told; requests that still come are served.
    DRAINING = "draining"
    STOPPED = "stopped"


class Admission:
    """The door, and the count of what is inside. Health checks and reflection do not pass it.

    services: fully qualified names. rpcs_max: how many of their RPCs run at once.
    """

    def __init__(self, *, services: Collection[str], rpcs_max: int) -> None:
        self._services = frozenset(services)
        self._rpcs_max = rpcs_max
        self.state = State.LOADING
        self.running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def held(self, method: str) -> Iterator[None]:
        """Hold a place for an RPC of "/package.Service/Method"; raises Unavailable or QueueFull."""
        if split_method(method)[0] not in self._services:
            yield
            return
        self._check()
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if self.running == 0:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until none of their RPCs runs."""
        await self._idle.wait()

    def _check(self) -> None:
        if self.state in (State.LOADING, State.STOPPED):
            raise Unavailable(
                "the model is still loading"
                if self.state is State.LOADING
                else "the service is stopping",
                metadata={"state": self.state.value},
                retry_after_s=RETRY_AFTER_S,
            )
        if self.running >= self._rpcs_max:
            raise QueueFull(
                f"{self._rpcs_max} requests are in work, the limit of this service",
                metadata={"limit": str(self._rpcs_max)},
                retry_after_s=RETRY_AFTER_S,
            )
