"""The Scorer service on the event loop: messages to values and back. No torch call runs here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import structlog

from engine.gpu_thread import GpuThread, JobStream
from scorer_service.draft import Draft
from scorer_service.metrics import Outcome, ScorerMetrics
from scorer_service.request import CallLimits, score_job
from scorer_service.scoring import HEAD_SET, Phase, Scored, ScoreJob, ScoreProgress
from scorer_service.settings import ScorerSettings
from scorer_service.timings import Stage
from serving import wire
from serving.errors import (
    InternalError,
    NonFiniteImportance,
    QueueFull,
    ServiceError,
    Unavailable,
)
from serving.handle_calls import released_handles
from serving.keep_plan import QueryMode
from serving.telemetry import distribution_version
from specprefill.v1 import scorer_pb2, scorer_pb2_grpc, types_pb2

PHASES = {
    Phase.PREFILL: types_pb2.PHASE_SCORE_PREFILL,
    Phase.QUERIES: types_pb2.PHASE_SCORE_QUERIES,
    Phase.K_PASS: types_pb2.PHASE_SCORE_K_PASS,
    Phase.SELECT: types_pb2.PHASE_SCORE_SELECT,
}

log = structlog.get_logger()


class ScorerServicer(scorer_pb2_grpc.ScorerServicer):
    """Checks requests before any model work, queues them for the GPU thread and streams events."""

    def __init__(
        self, settings: ScorerSettings, gpu: GpuThread, metrics: ScorerMetrics, *, boot_id: str
    ) -> None:
        self._settings = settings
        self._gpu = gpu
        self._metrics = metrics
        self._boot_id = boot_id
        self._opened: Draft | None = None
        self._limits: CallLimits | None = None

    def open(self, draft: Draft) -> None:
        """Take requests for this draft from now on."""
        self._opened = draft
        self._limits = CallLimits(
            vocab=draft.facts.vocab_tokens,
            positions_max=draft.facts.positions_max,
            lookahead_tokens_max=self._settings.lookahead_tokens_max,
            window_tokens_max=self._settings.window_tokens_max,
            lease_s_max=self._settings.lease_s_max,
        )

    async def Score(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Progress, then the result. See scorer.proto."""
        arrived = time.perf_counter()
        with self._counted(request):
            job = score_job(request, limits=self._call_limits)
            scorer = self._draft.scorer
            budget = scorer.budget(job)
            stream: JobStream[ScoreProgress | Scored] = self._gpu.submit(
                lambda turns: scorer.steps(job, budget, turns)
            )
            is_delivered = False
            try:
                yield _progress(types_pb2.PHASE_QUEUED, 0, job.prompt_tokens)
                async for event in stream:
                    if isinstance(event, ScoreProgress):
                        phase = PHASES[event.phase]
                        yield _progress(phase, event.done_tokens, event.total_tokens)
                    else:
                        total_s = time.perf_counter() - arrived
                        self._report(job, event, total_s)
                        yield self._result(request, job, event, total_s)
                is_delivered = True
            finally:
                await stream.aclose()
                if not is_delivered and job.is_kept:
                    await self._retract(job)

    async def Release(self, request: Any, context: Any) -> Any:
        """Free kept draft sequences. See scorer.proto."""
        handles = released_handles(request, handles_max=self._settings.release_handles_max)
        store = self._draft.scorer.handles

        def release() -> tuple[int, int]:
            store.claim(request.instance_id)
            return store.release(handles)

        released, freed_bytes = await self._gpu.call(release)
        return scorer_pb2.ScorerReleaseResponse(
            released=released, freed_bytes=freed_bytes, boot_id=self._boot_id
        )

    async def GetInfo(self, request: Any, context: Any) -> Any:
        """The draft and the limits. Reads a few integers, so it never waits for the GPU thread."""
        draft, scorer = self._draft, self._draft.scorer
        response = scorer_pb2.ScorerGetInfoResponse(
            version=distribution_version(),
            boot_id=self._boot_id,
            default_query_mode=types_pb2.QueryMode.Name(
                wire.query_mode_number(draft.default_query_mode)
            ),
            lookahead_tokens_max=self._settings.lookahead_tokens_max,
            window_tokens_max=self._settings.window_tokens_max,
            head_set=HEAD_SET,
        )
        for field in types_pb2.ModelInfo.DESCRIPTOR.fields_by_name:
            setattr(response.model, field, getattr(draft.facts, field))
        for field in ("pages_total", "pages_free", "page_tokens", "page_bytes"):
            setattr(response.kv, field, getattr(scorer.cache, field))
        response.kv.handles = len(scorer.handles)
        return response

    async def _retract(self, job: ScoreJob) -> None:
        """Free what was kept for a caller who is gone; a full queue leaves that to its lease."""
        scorer = self._draft.scorer
        with suppress(QueueFull, Unavailable):
            await self._gpu.call(lambda: scorer.retract(job))

    @property
    def pages_used(self) -> int:
        """Pages in use now; 0 before the draft is loaded."""
        if self._opened is None:
            return 0
        cache = self._opened.scorer.cache
        return cache.pages_total - cache.pages_free

    @property
    def handles_held(self) -> int:
        """Draft sequences kept now; 0 before the draft is loaded."""
        return len(self._opened.scorer.handles) if self._opened is not None else 0

    @property
    def _draft(self) -> Draft:
        if self._opened is None:
            raise Unavailable("the model is still loading")
        return self._opened

    @property
    def _call_limits(self) -> CallLimits:
        if self._limits is None:
            raise Unavailable("the model is still loading")
        return self._limits

    @contextmanager
    def _counted(self, request: Any) -> Iterator[None]:
        """Count how a Score request ends. A mode that does not exist counts as the default's."""
        numbers = {wire.query_mode_number(mode): mode for mode in QueryMode}
        mode = numbers.get(request.settings.query_mode, QueryMode.LOOKAHEAD)
        outcome = Outcome.FAILED
        try:
            yield
            outcome = Outcome.OK
        except (asyncio.CancelledError, GeneratorExit):
            outcome = Outcome.CANCELLED
            raise
        except (InternalError, NonFiniteImportance):
            raise
        except ServiceError:
            outcome = Outcome.REFUSED
            raise
        finally:
            self._metrics.count(mode, outcome)

    def _result(self, request: Any, job: ScoreJob, scored: Scored, total_s: float) -> Any:
        result = scorer_pb2.ScoreResult(
            counts=scorer_pb2.ScoreCounts(
                prompt_tokens=scored.prompt_tokens,
                restored_tokens=scored.restored_tokens,
                prefilled_tokens=scored.prefilled_tokens,
                queries=scored.queries,
            ),
            timings=_timings(scored, total_s),
            boot_id=self._boot_id,
        )
        wire.fill_plan(result.plan, scored.plan)
        if request.include_importance:
            result.chunk_importance = wire.importance_to_bytes(scored.chunk_importance)
        if job.is_kept:
            result.kept.handle, result.kept.tokens = request.keep_handle, job.prompt_tokens
        return scorer_pb2.ScoreResponse(result=result)

    def _report(self, job: ScoreJob, scored: Scored, total_s: float) -> None:
        self._metrics.observe(scored, total_s)
        log.info(
            "scored",
            request_id=job.request_id,
            query_mode=job.settings.query_mode.value,
            prompt_tokens=scored.prompt_tokens,
            restored_tokens=scored.restored_tokens,
            kept_chunks=scored.plan.kept_chunks,
            ranked_chunks=scored.plan.ranked_chunks,
            queries=scored.queries,
            total_s=round(total_s, 6),
            **{f"{stage.value}_s": round(s, 6) for stage, s in scored.stages_s.items()},
        )


def register(servicer: ScorerServicer, server: grpc.aio.Server) -> None:
    """Add the service to a server."""
    scorer_pb2_grpc.add_ScorerServicer_to_server(servicer, server)


def _progress(phase: Any, done_tokens: int, total_tokens: int) -> Any:
    progress = types_pb2.Progress(phase=phase, done_tokens=done_tokens, total_tokens=total_tokens)
    return scorer_pb2.ScoreResponse(progress=progress)


def _timings(scored: Scored, total_s: float) -> Any:
    seconds = scored.stages_s
    return scorer_pb2.ScoreTimings(
        queue_s=seconds[Stage.QUEUE],
        restore_s=seconds[Stage.RESTORE],
        prefill_s=seconds[Stage.PREFILL],
        queries_s=seconds.get(Stage.LOOKAHEAD, 0.0),
        k_pass_s=seconds[Stage.K_PASS],
        select_s=seconds[Stage.SELECT],
        total_s=total_s,
    )
