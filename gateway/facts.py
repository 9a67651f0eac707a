"""What the other services are, asked again and again: they come, go and restart as they like."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

import structlog

from serving.errors import DeadlineExceeded, ServiceError

# A busy service may answer late now and then; one that is gone refuses at once.
LATE_ANSWERS_MAX = 3

log = structlog.get_logger()


class Booted(Protocol):
    """Facts name the process they are about."""

    @property
    def boot_id(self) -> str: ...


F = TypeVar("F", bound=Booted)


class FactsWatch(Generic[F]):
    """Keeps the facts of one service fresh. facts is None while the service is not there."""

    def __init__(self, ask: Callable[[], Awaitable[F]], *, service: str, refresh_s: float) -> None:
        """ask raises ServiceError; it bounds its own time."""
        self._ask = ask
        self._service = service
        self._refresh_s = refresh_s
        self._ask_now = asyncio.Event()
        self._changed = asyncio.Condition()
        self._boot_id: str | None = None
        self._late_answers = 0
        self.facts: F | None = None

    async def run(self) -> None:
        """Ask for ever."""
        while True:
            self._ask_now.clear()
            await self.refresh()
            try:
                async with asyncio.timeout(self._refresh_s):
                    await self._ask_now.wait()
            except TimeoutError:
                pass

    async def refresh(self) -> None:
        """Ask once."""
        try:
            facts = await self._ask()
        except DeadlineExceeded:
            self._late_answers += 1
            if self._late_answers >= LATE_ANSWERS_MAX:
                self._gone("late")
        except ServiceError as error:
            self._gone(error.reason)
        else:
            self._late_answers = 0
            self._there(facts)
        async with self._changed:
            self._changed.notify_all()

    async def until(self, holds: Callable[[F | None], bool]) -> None:
        """Wait until the facts satisfy a condition; it is looked at after every answer."""
        async with self._changed:
            await self._changed.wait_for(lambda: holds(self.facts))

    def lost(self) -> None:
        """A call found nobody there: believe it, and ask again now."""
        self._gone("lost")
        self._ask_now.set()

    def saw(self, boot_id: str) -> None:
        """A reply named its process: if that is a new one, the facts are old."""
        if self.facts is not None and boot_id != self.facts.boot_id:
            self._ask_now.set()

    def _there(self, facts: F) -> None:
        if self._boot_id is not None and facts.boot_id != self._boot_id:
            log.warning("upstream_restarted", upstream=self._service, boot_id=facts.boot_id)
        elif self.facts is None:
            log.info("upstream_found", upstream=self._service, boot_id=facts.boot_id)
        self._boot_id = facts.boot_id
        self.facts = facts

    def _gone(self, reason: str) -> None:
        if self.facts is not None:
            log.warning("upstream_gone", upstream=self._service, reason=reason)
        self.facts = None
