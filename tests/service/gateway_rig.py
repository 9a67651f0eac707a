"""A real gateway server in this process, over fake ports, and a client's stub for it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from gateway.metrics import GatewayMetrics
from gateway.releases import Releases
from gateway.servicer import SERVICE_NAME, GatewayServicer
from gateway.settings import GatewaySettings
from gateway.turn import TurnServices
from serving.server import ServiceServer, running
from serving.telemetry import make_registry
from specprefill.v1 import gateway_pb2, gateway_pb2_grpc
from tests.service.fake_ports import FakeScorer, FakeTarget
from tests.unit.gateway.prompts import open_encoder, open_tokenizer

THRESHOLD_TOKENS = 40
INSTANCE_ID = "gateway-instance"


@dataclass(frozen=True)
class Rig:
    stub: Any
    channel: grpc.aio.Channel
    scorer: FakeScorer
    target: FakeTarget
    releases: Releases
    registry: CollectorRegistry

    def sample(self, name: str, **labels: str) -> float:
        """A metric's value now."""
        value = self.registry.get_sample_value(name, labels)
        assert value is not None, name
        return value


@asynccontextmanager
async def gateway_rig(model_dir: Path, **settings: Any) -> AsyncIterator[Rig]:
    """model_dir: with tokenizer and template. settings: of the gateway, over those of tests."""
    chosen = GatewaySettings(
        **{
            "model_dir": model_dir,
            "scorer_address": "localhost:1",
            "target_address": "localhost:2",
            "threshold_tokens": THRESHOLD_TOKENS,
            "chunk_tokens": 8,
            "tail_tokens": 8,
        }
        | settings
    )
    tokenizer = open_tokenizer(model_dir)
    scorer, target = FakeScorer(), FakeTarget()
    _share_tokenizer(scorer, target, tokenizer.digest)
    releases = Releases(target, timeout_s=5)
    services = TurnServices(
        scorer=scorer,
        target=target,
        encoder=open_encoder(model_dir, bytes_max=chosen.prompt_bytes_max),
        tokenizer=tokenizer.plain,
        end_token_ids=frozenset({2}),
        releases=releases,
        clock=time.monotonic,
        score_s_max=chosen.score_s_max,
        deadline_margin_s=chosen.deadline_margin_s,
    )
    registry = make_registry("gateway")
    servicer = GatewayServicer(
        chosen,
        services,
        GatewayMetrics(registry),
        tokenizer_digest=tokenizer.digest,
        instance_id=INSTANCE_ID,
    )
    server = ServiceServer(
        settings=chosen,
        service_names=[SERVICE_NAME],
        add_services=servicer.add_to,
        registry=registry,
    )
    async with (
        running(server),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stub = gateway_pb2_grpc.GatewayStub(channel)
        yield Rig(stub, channel, scorer, target, releases, registry)


def _share_tokenizer(scorer: FakeScorer, target: FakeTarget, digest: str) -> None:
    assert scorer.facts is not None
    assert target.facts is not None
    scorer.facts = replace(scorer.facts, model=replace(scorer.facts.model, tokenizer_digest=digest))
    target.facts = replace(target.facts, model=replace(target.facts.model, tokenizer_digest=digest))


def text_prompt(text: str) -> gateway_pb2.Prompt:
    return gateway_pb2.Prompt(text=text)


def long_prompt() -> gateway_pb2.Prompt:
    """Well above the threshold."""
    return text_prompt("the quick brown fox jumps over a lazy dog " * 20)


def short_prompt() -> gateway_pb2.Prompt:
    """Well below the threshold."""
    return text_prompt("the fox")


def generate_request(prompt: gateway_pb2.Prompt | None = None, **fields: Any) -> Any:
    return gateway_pb2.GenerateRequest(prompt=prompt or long_prompt(), **fields)


def complete_request(prompt: gateway_pb2.Prompt | None = None, **fields: Any) -> Any:
    return gateway_pb2.CompleteRequest(prompt=prompt or long_prompt(), **fields)
