"""A server that loads, serves, is full, drains and stops; limits, health, reflection, metrics."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Awaitable

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc import StatusCode as Code
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from serving import errors, status
from serving.channel import CLIENT_CHANNEL_OPTIONS, channel_options, server_options
from serving.server import ServiceServer, running
from specprefill.v1 import scorer_pb2, scorer_pb2_grpc
from tests.service.fake_scorer import NAME, FakeScorer, FakeSettings, fake_server

TIMEOUT_S = 20
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Peer:
    """A client of one server."""

    def __init__(self, server: ServiceServer) -> None:
        self.channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{server.port}", options=CLIENT_CHANNEL_OPTIONS
        )
        self.scorer = scorer_pb2_grpc.ScorerStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    async def release(self, *handles: str) -> int:
        request = scorer_pb2.ScorerReleaseRequest(handles=handles)
        return int((await self.scorer.Release(request, timeout=TIMEOUT_S)).released)

    def score(self, word: str = "") -> grpc.aio.UnaryStreamCall:
        return self.scorer.Score(scorer_pb2.ScoreRequest(instance_id=word), timeout=TIMEOUT_S)

    async def check(self, name: str) -> int:
        request = health_pb2.HealthCheckRequest(service=name)
        return int((await self.health.Check(request, timeout=TIMEOUT_S)).status)

    def watch(self, name: str) -> grpc.aio.UnaryStreamCall:
        return self.health.Watch(health_pb2.HealthCheckRequest(service=name))


@pytest.fixture
async def fake() -> FakeScorer:
    return FakeScorer()


@pytest.fixture
async def server(fake: FakeScorer) -> AsyncIterator[ServiceServer]:
    async with running(fake_server(fake)) as server:
        yield server


@pytest.fixture
async def peer(server: ServiceServer) -> AsyncIterator[Peer]:
    peer = Peer(server)
    yield peer
    await peer.channel.close()


async def failure(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, TIMEOUT_S)
    return caught.value


async def error_of(call: Awaitable[object]) -> errors.ServiceError:
    return status.raised(await failure(call))


async def test_a_process_is_alive_while_it_loads_and_ready_only_after(fake: FakeScorer) -> None:
    server = fake_server(fake)
    await server.start()
    peer = Peer(server)
    watch = peer.watch(NAME)
    try:
        assert await peer.check("") == SERVING
        assert await peer.check(NAME) == NOT_SERVING
        assert (await watch.read()).status == NOT_SERVING
        refused = await error_of(peer.release("a"))
        assert type(refused) is errors.Unavailable
        assert refused.metadata["state"] == "loading"
        assert refused.retry_after_s
        await server.ready()
        assert (await watch.read()).status == SERVING
        assert await peer.check(NAME) == SERVING
        assert await peer.release("a", "b") == 2
    finally:
        await peer.channel.close()
        await server.stop(0)


async def test_an_unknown_service_is_not_found_by_check_and_unknown_to_watch(peer: Peer) -> None:
    assert (await failure(peer.check("made.up"))).code() is Code.NOT_FOUND
    watch = peer.watch("made.up")
    assert (await watch.read()).status == SERVICE_UNKNOWN
    watch.cancel()


async def test_draining_tells_health_first_and_still_serves(
    server: ServiceServer, peer: Peer
) -> None:
    watch = peer.watch(NAME)
    assert (await watch.read()).status == SERVING
    await server.drain()
    assert (await watch.read()).status == NOT_SERVING
    assert await peer.check(NAME) == NOT_SERVING
    assert await peer.release("a") == 1
    await server.ready()
    assert await peer.check(NAME) == NOT_SERVING


async def test_stopping_finishes_running_streams_and_refuses_new_requests(
    server: ServiceServer, peer: Peer, fake: FakeScorer
) -> None:
    stream = peer.score("wait")
    assert (await stream.read()).progress.done_tokens == 1
    stopping = asyncio.ensure_future(server.stop(TIMEOUT_S))
    refused = await error_of(peer.release("a"))
    assert isinstance(refused, errors.Unavailable)
    fake.gate.set()
    assert (await stream.read()).progress.done_tokens == 2
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is Code.OK
    await asyncio.wait_for(stopping, TIMEOUT_S)


async def test_the_end_of_the_grace_time_cuts_a_stream_and_its_servicer_cleans_up(
    server: ServiceServer, peer: Peer, fake: FakeScorer
) -> None:
    stream = peer.score("wait")
    await stream.read()
    await asyncio.wait_for(server.stop(0.1), TIMEOUT_S)
    assert isinstance(await error_of(stream.read()), errors.Unavailable)
    await asyncio.wait_for(fake.streams_closed.acquire(), TIMEOUT_S)


async def test_a_cut_ends_the_grace_time_early(
    server: ServiceServer, peer: Peer, fake: FakeScorer
) -> None:
    stream = peer.score("wait")
    await stream.read()
    cut = asyncio.Event()
    cut.set()
    await asyncio.wait_for(server.stop(3600, cut=[cut]), TIMEOUT_S)
    assert isinstance(await error_of(stream.read()), errors.Unavailable)


async def test_a_health_watch_does_not_hold_a_server_up(server: ServiceServer, peer: Peer) -> None:
    watch = peer.watch("")
    await watch.read()
    await asyncio.wait_for(server.stop(3600), TIMEOUT_S)


async def test_an_oversize_message_is_refused_and_the_server_goes_on(fake: FakeScorer) -> None:
    async with running(fake_server(fake, message_bytes_max=4096)) as server:
        peer = Peer(server)
        refused = await error_of(peer.release("x" * 5000))
        assert type(refused) is errors.ResourceExhausted
        assert "4096" in refused.message
        assert await peer.release("x" * 3000) == 1
        await peer.channel.close()


async def test_a_full_server_refuses_with_a_delay_but_answers_health_checks(
    fake: FakeScorer,
) -> None:
    async with running(fake_server(fake, concurrent_rpcs_max=1)) as server:
        peer = Peer(server)
        stream = peer.score("wait")
        await stream.read()
        refused = await error_of(peer.release("a"))
        assert type(refused) is errors.QueueFull
        assert refused.metadata["limit"] == "1"
        assert refused.retry_after_s
        assert await peer.check(NAME) == SERVING
        fake.gate.set()
        while await stream.read() is not grpc.aio.EOF:
            pass
        await asyncio.wait_for(server.admission.idle(), TIMEOUT_S)
        assert await peer.release("a") == 1
        await peer.channel.close()


async def test_two_servers_cannot_share_a_port(server: ServiceServer, fake: FakeScorer) -> None:
    second = fake_server(fake, port=server.port)
    with pytest.raises(RuntimeError, match="Failed to bind"):
        await second.start()
    await second.stop(0)


async def test_reflection_describes_the_service_and_can_be_switched_off(
    server: ServiceServer, fake: FakeScorer
) -> None:
    def described(port: int) -> tuple[list[str], list[str]]:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            service = DescriptorPool(database).FindServiceByName(NAME)
            names = list(database.get_services())
            return names, [method.name for method in service.methods]

    names, methods = await asyncio.to_thread(described, server.port)
    assert set(names) >= {NAME, "grpc.health.v1.Health"}
    assert methods == ["Score", "Release", "GetInfo"]
    async with running(fake_server(fake, reflection=False)) as silent:
        with pytest.raises(grpc.RpcError) as caught:
            await asyncio.to_thread(described, silent.port)
        assert caught.value.code() is Code.UNIMPLEMENTED  # type: ignore[attr-defined]


async def test_the_metrics_port_counts_rpcs(server: ServiceServer, peer: Peer) -> None:
    def scraped() -> str:
        url = f"http://127.0.0.1:{server.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return str(response.read().decode())

    labels = f'grpc_method="Release",grpc_service="{NAME}"'
    line = f'grpc_server_handled_total{{grpc_code="OK",{labels}}}'
    assert f"{line} 0.0" in await asyncio.to_thread(scraped)
    await peer.release("a")
    await asyncio.wait_for(server.admission.idle(), TIMEOUT_S)
    assert f"{line} 1.0" in await asyncio.to_thread(scraped)


def test_clients_have_both_timeouts_and_servers_the_key_that_works() -> None:
    settings = FakeSettings(
        keepalive_interval_s=7, keepalive_timeout_s=3, keepalive_interval_min_s=2
    )
    client, server = dict(channel_options(settings)), dict(server_options(settings))
    for options in (client, server):
        assert options["grpc.keepalive_time_ms"] == 7000
        assert options["grpc.keepalive_timeout_ms"] == 3000
        assert options["grpc.http2.ping_timeout_ms"] == 3000
    assert server["grpc.http2.min_ping_interval_without_data_ms"] == 2000
    assert server["grpc.so_reuseport"] == 0
    assert set(dict(CLIENT_CHANNEL_OPTIONS)) == set(client)
