"""`python -m scorer_service`: builds the scorer from its settings and serves it."""

from __future__ import annotations

import asyncio
import functools
import os
import uuid

from engine.gpu_thread import GpuThread
from engine.upkeep import run_every
from scorer_service.draft import Draft, load_draft
from scorer_service.metrics import ScorerMetrics
from scorer_service.servicer import ScorerServicer, register
from scorer_service.settings import ScorerSettings
from serving.server import fatal_reporter, serve
from serving.settings import load_settings_or_exit
from serving.telemetry import configure_logging, make_registry

SERVICE_NAMES = ("specprefill.v1.Scorer",)


async def run(settings: ScorerSettings) -> int:
    """Serve until a signal; returns the exit code."""
    registry = make_registry("scorer")
    metrics = ScorerMetrics(registry)
    fatal = asyncio.Event()
    gpu = GpuThread(
        name="scorer-gpu",
        jobs_max=settings.jobs_max,
        events_max=settings.events_max,
        on_fatal=fatal_reporter(fatal),
    )
    servicer = ScorerServicer(settings, gpu, metrics, boot_id=uuid.uuid4().hex)
    _export_gauges(metrics, servicer, gpu, settings)
    upkeep: list[asyncio.Task[None]] = []

    async def start() -> None:
        gpu.start()
        draft = await gpu.call(functools.partial(load_draft, settings))
        servicer.open(draft)
        expire = functools.partial(_expire, gpu, draft)
        upkeep.append(asyncio.create_task(run_every(settings.expire_interval_s, gpu, expire)))

    async def stop() -> None:
        for task in upkeep:
            task.cancel()
        await asyncio.to_thread(gpu.stop)

    return await serve(
        settings=settings,
        service_name="scorer",
        service_names=SERVICE_NAMES,
        add_services=functools.partial(register, servicer),
        registry=registry,
        on_start=start,
        on_stop=stop,
        fatal=fatal,
    )


def main() -> None:
    settings = load_settings_or_exit(ScorerSettings, os.environ)
    configure_logging("scorer", settings.log_level)
    raise SystemExit(asyncio.run(run(settings)))


def _expire(gpu: GpuThread, draft: Draft) -> None:
    """Free what nobody adopted; check the books when idle."""
    draft.scorer.handles.expire()
    if gpu.jobs_running + gpu.jobs_waiting == 1:
        draft.scorer.handles.check_invariants()


def _export_gauges(
    metrics: ScorerMetrics, servicer: ScorerServicer, gpu: GpuThread, settings: ScorerSettings
) -> None:
    """Read at every scrape; all of them are plain integers, safe to read from any thread."""
    metrics.export(
        "kv_pages_used", "Pages of key-value storage in use.", lambda: servicer.pages_used
    )
    metrics.export("kv_pages", "Pages of key-value storage.", lambda: settings.pages)
    metrics.export("handles", "Draft sequences kept between calls.", lambda: servicer.handles_held)
    metrics.export("jobs_running", "Scorings that have begun.", lambda: gpu.jobs_running)
    metrics.export("jobs_waiting", "Scorings that wait to begin.", lambda: gpu.jobs_waiting)


if __name__ == "__main__":
    main()
