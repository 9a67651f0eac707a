"""Work that a service does between requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from engine.gpu_thread import GpuThread
from serving.errors import QueueFull


async def run_every(interval_s: float, gpu: GpuThread, work: Callable[[], object]) -> None:
    """Run `work` on the GPU thread for ever; a full queue skips a turn."""
    while True:
        await asyncio.sleep(interval_s)
        with contextlib.suppress(QueueFull):
            await gpu.call(work)
