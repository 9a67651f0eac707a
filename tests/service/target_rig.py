"""A real target on a tiny random model behind a real gRPC server, in this event loop."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from engine.decoder import Attend
from engine.gpu_thread import GpuThread
from engine.weights import load_decoder
from serving.keep_plan import KeepPlan
from serving.server import ServiceServer, running
from serving.telemetry import make_registry
from serving.wire import add_spans, fill_plan, ids_to_bytes
from specprefill.v1 import target_pb2, target_pb2_grpc, types_pb2
from target_service.core import TargetCore, build_core
from target_service.metrics import TargetMetrics
from target_service.servicer import TargetServicer, register
from target_service.settings import TargetSettings
from tests.service.scorer_rig import TIMEOUT_S, GatedDecoder, channel_to, eventually

BOOT_ID = "boot"
PAGES = 128
PAGE_TOKENS = 8
# Small steps: a cancel always falls into the middle of something.
CHUNK_TOKENS = 8
# A prompt with this token in it makes the model produce NaN.
POISON = 7


class TestDecoder(GatedDecoder):
    """Counts its forwards, stops at a gate, and has no finite hidden state for the POISON token."""

    __test__ = False

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden = super().__call__(token_ids, positions, attend)
        return torch.where((token_ids == POISON)[:, None], torch.nan, hidden)


@dataclass(frozen=True)
class Reply:
    """All messages of one stream."""

    messages: tuple[target_pb2.TargetGenerateResponse, ...]

    def of(self, kind: str) -> list[Any]:
        return [getattr(m, kind) for m in self.messages if m.WhichOneof("event") == kind]

    @property
    def tokens(self) -> list[int]:
        data = b"".join(message.token_ids for message in self.of("tokens"))
        return [int(token) for token in np.frombuffer(data, dtype="<u4")]

    @property
    def finished(self) -> target_pb2.TargetFinished:
        (finished,) = self.of("finished")
        return finished


@dataclass
class RunningTarget:
    channel: grpc.aio.Channel
    stub: target_pb2_grpc.TargetStub
    servicer: TargetServicer
    core: TargetCore
    decoder: TestDecoder
    gpu: GpuThread
    registry: CollectorRegistry
    fatal: list[BaseException] = field(default_factory=list)

    async def generate(self, request: target_pb2.TargetGenerateRequest) -> Reply:
        stream = self.stub.Generate(request, timeout=TIMEOUT_S)
        return Reply(tuple([message async for message in stream]))

    async def usage(self) -> tuple[int, int]:
        """(pages in use, handles), asked of the service."""
        info = await self.stub.GetInfo(target_pb2.TargetGetInfoRequest(), timeout=TIMEOUT_S)
        return info.kv.pages_total - info.kv.pages_free, info.kv.handles

    async def settles_at(self, pages: int, handles: int) -> None:
        """Wait until nothing runs any more and find this usage and right books."""
        await eventually(lambda: self.gpu.jobs_running + self.gpu.jobs_waiting == 0)
        assert await self.usage() == (pages, handles)
        await self.gpu.call(self.core.sequences.check_invariants)

    async def fork(
        self, handle: str, tokens: int, *, at: int, to: str, instance_id: str = "gateway"
    ) -> target_pb2.ForkResponse:
        request = target_pb2.ForkRequest(
            instance_id=instance_id,
            base=types_pb2.Base(handle=handle, tokens=tokens),
            position=at,
            handle=to,
        )
        return await self.stub.Fork(request, timeout=TIMEOUT_S)

    async def release(
        self, *handles: str, instance_id: str = "gateway"
    ) -> target_pb2.TargetReleaseResponse:
        request = target_pb2.TargetReleaseRequest(instance_id=instance_id, handles=handles)
        return await self.stub.Release(request, timeout=TIMEOUT_S)

    def sample(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(name, labels)
        assert value is not None, name
        return value


@asynccontextmanager
async def running_target(model_dir: Path, **settings: Any) -> AsyncIterator[RunningTarget]:
    chosen = TargetSettings(
        **{
            "model_dir": model_dir,
            "dtype": "float64",
            "kv_pages": PAGES,
            "page_tokens": PAGE_TOKENS,
            "prefill_chunk_tokens": CHUNK_TOKENS,
            "prefill_chunk_tokens_shared": CHUNK_TOKENS,
            "completion_tokens_max": 1024,
            "flush_interval_s": 0.0,
            **settings,
        }
    )
    fatal: list[BaseException] = []
    registry = make_registry("target")
    metrics = TargetMetrics(registry)
    gpu = GpuThread(
        name="target-gpu",
        jobs_max=chosen.jobs_max + 8,
        events_max=chosen.events_max,
        on_fatal=fatal.append,
    )
    servicer = TargetServicer(
        gpu=gpu,
        metrics=metrics,
        boot_id=BOOT_ID,
        jobs_max=chosen.jobs_max,
        flush_interval_s=chosen.flush_interval_s,
        time_s=time.perf_counter,
    )
    server = ServiceServer(
        settings=chosen,
        service_names=["specprefill.v1.Target"],
        add_services=partial(register, servicer),
        registry=registry,
    )
    gpu.start()
    try:
        decoder = TestDecoder(load_decoder(model_dir, dtype=torch.float64, device="cpu"))
        core = await gpu.call(
            partial(build_core, decoder, chosen, metrics, time_s=time.perf_counter)
        )
        servicer.attach(core)
        decoder.forwards = 0
        async with running(server), channel_to(server.port) as channel:
            stub = target_pb2_grpc.TargetStub(channel)
            yield RunningTarget(channel, stub, servicer, core, decoder, gpu, registry, fatal)
            decoder.gate.set()
        assert not fatal
    finally:
        gpu.stop()


def prompt(tokens: int, seed: int = 0) -> np.ndarray:
    """Token ids uint32 [tokens], none of them special or poisonous."""
    return np.random.default_rng(seed).integers(POISON + 1, 300, tokens).astype(np.uint32)


def request_for(
    prompt_ids: np.ndarray | Iterable[int],
    *,
    plan: KeepPlan | None = None,
    base: tuple[str, int] | None = None,
    **fields: Any,
) -> target_pb2.TargetGenerateRequest:
    """A valid request for 6 greedy tokens; `sampling` and `stop` are messages or dicts."""
    stop = {"max_tokens": 6, "ignore_end_tokens": True, **fields.pop("stop", {})}
    request = target_pb2.TargetGenerateRequest(
        **{
            "request_id": "request",
            "instance_id": "gateway",
            "prompt_token_ids": ids_to_bytes(np.asarray(prompt_ids)),
            "stop": types_pb2.StopConditions(**stop),
            **fields,
        }
    )
    if plan is not None:
        fill_plan(request.plan, plan)
        add_spans(request.protected_spans, plan.protected_spans)
        request.protected_head_tokens = plan.protected_head_tokens
    if base is not None:
        request.base.handle, request.base.tokens = base
    return request
