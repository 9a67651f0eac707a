"""The Target service on the wire: requests into values, events into messages. No torch call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import asdict
from typing import Any

import grpc
import structlog

from engine.gpu_thread import GpuThread, JobStream
from engine.model_service import ModelFacts
from serving.errors import InternalError, QueueFull, ServiceError, Unavailable
from serving.handle_calls import released_handles
from serving.telemetry import distribution_version
from serving.wire import ids_to_bytes
from specprefill.v1 import target_pb2, target_pb2_grpc, types_pb2
from target_service.coalesce import Answer, TokenBatch, coalesced
from target_service.core import TargetCore
from target_service.events import Counts, Event, Finished, Progress, Started
from target_service.metrics import Outcome, TargetMetrics
from target_service.prefill import PrefillKind
from target_service.request import GenerateCall, fork_call, generate_call
from target_service.scheduler import GenerateJob
from target_service.sequences import Usage
from target_service.timings import Timings

RETRY_AFTER_S = 1.0
PHASES = {
    PrefillKind.PROTECTED: types_pb2.PHASE_PROTECTED_PREFILL,
    PrefillKind.SPARSE: types_pb2.PHASE_SPARSE_PREFILL,
    PrefillKind.DENSE: types_pb2.PHASE_DENSE_PREFILL,
}

log = structlog.get_logger()


class TargetServicer(target_pb2_grpc.TargetServicer):
    """Serves once `attach` gave it a loaded core; the server lets no request in before."""

    def __init__(
        self,
        *,
        gpu: GpuThread,
        metrics: TargetMetrics,
        boot_id: str,
        jobs_max: int,
        flush_interval_s: float,
        time_s: Callable[[], float],
    ) -> None:
        """jobs_max: requests at once, fewer than `gpu` takes, so that a Release finds a place."""
        self._gpu = gpu
        self._metrics = metrics
        self._boot_id = boot_id
        self._jobs_max = jobs_max
        self._flush_interval_s = flush_interval_s
        self._time_s = time_s
        self._generating = 0
        self._core: TargetCore | None = None

    def attach(self, core: TargetCore) -> None:
        """Take requests for this core from now on."""
        self._core = core

    @property
    def usage(self) -> Usage | None:
        """Occupancy; None before the core is attached."""
        return self._core.sequences.usage() if self._core else None

    async def Generate(
        self, request: Any, context: Any
    ) -> AsyncGenerator[target_pb2.TargetGenerateResponse, None]:
        """Started, progress, tokens, finished. Leaving the stream cancels the work."""
        received_at = self._time_s()
        outcome = Outcome.FAILED
        try:
            call = generate_call(request, limits=self._loaded.limits, received_at=received_at)
            async with aclosing(self._answers(call)) as answers:
                async for answer in answers:
                    yield answer
            outcome = Outcome.FINISHED
        except InternalError:
            raise
        except ServiceError:
            outcome = Outcome.REFUSED
            raise
        except (asyncio.CancelledError, GeneratorExit):
            outcome = Outcome.CANCELLED
            raise
        finally:
            self._metrics.observe_outcome(outcome)

    async def Fork(self, request: Any, context: Any) -> target_pb2.ForkResponse:
        core = self._loaded
        call = fork_call(request, limits=core.limits)
        positions, slots = await self._gpu.call(lambda: core.sequences.fork(call))
        return target_pb2.ForkResponse(positions=positions, slots=slots, boot_id=self._boot_id)

    async def Release(self, request: Any, context: Any) -> target_pb2.TargetReleaseResponse:
        core = self._loaded
        handles = released_handles(request, handles_max=core.limits.release_handles_max)
        instance_id = request.instance_id
        released, freed_bytes = await self._gpu.call(
            lambda: core.sequences.release(instance_id, handles)
        )
        return target_pb2.TargetReleaseResponse(
            released=released, freed_bytes=freed_bytes, boot_id=self._boot_id
        )

    async def GetInfo(self, request: Any, context: Any) -> target_pb2.TargetGetInfoResponse:
        core = self._loaded
        return target_pb2.TargetGetInfoResponse(
            version=distribution_version(),
            boot_id=self._boot_id,
            model=_model_message(core.facts),
            kv=_kv_message(core.sequences.usage()),
            prefill_chunk_tokens=core.prefill_chunk_tokens,
        )

    @property
    def _loaded(self) -> TargetCore:
        if self._core is None:
            raise Unavailable("the model is still loading")
        return self._core

    async def _answers(
        self, call: GenerateCall
    ) -> AsyncGenerator[target_pb2.TargetGenerateResponse, None]:
        if self._generating >= self._jobs_max:
            raise QueueFull(
                f"{self._jobs_max} requests are queued or running, the limit",
                metadata={"limit": str(self._jobs_max)},
                retry_after_s=RETRY_AFTER_S,
            )
        self._generating += 1
        try:
            async with aclosing(self._worked(GenerateJob(call))) as events:
                async for event in events:
                    yield self._message(event)
        finally:
            self._generating -= 1

    async def _worked(self, job: GenerateJob) -> AsyncGenerator[Answer, None]:
        """The job's events; when it is left, the job is over and an unread keep is taken back."""
        scheduler = self._loaded.scheduler
        stream: JobStream[Event] = self._gpu.submit(lambda turns: scheduler.generate(job, turns))
        is_delivered = False
        try:
            async with aclosing(self._batched(stream)) as events:
                async for event in events:
                    yield event
                    if isinstance(event, Finished):
                        is_delivered = True
                        _log_finished(job, event)
        finally:
            await stream.aclose()
            if job.is_kept and not is_delivered:
                with suppress(QueueFull, Unavailable):
                    await self._gpu.call(lambda: scheduler.retract(job))

    def _batched(self, stream: JobStream[Event]) -> AsyncGenerator[Answer, None]:
        return coalesced(stream, interval_s=self._flush_interval_s, time_s=self._time_s)

    def _message(self, event: Answer) -> target_pb2.TargetGenerateResponse:
        match event:
            case Started():
                started = target_pb2.TargetStarted(
                    boot_id=self._boot_id, restored_tokens=event.restored_tokens
                )
                return target_pb2.TargetGenerateResponse(started=started)
            case Progress():
                progress = types_pb2.Progress(
                    phase=PHASES[event.kind],
                    done_tokens=event.done_tokens,
                    total_tokens=event.total_tokens,
                )
                return target_pb2.TargetGenerateResponse(progress=progress)
            case TokenBatch():
                tokens = target_pb2.TargetTokens(token_ids=ids_to_bytes(event.token_ids))
                if event.timings is not None:
                    tokens.first_token_timings.CopyFrom(_timings_message(event.timings))
                return target_pb2.TargetGenerateResponse(tokens=tokens)
            case Finished():
                finished = _finished_message(event, self._boot_id)
                return target_pb2.TargetGenerateResponse(finished=finished)


def _log_finished(job: GenerateJob, finished: Finished) -> None:
    seconds = {name: round(value, 6) for name, value in asdict(finished.timings).items()}
    log.info(
        "generated",
        request_id=job.call.request_id,
        finish_reason=finished.reason.name,
        is_sparse=finished.sparse,
        is_kept=job.is_kept,
        **{f"{name}_tokens": value for name, value in asdict(finished.counts).items()},
        **seconds,
    )


def _finished_message(finished: Finished, boot_id: str) -> target_pb2.TargetFinished:
    return target_pb2.TargetFinished(
        finish_reason=types_pb2.FinishReason.Name(finished.reason.value),
        matched_stop_string=finished.matched_stop_string,
        matched_stop_token_id=finished.matched_token_id,
        counts=_counts_message(finished.counts),
        timings=_timings_message(finished.timings),
        boot_id=boot_id,
        positions=finished.positions,
        slots=finished.slots,
        sparse=finished.sparse,
    )


def _counts_message(counts: Counts) -> target_pb2.TargetCounts:
    return target_pb2.TargetCounts(
        prompt_tokens=counts.prompt,
        dense_restored_tokens=counts.dense_restored,
        sparse_restored_tokens=counts.sparse_restored,
        executed_tokens=counts.executed,
        protected_executed_tokens=counts.protected_executed,
        completion_tokens=counts.completion,
    )


def _timings_message(timings: Timings) -> target_pb2.TargetTimings:
    return target_pb2.TargetTimings(**asdict(timings))


def _model_message(facts: ModelFacts) -> types_pb2.ModelInfo:
    return types_pb2.ModelInfo(**asdict(facts))


def _kv_message(usage: Usage) -> types_pb2.KvUsage:
    return types_pb2.KvUsage(**asdict(usage))


def register(servicer: TargetServicer, server: grpc.aio.Server) -> None:
    """Add the service to a server."""
    target_pb2_grpc.add_TargetServicer_to_server(servicer, server)
