"""A gateway that answers from a script: real gRPC, no models."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from serving.errors import InvalidRequest, ServiceError, UpstreamUnavailable
from serving.status import to_status
from specprefill.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2

PLAN = types_pb2.KeepPlan(
    prompt_tokens=320,
    settings=types_pb2.PlanSettings(
        keep_basis_points=5000,
        chunk_tokens=32,
        tail_tokens=64,
        pool_tokens=13,
        query_mode=types_pb2.QUERY_MODE_TAIL_WINDOW,
        window_tokens=16,
    ),
    kept=[
        types_pb2.ChunkRun(first_chunk=1, chunks=2),
        types_pb2.ChunkRun(first_chunk=8, chunks=2),
    ],
    forced=[types_pb2.ChunkRun(first_chunk=8, chunks=2)],
    protected_head_tokens=32,
    selectable_chunks=9,
    kept_chunks=4,
    ranked_chunks=2,
    kept_tokens=128,
    settings_digest=b"\x01\x02",
)
FINISHED = gateway_pb2.Finished(
    request_id="r1",
    finish_reason=types_pb2.FINISH_REASON_END_TOKEN,
    decision=gateway_pb2.Decision(path=gateway_pb2.PATH_SPARSE, reason=gateway_pb2.REASON_ELIGIBLE),
    counts=gateway_pb2.TokenCounts(prompt_tokens=320, executed_tokens=160, completion_tokens=2),
    timings=gateway_pb2.Timings(
        tokenise_s=0.25, score_prefill_s=0.5, kick_off_s=0.25, time_to_first_token_s=1.0
    ),
    settings=gateway_pb2.EffectiveSettings(mode=gateway_pb2.PREFILL_MODE_AUTO, plan=PLAN.settings),
    plan=PLAN,
)


class FakeGateway(gateway_pb2_grpc.GatewayServicer):
    """requests: what came in. cancelled: set when a stream's client went away."""

    def __init__(self) -> None:
        self.requests: list[object] = []
        self.cancelled = threading.Event()
        self.is_endless = False
        self.is_target_down = False

    def Generate(
        self, request: gateway_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[gateway_pb2.GenerateResponse]:
        self.requests.append(request)
        _refuse_bad_keep(request.prefill, context)
        if self.is_target_down:
            _abort(context, UpstreamUnavailable("the target is gone"))
        context.add_callback(self.cancelled.set)
        yield gateway_pb2.GenerateResponse(
            started=gateway_pb2.Started(request_id="r1", prompt_tokens=320)
        )
        yield gateway_pb2.GenerateResponse(
            progress=types_pb2.Progress(
                phase=types_pb2.PHASE_SCORE_PREFILL, done_tokens=100, total_tokens=320
            )
        )
        while self.is_endless and context.is_active():
            yield gateway_pb2.GenerateResponse(delta=gateway_pb2.Delta(text="again "))
        for text, token in (("Héllo", 5), (" wörld", 6)):
            ids = token.to_bytes(4, "little")
            yield gateway_pb2.GenerateResponse(delta=gateway_pb2.Delta(text=text, token_ids=ids))
        yield gateway_pb2.GenerateResponse(finished=FINISHED)

    def Complete(
        self, request: gateway_pb2.CompleteRequest, context: grpc.ServicerContext
    ) -> gateway_pb2.CompleteResponse:
        self.requests.append(request)
        _refuse_bad_keep(request.prefill, context)
        ids = (5).to_bytes(4, "little") + (6).to_bytes(4, "little")
        return gateway_pb2.CompleteResponse(text="Héllo wörld", token_ids=ids, finished=FINISHED)

    def Explain(
        self, request: gateway_pb2.ExplainRequest, context: grpc.ServicerContext
    ) -> gateway_pb2.ExplainResponse:
        self.requests.append(request)
        states = {0: 1, 1: 3, 2: 3, 8: 2, 9: 2}
        chunks = [
            gateway_pb2.ChunkExplanation(
                chunk=c,
                positions=types_pb2.PositionSpan(start=32 * c, end=32 * c + 32),
                importance=c / 100,
                state=states.get(c, gateway_pb2.CHUNK_STATE_DROPPED),
                text=f"text of chunk {c}",
            )
            for c in range(10)
        ]
        return gateway_pb2.ExplainResponse(
            request_id="r1",
            decision=FINISHED.decision,
            plan=PLAN,
            chunks=chunks,
            settings=FINISHED.settings,
        )

    def GetServerInfo(
        self, request: gateway_pb2.GetServerInfoRequest, context: grpc.ServicerContext
    ) -> gateway_pb2.GetServerInfoResponse:
        return gateway_pb2.GetServerInfoResponse(
            version="1.2.3",
            target=types_pb2.ModelInfo(name="big", architecture="llama", layers=30, layers_used=30),
            defaults=FINISHED.settings,
            target_kv=types_pb2.KvUsage(pages_total=10, pages_free=4, page_tokens=64),
        )


def _refuse_bad_keep(prefill: gateway_pb2.PrefillOptions, context: grpc.ServicerContext) -> None:
    if prefill.keep_basis_points <= 10000:
        return
    _abort(context, InvalidRequest("keep rate above 10000"))


def _abort(context: grpc.ServicerContext, error: ServiceError) -> NoReturn:
    context.abort_with_status(rpc_status.to_status(to_status(error, "r1")))
    raise AssertionError("abort returns never")


@contextmanager
def fake_gateway(*, is_ready: bool = True) -> Iterator[tuple[str, FakeGateway]]:
    """(address, servicer) of a running fake."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    servicer = FakeGateway()
    gateway_pb2_grpc.add_GatewayServicer_to_server(servicer, server)
    checks = health.HealthServicer()
    serving = health_pb2.HealthCheckResponse
    checks.set("", serving.SERVING)
    checks.set("specprefill.v1.Gateway", serving.SERVING if is_ready else serving.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", servicer
    finally:
        server.stop(None).wait()
