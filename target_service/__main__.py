"""`python -m target_service`: builds the target from its settings and serves it."""

from __future__ import annotations

import asyncio
import functools
import os
import time
import uuid
from collections.abc import Callable

from engine.gpu_thread import GpuThread
from engine.upkeep import run_every
from serving.server import fatal_reporter, serve
from serving.settings import load_settings_or_exit
from serving.telemetry import configure_logging, make_registry
from target_service.core import load_core
from target_service.metrics import TargetMetrics
from target_service.sequences import Sequences, Usage
from target_service.servicer import TargetServicer, register
from target_service.settings import TargetSettings

SERVICE_NAMES = ("specprefill.v1.Target",)
# Places for forks, releases and upkeep beside the requests, so that memory can be freed under load.
CONTROL_JOBS_MAX = 64


async def run(settings: TargetSettings) -> int:
    """Serve until a signal; returns the exit code."""
    registry = make_registry("target")
    metrics = TargetMetrics(registry)
    fatal = asyncio.Event()
    gpu = GpuThread(
        name="target-gpu",
        jobs_max=settings.jobs_max + CONTROL_JOBS_MAX,
        events_max=settings.events_max,
        on_fatal=fatal_reporter(fatal),
    )
    servicer = TargetServicer(
        gpu=gpu,
        metrics=metrics,
        boot_id=uuid.uuid4().hex,
        jobs_max=settings.jobs_max,
        flush_interval_s=settings.flush_interval_s,
        time_s=time.perf_counter,
    )
    _export_gauges(metrics, servicer, gpu)
    upkeep: list[asyncio.Task[None]] = []

    async def start() -> None:
        gpu.start()
        load = functools.partial(load_core, settings, metrics, time_s=time.perf_counter)
        core = await gpu.call(load)
        servicer.attach(core)
        expire = functools.partial(_expire, core.sequences)
        upkeep.append(asyncio.create_task(run_every(settings.expire_interval_s, gpu, expire)))

    async def stop() -> None:
        for task in upkeep:
            task.cancel()
        await asyncio.to_thread(gpu.stop)

    return await serve(
        settings=settings,
        service_name="target",
        service_names=SERVICE_NAMES,
        add_services=functools.partial(register, servicer),
        registry=registry,
        on_start=start,
        on_stop=stop,
        fatal=fatal,
    )


def main() -> None:
    settings = load_settings_or_exit(TargetSettings, os.environ)
    configure_logging("target", settings.log_level)
    raise SystemExit(asyncio.run(run(settings)))


def _expire(sequences: Sequences) -> None:
    """Free what nobody adopted, and check the books."""
    sequences.expire()
    sequences.check_invariants()


def _export_gauges(metrics: TargetMetrics, servicer: TargetServicer, gpu: GpuThread) -> None:
    """Read at every scrape; all of them are plain integers, safe to read from any thread."""

    def of(read: Callable[[Usage], int]) -> Callable[[], int]:
        return lambda: read(servicer.usage) if servicer.usage else 0

    metrics.export(
        "kv_pages_used",
        "Pages of key-value storage in use.",
        of(lambda usage: usage.pages_total - usage.pages_free),
    )
    metrics.export("kv_pages", "Pages of key-value storage.", of(lambda usage: usage.pages_total))
    metrics.export("handles", "Sequences kept between calls.", of(lambda usage: usage.handles))
    metrics.export("jobs_running", "Jobs that have begun.", lambda: gpu.jobs_running)
    metrics.export("jobs_waiting", "Jobs that wait to begin.", lambda: gpu.jobs_waiting)


if __name__ == "__main__":
    main()
