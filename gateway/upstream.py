"""The two services over gRPC: messages to values and back, deadlines, cancellation, errors.

Nothing is retried here. A call's generator cancels its RPC when it is closed, however it ends.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import numpy as np

from gateway.facts import FactsWatch
from gateway.ports import (
    GenerateCall,
    Generated,
    GenerateEvent,
    KvUse,
    Model,
    Phase,
    Progress,
    Restored,
    ScoreCall,
    Scored,
    ScoreEvent,
    ScorerFacts,
    ScoreTimes,
    TargetFacts,
    TargetTimes,
    Tokens,
)
from serving import status, wire
from serving.channel import Options
from serving.errors import InternalError, InvalidRequest, UpstreamUnavailable
from serving.finish import FinishReason
from serving.keep_plan import chunk_count
from specprefill.v1 import scorer_pb2, scorer_pb2_grpc, target_pb2, target_pb2_grpc

T = TypeVar("T", ScoreTimes, TargetTimes)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamTerms:
    """How both services are called. instance_id: this gateway process, the owner of its handles."""

    instance_id: str
    options: Options
    refresh_s: float
    info_s_max: float


class GrpcScorer:
    """The scorer service behind the Scorer port."""

    def __init__(self, address: str, terms: UpstreamTerms) -> None:
        self._terms = terms
        self._channel = grpc.aio.insecure_channel(address, options=terms.options)
        self._stub = scorer_pb2_grpc.ScorerStub(self._channel)
        self.watch = FactsWatch(self._ask, service="scorer", refresh_s=terms.refresh_s)

    @property
    def facts(self) -> ScorerFacts | None:
        return self.watch.facts

    async def score(self, call: ScoreCall, *, timeout_s: float) -> AsyncGenerator[ScoreEvent, None]:
        """Progress, then one Scored. Raises the error that the service raised."""
        rpc = self._stub.Score(
            _score_request(call, self._terms.instance_id),
            timeout=timeout_s,
            metadata=_metadata(call.request_id),
        )
        async with aclosing(_responses(rpc, self.watch, last="result")) as responses:
            async for response in responses:
                if response.WhichOneof("event") == "result":
                    self.watch.saw(response.result.boot_id)
                    yield _scored(response.result, call)
                else:
                    yield _progress(response.progress)

    async def close(self) -> None:
        await self._channel.close()

    async def _ask(self) -> ScorerFacts:
        try:
            info = await self._stub.GetInfo(
                scorer_pb2.ScorerGetInfoRequest(), timeout=self._terms.info_s_max
            )
        except grpc.aio.AioRpcError as error:
            raise status.raised(error) from error
        return ScorerFacts(
            version=info.version,
            boot_id=info.boot_id,
            model=_model(info.model),
            kv=_kv(info.kv),
            default_query_mode=wire.query_mode_from(
                info.default_query_mode, field="default_query_mode"
            ),
            lookahead_tokens_max=info.lookahead_tokens_max,
            window_tokens_max=info.window_tokens_max,
            head_set=info.head_set,
        )


class GrpcTarget:
    """The target service behind the Target port."""

    def __init__(self, address: str, terms: UpstreamTerms) -> None:
        self._terms = terms
        self._channel = grpc.aio.insecure_channel(address, options=terms.options)
        self._stub = target_pb2_grpc.TargetStub(self._channel)
        self.watch = FactsWatch(self._ask, service="target", refresh_s=terms.refresh_s)

    @property
    def facts(self) -> TargetFacts | None:
        return self.watch.facts

    async def generate(
        self, call: GenerateCall, *, timeout_s: float
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Restored, progress, tokens, then one Generated. Raises what the service raised."""
        rpc = self._stub.Generate(
            _generate_request(call, self._terms.instance_id),
            timeout=timeout_s,
            metadata=_metadata(call.request_id),
        )
        async with aclosing(_responses(rpc, self.watch, last="finished")) as responses:
            async for response in responses:
                kind = response.WhichOneof("event")
                if kind == "started":
                    self.watch.saw(response.started.boot_id)
                    yield Restored(response.started.restored_tokens)
                elif kind == "progress":
                    yield _progress(response.progress)
                elif kind == "tokens":
                    yield _tokens(response.tokens)
                else:
                    yield _generated(response.finished)

    async def release(self, handles: Sequence[str], *, timeout_s: float) -> None:
        request = target_pb2.TargetReleaseRequest(
            instance_id=self._terms.instance_id, handles=handles
        )
        try:
            reply = await self._stub.Release(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise status.raised(error) from error
        self.watch.saw(reply.boot_id)

    async def close(self) -> None:
        await self._channel.close()

    async def _ask(self) -> TargetFacts:
        try:
            info = await self._stub.GetInfo(
                target_pb2.TargetGetInfoRequest(), timeout=self._terms.info_s_max
            )
        except grpc.aio.AioRpcError as error:
            raise status.raised(error) from error
        return TargetFacts(
            version=info.version, boot_id=info.boot_id, model=_model(info.model), kv=_kv(info.kv)
        )


async def _responses(rpc: Any, watch: FactsWatch[Any], *, last: str) -> AsyncGenerator[Any, None]:
    """The RPC's responses up to its end; cancels it if the reader goes earlier.

    last: the event that completes the stream. How the connection ends after it does not matter.
    """
    is_complete = False
    try:
        async for response in rpc:
            kind = response.WhichOneof("event")
            # An event of a newer version is skipped.
            if kind is not None:
                is_complete = kind == last
                yield response
    except grpc.aio.AioRpcError as error:
        if is_complete:
            return
        rebuilt = status.raised(error)
        if isinstance(rebuilt, UpstreamUnavailable):
            watch.lost()
        raise rebuilt from error
    finally:
        rpc.cancel()
    if not is_complete:
        raise InternalError("the service ended its stream without its last message")


def _metadata(request_id: str) -> tuple[tuple[str, str], ...]:
    return ((status.REQUEST_ID_KEY, request_id),)


def _score_request(call: ScoreCall, instance_id: str) -> scorer_pb2.ScoreRequest:
    request = scorer_pb2.ScoreRequest(
        request_id=call.request_id,
        instance_id=instance_id,
        prompt_token_ids=wire.ids_to_bytes(call.prompt_ids),
        protected_head_tokens=call.protected_head_tokens,
        include_importance=call.include_importance,
    )
    wire.fill_plan_settings(request.settings, call.settings)
    wire.add_spans(request.protected_spans, call.protected_spans)
    return request


def _generate_request(call: GenerateCall, instance_id: str) -> target_pb2.TargetGenerateRequest:
    request = target_pb2.TargetGenerateRequest(
        request_id=call.request_id,
        instance_id=instance_id,
        handle=call.handle,
        prompt_token_ids=wire.ids_to_bytes(call.prompt_ids),
        protected_head_tokens=call.protected_head_tokens,
    )
    if call.plan is not None:
        wire.fill_plan(request.plan, call.plan)
    wire.add_spans(request.protected_spans, call.protected_spans)
    wire.fill_sampling(request.sampling, call.sampling)
    wire.fill_stops(request.stop, call.stops)
    return request


def _scored(result: scorer_pb2.ScoreResult, call: ScoreCall) -> Scored:
    try:
        plan = wire.plan_from(result.plan)
    except InvalidRequest as error:
        # Here it is the service that said something wrong, not our caller.
        raise InternalError(f"the scorer sent a plan that is none: {error.message}") from error
    importance = None
    if call.include_importance:
        chunks = chunk_count(call.prompt_ids.size, call.settings.chunk_tokens)
        importance = wire.importance_from_bytes(result.chunk_importance, chunks=chunks)
    return Scored(
        plan=plan,
        chunk_importance=importance,
        restored_tokens=result.counts.restored_tokens,
        prefilled_tokens=result.counts.prefilled_tokens,
        queries=result.counts.queries,
        times=_times(result.timings, ScoreTimes),
    )


def _tokens(tokens: target_pb2.TargetTokens) -> Tokens:
    ids = tuple(np.frombuffer(tokens.token_ids, dtype="<u4").tolist())
    if not tokens.HasField("first_token_timings"):
        return Tokens(ids)
    return Tokens(ids, _times(tokens.first_token_timings, TargetTimes))


def _generated(finished: target_pb2.TargetFinished) -> Generated:
    try:
        reason = FinishReason(finished.finish_reason)
    except ValueError:
        raise InternalError(f"the target sent finish reason {finished.finish_reason}") from None
    return Generated(
        finish_reason=reason,
        matched_stop_string=_optional(finished, "matched_stop_string"),
        matched_stop_token_id=_optional(finished, "matched_stop_token_id"),
        dense_restored_tokens=finished.counts.dense_restored_tokens,
        sparse_restored_tokens=finished.counts.sparse_restored_tokens,
        executed_tokens=finished.counts.executed_tokens,
        completion_tokens=finished.counts.completion_tokens,
        sparse=finished.sparse,
        times=_times(finished.timings, TargetTimes),
    )


def _progress(progress: Any) -> Progress:
    """A phase that this version does not know is shown as waiting, not refused."""
    known = progress.phase in {phase.value for phase in Phase}
    phase = Phase(progress.phase) if known else Phase.QUEUED
    return Progress(phase, progress.done_tokens, progress.total_tokens)


def _times(message: Any, kind: type[T]) -> T:
    """Fields of both have the same names."""
    return kind(**{name: getattr(message, name) for name in kind.__dataclass_fields__})


def _model(model: Any) -> Model:
    return Model(**{name: getattr(model, name) for name in Model.__dataclass_fields__})


def _kv(kv: Any) -> KvUse:
    return KvUse(**{name: getattr(kv, name) for name in KvUse.__dataclass_fields__})


def _optional(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None
