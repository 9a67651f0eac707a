"""The gateway's side of the wire, against scorer and target servers made for these tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from gateway.ports import (
    GenerateCall,
    Generated,
    Phase,
    Progress,
    Restored,
    ScoreCall,
    Scored,
    TargetTimes,
    Tokens,
)
from gateway.readiness import Readiness
from gateway.upstream import GrpcScorer, GrpcTarget, UpstreamTerms
from serving import errors, wire
from serving.channel import CLIENT_CHANNEL_OPTIONS
from serving.finish import FinishReason
from serving.interceptor import ErrorInterceptor
from serving.keep_plan import KeepPlan, PlanSettings, QueryMode, Run
from serving.sampling_settings import Sampling, Stops
from specprefill.v1 import (
    scorer_pb2,
    scorer_pb2_grpc,
    target_pb2,
    target_pb2_grpc,
    types_pb2,
)

TERMS = UpstreamTerms(
    instance_id="me", options=CLIENT_CHANNEL_OPTIONS, refresh_s=0.05, info_s_max=5
)
PLAN = KeepPlan(
    prompt_tokens=20,
    settings=PlanSettings(
        chunk_tokens=4,
        query_mode=QueryMode.TAIL_WINDOW,
        lookahead_temperature=0.5,
        lookahead_seed=9,
    ),
    kept=(Run(1, 3), Run(4, 5)),
    forced=(Run(4, 5),),
    protected_head_tokens=5,
    protected_spans=(Run(9, 11),),
    settings_digest=b"x" * 32,
)
SCORE = ScoreCall(
    request_id="r-1",
    prompt_ids=np.arange(20, dtype=np.uint32),
    settings=PLAN.settings,
    protected_head_tokens=5,
    protected_spans=PLAN.protected_spans,
    include_importance=True,
)
GENERATE = GenerateCall(
    request_id="r-1",
    handle="h-1",
    prompt_ids=np.arange(20, dtype=np.uint32),
    plan=PLAN,
    protected_head_tokens=5,
    protected_spans=PLAN.protected_spans,
    sampling=Sampling(temperature=0.5, top_k=3, top_p=0.25, seed=7),
    stops=Stops(
        max_tokens=9,
        stop_strings=("a", "b"),
        stop_token_ids=frozenset({5}),
        ignore_end_tokens=True,
    ),
)
MODEL = types_pb2.ModelInfo(
    name="m", tokenizer_digest="d", layers=3, layers_used=2, vocab_tokens=99, positions_max=512
)


class Service(scorer_pb2_grpc.ScorerServicer, target_pb2_grpc.TargetServicer):
    """Both services; `respond` says what a stream does, `hold` is where it waits."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.metadata: dict[str, Any] = {}
        self.remaining_s: float | None = None
        self.respond: Callable[[], Any] = lambda: ()
        self.boot_id = "boot-1"
        self.model = MODEL
        self.open = 0
        self.cancelled = asyncio.Event()

    async def Score(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for response in self._stream(request, context):
            yield response

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for response in self._stream(request, context):
            yield response

    async def Release(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return target_pb2.TargetReleaseResponse(released=1, boot_id=self.boot_id)

    async def _stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        self.remaining_s = context.time_remaining()
        self.open += 1
        try:
            for step in self.respond():
                if isinstance(step, errors.ServiceError):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield step
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.open -= 1


class ScorerInfo:
    """GetInfo of the scorer; the two services share the method's name."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.Score = service.Score
        self.Release = service.Release

    async def GetInfo(self, request: Any, context: Any) -> Any:
        return scorer_pb2.ScorerGetInfoResponse(
            version="1",
            boot_id=self.service.boot_id,
            model=self.service.model,
            kv=types_pb2.KvUsage(pages_total=7),
            default_query_mode=types_pb2.QUERY_MODE_TAIL_WINDOW,
            lookahead_tokens_max=64,
            window_tokens_max=256,
            head_set="all",
        )


class TargetInfo(ScorerInfo):
    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.Generate = service.Generate
        self.Fork = service.Release

    async def GetInfo(self, request: Any, context: Any) -> Any:
        return target_pb2.TargetGetInfoResponse(
            version="1", boot_id=self.service.boot_id, model=self.service.model
        )


@asynccontextmanager
async def _serving(service: Service, port: int = 0) -> AsyncIterator[tuple[grpc.aio.Server, int]]:
    options = (("grpc.so_reuseport", 0),)
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=options)
    scorer_pb2_grpc.add_ScorerServicer_to_server(ScorerInfo(service), server)
    target_pb2_grpc.add_TargetServicer_to_server(TargetInfo(service), server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield server, port
    finally:
        await server.stop(None)


@asynccontextmanager
async def _scorer(service: Service) -> AsyncIterator[GrpcScorer]:
    async with _serving(service) as (_, port):
        scorer = GrpcScorer(f"127.0.0.1:{port}", TERMS)
        yield scorer
        await scorer.close()


@asynccontextmanager
async def _target(service: Service) -> AsyncIterator[GrpcTarget]:
    async with _serving(service) as (_, port):
        target = GrpcTarget(f"127.0.0.1:{port}", TERMS)
        yield target
        await target.close()


def _result(chunks: int = 5) -> scorer_pb2.ScoreResponse:
    response = scorer_pb2.ScoreResponse()
    wire.fill_plan(response.result.plan, PLAN)
    response.result.chunk_importance = wire.importance_to_bytes(np.arange(chunks, dtype=np.float32))
    response.result.counts.prefilled_tokens = 12
    response.result.counts.restored_tokens = 8
    response.result.counts.queries = 16
    response.result.timings.k_pass_s = 0.5
    response.result.timings.total_s = 2.0
    response.result.boot_id = "boot-1"
    return response


def _progress(phase: int, done: int, total: int) -> types_pb2.Progress:
    return types_pb2.Progress(phase=phase, done_tokens=done, total_tokens=total)


async def _all(stream: Any) -> list[Any]:
    return [event async for event in stream]


async def test_a_score_goes_out_whole_and_comes_back_whole() -> None:
    service = Service()
    service.respond = lambda: (
        scorer_pb2.ScoreResponse(progress=_progress(types_pb2.PHASE_SCORE_PREFILL, 4, 20)),
        _result(),
    )
    async with _scorer(service) as scorer:
        progress, result = await _all(scorer.score(SCORE, timeout_s=10))
    assert progress == Progress(Phase.SCORE_PREFILL, 4, 20)
    assert isinstance(result, Scored)
    assert result.plan == PLAN
    assert result.chunk_importance is not None
    assert result.chunk_importance.tolist() == [0, 1, 2, 3, 4]
    assert (result.prefilled_tokens, result.restored_tokens, result.queries) == (12, 8, 16)
    assert (result.times.k_pass_s, result.times.total_s) == (0.5, 2.0)
    (request,) = service.requests
    assert request.request_id == "r-1"
    assert request.instance_id == "me"
    assert request.prompt_token_ids == wire.ids_to_bytes(SCORE.prompt_ids)
    assert wire.plan_settings_from(request.settings) == SCORE.settings
    assert wire.spans_from(request.protected_spans, 20) == SCORE.protected_spans
    assert request.protected_head_tokens == 5
    assert request.include_importance
    assert service.metadata["x-request-id"] == "r-1"
    assert service.remaining_s is not None
    assert 8 < service.remaining_s < 10.5


async def test_a_generation_goes_out_whole_and_comes_back_whole() -> None:
    times = target_pb2.TargetTimings(queue_s=0.25, kick_off_s=0.5, first_token_s=1.0)
    finished = target_pb2.TargetFinished(
        finish_reason=types_pb2.FINISH_REASON_STOP_STRING,
        matched_stop_string="a",
        counts=target_pb2.TargetCounts(
            dense_restored_tokens=1, sparse_restored_tokens=2, executed_tokens=3,
            completion_tokens=4,
        ),
        timings=times,
        sparse=True,
    )  # fmt: skip
    service = Service()
    service.respond = lambda: (
        target_pb2.TargetGenerateResponse(
            started=target_pb2.TargetStarted(boot_id="boot-1", restored_tokens=5)
        ),
        target_pb2.TargetGenerateResponse(progress=_progress(types_pb2.PHASE_DECODE, 1, 1)),
        target_pb2.TargetGenerateResponse(
            tokens=target_pb2.TargetTokens(
                token_ids=wire.ids_to_bytes([7]), first_token_timings=times
            )
        ),
        target_pb2.TargetGenerateResponse(
            tokens=target_pb2.TargetTokens(token_ids=wire.ids_to_bytes([8, 9]))
        ),
        target_pb2.TargetGenerateResponse(finished=finished),
    )
    async with _target(service) as target:
        events = await _all(target.generate(GENERATE, timeout_s=10))
    seconds = TargetTimes(queue_s=0.25, kick_off_s=0.5, first_token_s=1.0)
    assert events == [
        Restored(5),
        Progress(Phase.DECODE, 1, 1),
        Tokens((7,), seconds),
        Tokens((8, 9)),
        Generated(
            finish_reason=FinishReason.STOP_STRING,
            matched_stop_string="a",
            matched_stop_token_id=None,
            dense_restored_tokens=1,
            sparse_restored_tokens=2,
            executed_tokens=3,
            completion_tokens=4,
            sparse=True,
            times=seconds,
        ),
    ]
    (request,) = service.requests
    assert (request.request_id, request.instance_id, request.handle) == ("r-1", "me", "h-1")
    assert request.prompt_token_ids == wire.ids_to_bytes(GENERATE.prompt_ids)
    assert wire.plan_from(request.plan) == PLAN
    assert request.protected_head_tokens == 5
    assert wire.spans_from(request.protected_spans, 20) == GENERATE.protected_spans
    assert wire.sampling_from(request.sampling, defaults=Sampling()) == GENERATE.sampling
    assert wire.stops_from(request.stop, max_tokens_default=1, vocab=99) == GENERATE.stops
    assert not request.HasField("base")
    assert not request.retain


async def test_a_dense_generation_has_no_plan() -> None:
    service = Service()
    async with _target(service) as target:
        with pytest.raises(errors.InternalError, match="without its last message"):
            await _all(target.generate(replace(GENERATE, plan=None), timeout_s=10))
    assert not service.requests[0].HasField("plan")


@pytest.mark.parametrize(
    "error",
    [
        errors.ProtectedExceedsBudget("nothing to rank"),
        errors.PromptExceedsDraft("too long"),
        errors.NonFiniteImportance("NaN"),
        errors.QueueFull("full", retry_after_s=2.0),
        errors.KvCacheFull("no page"),
        errors.Unavailable("loading"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_errors_come_back_as_the_class_they_were(error: errors.ServiceError) -> None:
    service = Service()
    service.respond = lambda: (error,)
    async with _scorer(service) as scorer:
        with pytest.raises(type(error)) as raised:
            await _all(scorer.score(SCORE, timeout_s=10))
    assert type(raised.value) is type(error)
    assert raised.value.message == error.message
    assert raised.value.retry_after_s == error.retry_after_s


async def test_closing_a_call_cancels_it_at_the_service() -> None:
    service = Service()
    progress = target_pb2.TargetGenerateResponse(progress=_progress(types_pb2.PHASE_DECODE, 1, 1))
    service.respond = lambda: (progress, asyncio.Event())
    async with _target(service) as target:
        async with aclosing(target.generate(GENERATE, timeout_s=10)) as events:
            await anext(events)
            assert service.open == 1
        await asyncio.wait_for(service.cancelled.wait(), 5)
        assert service.open == 0


async def test_a_finished_call_is_not_cancelled() -> None:
    service = Service()
    service.respond = lambda: (_result(),)
    async with _scorer(service) as scorer:
        await _all(scorer.score(SCORE, timeout_s=10))
        await _all(scorer.score(SCORE, timeout_s=10))
    assert not service.cancelled.is_set()


async def test_a_deadline_ends_a_call_on_both_sides() -> None:
    service = Service()
    service.respond = lambda: (asyncio.Event(),)
    async with _scorer(service) as scorer:
        with pytest.raises(errors.DeadlineExceeded):
            await _all(scorer.score(SCORE, timeout_s=0.2))
        await asyncio.wait_for(service.cancelled.wait(), 5)


async def test_a_target_that_dies_in_midstream_is_missed_within_a_second() -> None:
    service = Service()
    tokens = target_pb2.TargetTokens(token_ids=wire.ids_to_bytes([7]))
    service.respond = lambda: (
        target_pb2.TargetGenerateResponse(tokens=tokens),
        asyncio.Event(),
    )
    async with _serving(service) as (server, port):
        target = GrpcTarget(f"127.0.0.1:{port}", TERMS)
        await target.watch.refresh()
        assert target.facts is not None
        async with aclosing(target.generate(GENERATE, timeout_s=30)) as events:
            await anext(events)
            stopping = asyncio.ensure_future(server.stop(None))
            async with asyncio.timeout(1):
                with pytest.raises(errors.UpstreamUnavailable):
                    await anext(events)
        assert target.facts is None, "the next turn must not wait for the next refresh"
        await stopping
        await target.close()


async def test_how_the_connection_ends_after_the_last_message_does_not_matter() -> None:
    service = Service()
    finished = target_pb2.TargetFinished(finish_reason=types_pb2.FINISH_REASON_END_TOKEN)
    service.respond = lambda: (
        target_pb2.TargetGenerateResponse(finished=finished),
        errors.InternalError("too late"),
    )
    async with _target(service) as target:
        (event,) = await _all(target.generate(GENERATE, timeout_s=10))
    assert isinstance(event, Generated)


@pytest.mark.parametrize("fault", ["no result", "importance", "empty run"])
async def test_a_result_that_makes_no_sense_is_the_services_fault(fault: str) -> None:
    response = _result(chunks=4 if fault == "importance" else 5)
    if fault == "empty run":
        response.result.plan.kept.add(first_chunk=9, chunks=0)
    service = Service()
    service.respond = lambda: () if fault == "no result" else (response,)
    async with _scorer(service) as scorer:
        with pytest.raises(errors.InternalError):
            await _all(scorer.score(SCORE, timeout_s=10))


async def test_release_names_the_owner_and_the_handles() -> None:
    service = Service()
    async with _target(service) as target:
        await target.release(["h-1", "h-2"], timeout_s=10)
    (request,) = service.requests
    assert request.instance_id == "me"
    assert list(request.handles) == ["h-1", "h-2"]


async def test_a_release_that_reaches_nobody_is_an_error_of_ours() -> None:
    target = GrpcTarget("127.0.0.1:1", TERMS)
    with pytest.raises(errors.UpstreamUnavailable):
        await target.release(["h-1"], timeout_s=5)
    await target.close()


async def test_the_scorers_facts_follow_it_as_it_comes_goes_and_restarts() -> None:
    service = Service()
    async with _serving(service) as (server, port):
        scorer = GrpcScorer(f"127.0.0.1:{port}", TERMS)
        watching = asyncio.create_task(scorer.watch.run())
        async with asyncio.timeout(20):
            await scorer.watch.until(lambda facts: facts is not None)
            assert scorer.facts is not None
            assert scorer.facts.boot_id == "boot-1"
            assert scorer.facts.default_query_mode is QueryMode.TAIL_WINDOW
            assert scorer.facts.model.layers_used == 2
            assert scorer.facts.kv.pages_total == 7
            await server.stop(None)
            await scorer.watch.until(lambda facts: facts is None)
        service.boot_id = "boot-2"
        async with _serving(service, port), asyncio.timeout(20):
            await scorer.watch.until(lambda facts: facts is not None and facts.boot_id == "boot-2")
        watching.cancel()
        await scorer.close()


async def test_the_gateway_is_ready_when_a_target_with_its_tokenizer_is_there() -> None:
    service = Service()
    async with _serving(service) as (_, port):
        address = f"127.0.0.1:{port}"
        target, scorer = GrpcTarget(address, TERMS), GrpcScorer("127.0.0.1:1", TERMS)
        failures: list[BaseException] = []
        readiness = Readiness(scorer, target, tokenizer_digest="other", on_fatal=failures.append)
        starting = asyncio.ensure_future(readiness.start())
        async with asyncio.timeout(20):
            await target.watch.until(lambda facts: facts is not None)
            await target.watch.refresh()
            assert not starting.done(), "another tokenizer: not ready"
            service.model = types_pb2.ModelInfo(name="m", tokenizer_digest="other")
            service.boot_id = "boot-2"
            await starting
        assert scorer.facts is None, "ready without the scorer"
        await readiness.close()
        assert failures == []
