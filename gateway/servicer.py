"""The gateway's RPCs: messages to requests, turns to messages; one code path for all of them."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import fields
from typing import Any

import grpc
import structlog

from gateway.admission import TurnSlots
from gateway.events import (
    Counts,
    Delta,
    Explanation,
    TurnEvent,
    TurnFinished,
    TurnStarted,
)
from gateway.explain import Chunk, chunks_of
from gateway.metrics import GatewayMetrics
from gateway.planner import Decision, PrefillMode
from gateway.ports import KvUse, Model, Progress, Scored, TargetFacts
from gateway.requests import (
    Bounds,
    Defaults,
    TurnRequest,
    bounds_of,
    defaults_of,
    resolve_explain,
    resolve_turn,
)
from gateway.settings import GatewaySettings
from gateway.timings import Timings
from gateway.turn import Turn, TurnServices
from serving import wire
from serving.errors import (
    DeadlineExceeded,
    SlowConsumer,
    TokenizerMismatch,
    UpstreamUnavailable,
)
from serving.keep_plan import PlanSettings
from serving.sampling_settings import Sampling
from serving.status import REQUEST_ID_KEY
from serving.telemetry import distribution_version
from specprefill.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2

SERVICE_NAME = gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].full_name
RETRY_AFTER_S = 1.0

Resolve = Callable[..., TurnRequest]

log = structlog.get_logger()


class GatewayServicer(gateway_pb2_grpc.GatewayServicer):
    """specprefill.v1.Gateway."""

    def __init__(
        self,
        settings: GatewaySettings,
        services: TurnServices,
        metrics: GatewayMetrics,
        *,
        tokenizer_digest: str,
        instance_id: str,
    ) -> None:
        """tokenizer_digest: of the gateway's own tokenizer; the target must have the same."""
        self._settings = settings
        self._services = services
        self._metrics = metrics
        self._tokenizer_digest = tokenizer_digest
        self._instance_id = instance_id
        self._slots = TurnSlots(
            running_max=settings.turns_running_max,
            waiting_max=settings.turns_waiting_max,
            clock=services.clock,
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve these RPCs on a server."""
        gateway_pb2_grpc.add_GatewayServicer_to_server(self, server)

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: Any) -> None:
        turn = self._turn(request, context, resolve_turn)

        async def send(event: TurnEvent) -> None:
            await self._write(context, _event_message(event, turn.request))

        async with self._admitted(turn):
            await self._run(turn, send)
        _name_request(context, turn.request)

    async def Complete(
        self, request: gateway_pb2.CompleteRequest, context: Any
    ) -> gateway_pb2.CompleteResponse:
        turn = self._turn(request, context, resolve_turn)
        response = gateway_pb2.CompleteResponse()
        texts: list[str] = []
        token_ids: list[int] = []

        async def collect(event: TurnEvent) -> None:
            if isinstance(event, Delta):
                texts.append(event.text)
                token_ids.extend(event.token_ids)
            elif isinstance(event, TurnStarted):
                response.started.CopyFrom(_started(event, turn.request))
            elif isinstance(event, TurnFinished):
                response.finished.CopyFrom(_finished(event, turn.request))

        async with self._admitted(turn):
            await self._run(turn, collect)
        response.text = "".join(texts)
        response.token_ids = wire.ids_to_bytes(token_ids)
        _name_request(context, turn.request)
        return response

    async def Explain(
        self, request: gateway_pb2.ExplainRequest, context: Any
    ) -> gateway_pb2.ExplainResponse:
        turn = self._turn(request, context, resolve_explain)
        async with self._admitted(turn):
            explanation = await turn.explain()
            response = await asyncio.to_thread(
                self._explanation, explanation, turn.request, include_text=request.include_text
            )
        _name_request(context, turn.request)
        return response

    async def GetServerInfo(
        self, request: gateway_pb2.GetServerInfoRequest, context: Any
    ) -> gateway_pb2.GetServerInfoResponse:
        target, scorer = self._services.target.facts, self._services.scorer.facts
        defaults = defaults_of(self._settings, scorer)
        response = gateway_pb2.GetServerInfoResponse(
            version=distribution_version(),
            instance_id=self._instance_id,
            # One gateway process is one owner of handles.
            boot_id=self._instance_id,
            completion_tokens_max=self._settings.completion_tokens_max,
            defaults=_default_settings(defaults),
        )
        if target is not None:
            response.target.CopyFrom(_model_message(target.model))
            response.target_kv.CopyFrom(_kv_message(target.kv))
            response.prompt_tokens_max = target.model.positions_max
        if scorer is not None:
            response.draft.CopyFrom(_model_message(scorer.model))
            response.draft_kv.CopyFrom(_kv_message(scorer.kv))
            response.tokenizers_match = scorer.model.tokenizer_digest == self._tokenizer_digest
        return response

    def _turn(self, message: Any, context: Any, resolve: Resolve) -> Turn:
        """The turn of a request; whatever is wrong with the request itself is raised here."""
        arrived_at = self._services.clock()
        target = self._target_facts()
        request = resolve(message, defaults=self._defaults(), bounds=self._bounds(target))
        given_s = context.time_remaining()
        left_s = self._settings.turn_s_max if given_s is None else given_s
        return Turn(
            request,
            services=self._services,
            target=target,
            arrived_at=arrived_at,
            deadline_at=arrived_at + min(left_s, self._settings.turn_s_max),
        )

    def _target_facts(self) -> TargetFacts:
        facts = self._services.target.facts
        if facts is None:
            raise UpstreamUnavailable(
                "the target service cannot be reached", retry_after_s=RETRY_AFTER_S
            )
        if facts.model.tokenizer_digest != self._tokenizer_digest:
            raise TokenizerMismatch("the target service has another tokenizer than the gateway")
        return facts

    def _defaults(self) -> Defaults:
        return defaults_of(self._settings, self._services.scorer.facts)

    def _bounds(self, target: TargetFacts) -> Bounds:
        return bounds_of(self._settings, target.model, self._services.scorer.facts)

    @asynccontextmanager
    async def _admitted(self, turn: Turn) -> AsyncIterator[None]:
        """A place for the turn inside the block, and its deadline over all of it."""
        left_s = turn.deadline_at - self._services.clock()
        with self._metrics.running.track_inprogress():
            try:
                async with asyncio.timeout(left_s), self._slots.taken() as queue_s:
                    turn.admitted(queue_s)
                    yield
            except TimeoutError:
                raise DeadlineExceeded(f"the deadline expired during {turn.phase.value}") from None
            except asyncio.CancelledError:
                self._metrics.cancelled(turn.phase)
                raise

    async def _run(self, turn: Turn, tell: Callable[[TurnEvent], Awaitable[None]]) -> None:
        async with aclosing(turn.events()) as events:
            async for event in events:
                self._metrics.observe(event)
                if isinstance(event, TurnFinished):
                    _log_finished(event, turn.request)
                await tell(event)

    async def _write(self, context: Any, message: gateway_pb2.GenerateResponse) -> None:
        """Send one message. A client that takes none ends its turn, which frees what it held.

        The message stays with the transport, and so does the status, until the client reads on or
        goes.
        """
        try:
            async with asyncio.timeout(self._settings.write_s_max) as limit:
                await context.write(message)
        except TimeoutError:
            if not limit.expired():
                raise
            raise SlowConsumer(
                f"the client took no message for {self._settings.write_s_max} seconds",
                metadata={"limit_s": str(self._settings.write_s_max)},
            ) from None

    def _explanation(
        self, found: Explanation, request: TurnRequest, *, include_text: bool
    ) -> gateway_pb2.ExplainResponse:
        scored = found.scored
        digest = None if scored is None else scored.plan.settings_digest
        response = gateway_pb2.ExplainResponse(
            request_id=request.request_id,
            decision=_decision_message(found.decision),
            settings=_request_settings(request, digest),
            counts=_counts_message(found.counts),
            timings=_timings_message(found.timings),
        )
        if scored is not None:
            wire.fill_plan(response.plan, scored.plan)
            for chunk in chunks_of(scored.plan):
                message = response.chunks.add()
                _fill_chunk(message, chunk, scored)
                if include_text:
                    ids = found.prompt.token_ids[chunk.positions.start : chunk.positions.end]
                    message.text = self._services.encoder.decode(ids.tolist())
        return response


def _log_finished(finished: TurnFinished, request: TurnRequest) -> None:
    log.info(
        "turn_finished",
        request_id=request.request_id,
        path=finished.decision.path.name,
        reason=finished.decision.reason.name,
        finish_reason=finished.finish_reason.name,
        prompt_tokens=finished.counts.prompt_tokens,
        executed_tokens=finished.counts.executed_tokens,
        completion_tokens=finished.counts.completion_tokens,
        time_to_first_token_s=round(finished.timings.time_to_first_token_s, 6),
    )


def _event_message(event: TurnEvent, request: TurnRequest) -> gateway_pb2.GenerateResponse:
    if isinstance(event, Delta):
        return gateway_pb2.GenerateResponse(
            delta=gateway_pb2.Delta(text=event.text, token_ids=wire.ids_to_bytes(event.token_ids))
        )
    if isinstance(event, Progress):
        return gateway_pb2.GenerateResponse(progress=_progress_message(event))
    if isinstance(event, TurnStarted):
        return gateway_pb2.GenerateResponse(started=_started(event, request))
    return gateway_pb2.GenerateResponse(finished=_finished(event, request))


def _started(started: TurnStarted, request: TurnRequest) -> gateway_pb2.Started:
    return gateway_pb2.Started(
        request_id=request.request_id,
        prompt_tokens=started.prompt_tokens,
        protected_head_tokens=started.protected_head_tokens,
        settings=_request_settings(request, None),
    )


def _finished(finished: TurnFinished, request: TurnRequest) -> gateway_pb2.Finished:
    digest = None if finished.plan is None else finished.plan.settings_digest
    message = gateway_pb2.Finished(
        request_id=request.request_id,
        finish_reason=_number(finished.finish_reason),
        matched_stop_string=finished.matched_stop_string,
        matched_stop_token_id=finished.matched_stop_token_id,
        decision=_decision_message(finished.decision),
        counts=_counts_message(finished.counts),
        timings=_timings_message(finished.timings),
        settings=_request_settings(request, digest),
    )
    if finished.plan is not None:
        wire.fill_plan(message.plan, finished.plan)
    return message


def _request_settings(request: TurnRequest, digest: bytes | None) -> gateway_pb2.EffectiveSettings:
    """digest: the scorer's word, once it made a plan."""
    return _settings_message(
        mode=request.mode,
        plan=request.plan,
        threshold_tokens=request.threshold_tokens,
        sampling=request.sampling,
        max_tokens=request.stops.max_tokens,
        digest=digest,
    )


def _default_settings(defaults: Defaults) -> gateway_pb2.EffectiveSettings:
    return _settings_message(
        mode=defaults.mode,
        plan=defaults.plan,
        threshold_tokens=defaults.threshold_tokens,
        sampling=defaults.sampling,
        max_tokens=defaults.max_tokens,
        digest=None,
    )


def _settings_message(
    *,
    mode: PrefillMode,
    plan: PlanSettings,
    threshold_tokens: int,
    sampling: Sampling,
    max_tokens: int,
    digest: bytes | None,
) -> gateway_pb2.EffectiveSettings:
    message = gateway_pb2.EffectiveSettings(
        mode=_number(mode),
        threshold_tokens=threshold_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        max_tokens=max_tokens,
        settings_digest=digest or b"",
    )
    wire.fill_plan_settings(message.plan, plan)
    return message


def _decision_message(decision: Decision) -> gateway_pb2.Decision:
    return gateway_pb2.Decision(path=_number(decision.path), reason=_number(decision.reason))


def _progress_message(progress: Progress) -> types_pb2.Progress:
    return types_pb2.Progress(
        phase=_number(progress.phase),
        done_tokens=progress.done_tokens,
        total_tokens=progress.total_tokens,
    )


def _fill_chunk(message: gateway_pb2.ChunkExplanation, chunk: Chunk, scored: Scored) -> None:
    message.chunk = chunk.index
    message.positions.start = chunk.positions.start
    message.positions.end = chunk.positions.end
    message.state = _number(chunk.state)
    if scored.chunk_importance is not None:
        message.importance = scored.chunk_importance[chunk.index]


def _number(value: enum.Enum) -> Any:
    """Our enums have the numbers of their messages; a test compares them."""
    return value.value


# Messages whose fields have the names of ours.


def _counts_message(counts: Counts) -> gateway_pb2.TokenCounts:
    return gateway_pb2.TokenCounts(**_values(counts))


def _timings_message(timings: Timings) -> gateway_pb2.Timings:
    return gateway_pb2.Timings(**_values(timings))


def _model_message(model: Model) -> types_pb2.ModelInfo:
    return types_pb2.ModelInfo(**_values(model))


def _kv_message(kv: KvUse) -> types_pb2.KvUsage:
    return types_pb2.KvUsage(**_values(kv))


def _values(value: Counts | Timings | Model | KvUse) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _name_request(context: Any, request: TurnRequest) -> None:
    """The request id beside a reply; an error gets it from the interceptor."""
    context.set_trailing_metadata(((REQUEST_ID_KEY, request.request_id),))
