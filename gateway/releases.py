"""Frees sequences on the target after their turn, away from the turn's own path."""

from __future__ import annotations

import asyncio

import structlog

from gateway.ports import Target
from serving.errors import ServiceError

PENDING_MAX = 1024

log = structlog.get_logger()


class Releases:
    """Releases in the background. One that fails is logged; then the target's lease does it."""

    def __init__(self, target: Target, *, timeout_s: float) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._pending: set[asyncio.Task[None]] = set()

    def release(self, handle: str) -> None:
        """Free a sequence soon. Never waits and never fails, so a cancelled turn can call it."""
        if len(self._pending) >= PENDING_MAX:
            log.warning("release_left_to_lease", handle=handle, pending=len(self._pending))
            return
        task = asyncio.ensure_future(self._released(handle))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def settled(self) -> None:
        """Wait for the releases on their way; each ends within the timeout."""
        if self._pending:
            await asyncio.wait(self._pending)

    async def _released(self, handle: str) -> None:
        try:
            await self._target.release([handle], timeout_s=self._timeout_s)
        except ServiceError as error:
            log.warning("release_failed", handle=handle, reason=error.reason)
