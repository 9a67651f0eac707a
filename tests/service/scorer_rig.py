"""A real scorer on a tiny random draft behind a real gRPC server, in this event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from prometheus_client import CollectorRegistry
from torch import Tensor

from engine.decoder import Attend, Decoder
from engine.gpu_thread import GpuThread
from scorer_service.draft import Draft, load_draft
from scorer_service.metrics import ScorerMetrics
from scorer_service.scorer import Scorer
from scorer_service.servicer import ScorerServicer, register
from scorer_service.settings import ScorerSettings
from serving.channel import CLIENT_CHANNEL_OPTIONS
from serving.server import ServiceServer, running
from serving.telemetry import make_registry
from serving.wire import ids_to_bytes
from specprefill.v1 import scorer_pb2, scorer_pb2_grpc, types_pb2

TIMEOUT_S = 20
CHUNK_TOKENS = 16
BOOT_ID = "boot"


class GatedDecoder:
    """A decoder that counts its forwards and stops at a gate before the one of a given number."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.shape, self.device, self.dtype = decoder.shape, decoder.device, decoder.dtype
        self.logits = decoder.logits
        self.forwards = 0
        self.stop_before: int | None = None
        self.reached = threading.Event()
        self.gate = threading.Event()

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        self._pass()
        return self._decoder(token_ids, positions, attend)

    def fill(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> None:
        self._pass()
        self._decoder.fill(token_ids, positions, attend)

    def _pass(self) -> None:
        if self.forwards == self.stop_before:
            self.reached.set()
            assert self.gate.wait(TIMEOUT_S)
        self.forwards += 1


@dataclass
class RunningScorer:
    channel: grpc.aio.Channel
    stub: scorer_pb2_grpc.ScorerStub
    servicer: ScorerServicer
    scorer: Scorer
    decoder: GatedDecoder
    gpu: GpuThread
    registry: CollectorRegistry
    fatal: list[BaseException] = field(default_factory=list)

    async def score(self, request: scorer_pb2.ScoreRequest) -> scorer_pb2.ScoreResult:
        """The result, after its progress."""
        *_, last = [event async for event in self.stub.Score(request, timeout=TIMEOUT_S)]
        assert last.WhichOneof("event") == "result"
        return last.result

    async def usage(self) -> tuple[int, int]:
        """(pages in use, handles), asked of the service."""
        info = await self.stub.GetInfo(scorer_pb2.ScorerGetInfoRequest(), timeout=TIMEOUT_S)
        return info.kv.pages_total - info.kv.pages_free, info.kv.handles

    async def settles_at(self, pages: int, handles: int) -> None:
        await eventually(lambda: self.gpu.jobs_running + self.gpu.jobs_waiting == 0)
        assert await self.usage() == (pages, handles)
        await self.gpu.call(self.scorer.handles.check_invariants)

    async def learns_of_the_cancel(self) -> None:
        """Wait until a job is marked: it is closed after the step it is in."""
        await eventually(lambda: any(job.is_cancelled for job in self.gpu._jobs))

    def sample(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(name, labels)
        assert value is not None, name
        return value


async def eventually(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_true():  # noqa: ASYNC110 - the GPU thread has no event for this.
            await asyncio.sleep(0)


@asynccontextmanager
async def running_scorer(model_dir: Path, **settings: Any) -> AsyncIterator[RunningScorer]:
    chosen = ScorerSettings(
        **{
            "model_dir": model_dir,
            "dtype": "float64",
            "kv_tokens": 4096,
            "page_tokens": 8,
            "prefill_chunk_tokens": CHUNK_TOKENS,
            "prefill_chunk_tokens_shared": CHUNK_TOKENS,
            **settings,
        }
    )
    fatal: list[BaseException] = []
    registry = make_registry("scorer")
    gpu = GpuThread(
        name="scorer-gpu",
        jobs_max=chosen.jobs_max,
        events_max=chosen.events_max,
        on_fatal=fatal.append,
    )
    servicer = ScorerServicer(chosen, gpu, ScorerMetrics(registry), boot_id=BOOT_ID)
    server = ServiceServer(
        settings=chosen,
        service_names=["specprefill.v1.Scorer"],
        add_services=partial(register, servicer),
        registry=registry,
    )
    gpu.start()
    try:
        draft, decoder = gated(await gpu.call(partial(load_draft, chosen)), chosen)
        servicer.open(draft)
        async with running(server), channel_to(server.port) as channel:
            stub = scorer_pb2_grpc.ScorerStub(channel)
            yield RunningScorer(
                channel, stub, servicer, draft.scorer, decoder, gpu, registry, fatal
            )
            decoder.gate.set()
        assert not fatal
    finally:
        gpu.stop()


def gated(draft: Draft, settings: ScorerSettings) -> tuple[Draft, GatedDecoder]:
    """The same draft behind a gate."""
    scorer = draft.scorer
    decoder = GatedDecoder(scorer.decoder)
    behind = Scorer(
        decoder,
        scorer.cache,
        scorer.handles,
        end_token_ids=scorer.end_token_ids,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        prefill_chunk_tokens_shared=settings.prefill_chunk_tokens_shared,
    )
    return Draft(behind, draft.facts), decoder


def channel_to(port: int) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_CHANNEL_OPTIONS)


def prompt(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 300, tokens).astype(np.uint32)


def request_for(prompt_ids: np.ndarray, **fields: Any) -> scorer_pb2.ScoreRequest:
    """A valid request of a prompt; `settings` replace single plan settings, `fields` the rest."""
    plan = {
        "keep_basis_points": 3000,
        "chunk_tokens": 4,
        "tail_tokens": 8,
        "pool_tokens": 13,
        "query_mode": types_pb2.QUERY_MODE_TAIL_WINDOW,
        "lookahead_tokens": 8,
        "window_tokens": 16,
        **fields.pop("settings", {}),
    }
    return scorer_pb2.ScoreRequest(
        **{
            "request_id": "request",
            "instance_id": "gateway",
            "prompt_token_ids": ids_to_bytes(prompt_ids),
            "settings": types_pb2.PlanSettings(**plan),
            **fields,
        }
    )


def base(handle: str, tokens: int) -> types_pb2.Base:
    return types_pb2.Base(handle=handle, tokens=tokens)
