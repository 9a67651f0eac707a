"""Every error through real unary and streaming methods, and back at the caller."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import nullcontext

import grpc
import pytest
import structlog
from grpc import StatusCode as Code

from serving import errors, status
from serving.channel import CLIENT_CHANNEL_OPTIONS
from serving.errors import ServiceError
from serving.server import ServiceServer, running
from serving.telemetry import configure_logging
from specprefill.v1 import scorer_pb2, scorer_pb2_grpc
from tests.service.fake_scorer import FIELD, NAME, SECRET, FakeScorer, fake_server

TIMEOUT_S = 20
RELEASE = f"/{NAME}/Release"
SCORE = f"/{NAME}/Score"
# What no ScorerReleaseRequest and no ScoreRequest looks like.
BROKEN_BYTES = b"\xff\xff\xff\xff"
# Field 1, a string of two bytes that are no UTF-8.
BAD_UTF8 = b"\x0a\x02\xff\xfe"


@pytest.fixture(autouse=True)
def log_lines() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    configure_logging("fake", "info", stream)
    yield stream
    structlog.reset_defaults()


@pytest.fixture
async def fake() -> FakeScorer:
    return FakeScorer()


@pytest.fixture
async def server(fake: FakeScorer) -> AsyncIterator[ServiceServer]:
    async with running(fake_server(fake)) as server:
        yield server


@pytest.fixture
async def channel(server: ServiceServer) -> AsyncIterator[grpc.aio.Channel]:
    address = f"127.0.0.1:{server.port}"
    async with grpc.aio.insecure_channel(address, options=CLIENT_CHANNEL_OPTIONS) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> scorer_pb2_grpc.ScorerStub:
    return scorer_pb2_grpc.ScorerStub(channel)


Call = Callable[[scorer_pb2_grpc.ScorerStub, str], Awaitable[object]]


async def release(stub: scorer_pb2_grpc.ScorerStub, word: str) -> object:
    return await stub.Release(
        scorer_pb2.ScorerReleaseRequest(instance_id=word),
        timeout=TIMEOUT_S,
        metadata=(("x-request-id", "r-7"),),
    )


async def score(stub: scorer_pb2_grpc.ScorerStub, word: str) -> object:
    request = scorer_pb2.ScoreRequest(request_id="r-7", instance_id=word)
    return [response async for response in stub.Score(request, timeout=TIMEOUT_S)]


async def failure(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


both = pytest.mark.parametrize("call", [release, score], ids=["unary", "stream"])


@both
@pytest.mark.parametrize("name", sorted(status.CLASSES))
async def test_every_error_class_arrives_as_itself(
    stub: scorer_pb2_grpc.ScorerStub, call: Call, name: str
) -> None:
    seen = await failure(call(stub, name))
    back = status.raised(seen)
    assert type(back) is status.CLASSES[name]
    assert seen.code() is status.code_of(back)
    assert (back.message, back.field, back.retry_after_s) == ("not today", FIELD, 0.25)
    assert back.metadata == {"limit": "7", "request_id": "r-7"}
    assert dict(seen.trailing_metadata())["x-request-id"] == "r-7"


@both
async def test_the_sync_client_sees_the_same_class(server: ServiceServer, call: Call) -> None:
    def call_blocking(stub: scorer_pb2_grpc.ScorerStub) -> None:
        if call is release:
            stub.Release(scorer_pb2.ScorerReleaseRequest(instance_id="KvEvicted"))
        else:
            list(stub.Score(scorer_pb2.ScoreRequest(instance_id="KvEvicted")))

    def failing() -> ServiceError:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            with pytest.raises(grpc.RpcError) as caught:
                call_blocking(scorer_pb2_grpc.ScorerStub(channel))
            return status.raised(caught.value)

    assert type(await asyncio.to_thread(failing)) is errors.KvEvicted


@both
@pytest.mark.parametrize("word", ["ValueError", "NotImplementedError", "AssertionError"])
async def test_an_unknown_exception_is_an_incident_without_its_text(
    stub: scorer_pb2_grpc.ScorerStub, call: Call, word: str, log_lines: io.StringIO
) -> None:
    seen = await failure(call(stub, word))
    assert seen.code() is Code.INTERNAL
    back = status.raised(seen)
    assert type(back) is errors.InternalError
    incident = back.metadata["incident"]
    assert seen.details() == f"internal error, incident {incident}"
    assert SECRET not in repr(seen)
    events = [json.loads(line) for line in log_lines.getvalue().splitlines()]
    (event,) = [event for event in events if event["event"] == "rpc_failed"]
    assert (event["incident"], event["request_id"], event["level"]) == (incident, "r-7", "error")
    assert event["trace"][0] == word
    assert any(line.endswith(" _behave") for line in event["trace"])
    assert SECRET not in log_lines.getvalue()


async def test_a_servicer_that_answers_nothing_is_an_incident(
    stub: scorer_pb2_grpc.ScorerStub,
) -> None:
    assert (await failure(release(stub, "None"))).code() is Code.INTERNAL


async def test_a_method_the_servicer_lacks_is_unimplemented(
    stub: scorer_pb2_grpc.ScorerStub, channel: grpc.aio.Channel
) -> None:
    info = stub.GetInfo(scorer_pb2.ScorerGetInfoRequest(), timeout=TIMEOUT_S)
    assert (await failure(info)).code() is Code.UNIMPLEMENTED
    unknown = channel.unary_unary(f"/{NAME}/Nothing")(b"", timeout=TIMEOUT_S)
    assert (await failure(unknown)).code() is Code.UNIMPLEMENTED


@both
async def test_a_servicer_s_own_abort_passes_unchanged(
    stub: scorer_pb2_grpc.ScorerStub, call: Call
) -> None:
    seen = await failure(call(stub, "abort"))
    assert (seen.code(), seen.details()) == (Code.ABORTED, "own words")
    assert dict(seen.trailing_metadata()) == {"x-own": "1"}


@both
async def test_trailing_metadata_of_the_servicer_is_kept_beside_the_error(
    stub: scorer_pb2_grpc.ScorerStub, call: Call
) -> None:
    seen = await failure(call(stub, "trailing"))
    assert dict(seen.trailing_metadata())["x-own"] == "1"
    assert type(status.raised(seen)) is errors.Conflict


@pytest.mark.parametrize("data", [BROKEN_BYTES, BAD_UTF8], ids=["protobuf", "utf8"])
async def test_malformed_bytes_are_an_invalid_argument_in_unary_and_stream(
    channel: grpc.aio.Channel, data: bytes, fake: FakeScorer
) -> None:
    unary = channel.unary_unary(RELEASE)(data, timeout=TIMEOUT_S)
    stream = channel.unary_stream(SCORE)(data, timeout=TIMEOUT_S)
    for seen in (await failure(unary), await failure(stream.read())):
        assert seen.code() is Code.INVALID_ARGUMENT
        back = status.raised(seen)
        assert type(back) is errors.MalformedRequest
        assert "Unexpected" not in back.message
        assert back.metadata["request_id"]
    assert fake.request_ids == []


@pytest.mark.parametrize("given", ["", "mine-1"])
async def test_servicers_always_find_a_request_id(
    stub: scorer_pb2_grpc.ScorerStub, fake: FakeScorer, given: str
) -> None:
    request = scorer_pb2.ScoreRequest(request_id=given, instance_id="Conflict")
    call = stub.Score(request, timeout=TIMEOUT_S)
    await call.read()
    seen = await failure(call.read())
    (found,) = fake.request_ids
    assert found
    assert found == given or not given
    assert status.raised(seen).metadata["request_id"] == found


@pytest.mark.parametrize("given", ["two words", "line\nbreak", "ü", "x" * 129])
async def test_a_request_id_that_is_no_plain_word_is_refused(
    stub: scorer_pb2_grpc.ScorerStub, fake: FakeScorer, given: str
) -> None:
    request = scorer_pb2.ScoreRequest(request_id=given)
    back = status.raised(await failure(stub.Score(request, timeout=TIMEOUT_S).read()))
    assert (type(back), back.field) == (errors.InvalidRequest, "request_id")
    assert fake.request_ids == []


async def handled(server: ServiceServer, method: str, code: str) -> float:
    labels = {"grpc_service": NAME, "grpc_method": method, "grpc_code": code}
    return server.registry.get_sample_value("grpc_server_handled_total", labels)  # type: ignore[return-value]


async def test_a_cancelled_stream_is_closed_at_once_and_counted(
    stub: scorer_pb2_grpc.ScorerStub, fake: FakeScorer, server: ServiceServer
) -> None:
    for word in ("wait", "flood"):
        call = stub.Score(scorer_pb2.ScoreRequest(instance_id=word), timeout=TIMEOUT_S)
        await call.read()
        call.cancel()
        await asyncio.wait_for(fake.streams_closed.acquire(), TIMEOUT_S)
    await asyncio.wait_for(server.admission.idle(), TIMEOUT_S)
    await release(stub, "")
    assert await handled(server, "Score", "Cancelled") == 2
    assert await handled(server, "Release", "OK") == 1


async def test_an_expired_deadline_closes_the_stream_and_is_counted_as_such(
    stub: scorer_pb2_grpc.ScorerStub, fake: FakeScorer, server: ServiceServer
) -> None:
    request = scorer_pb2.ScoreRequest(instance_id="wait")
    call = stub.Score(request, timeout=0.3)
    await call.read()
    seen = await failure(call.read())
    assert type(status.raised(seen)) is errors.DeadlineExceeded
    await asyncio.wait_for(fake.streams_closed.acquire(), TIMEOUT_S)
    await asyncio.wait_for(server.admission.idle(), TIMEOUT_S)
    assert await handled(server, "Score", "DeadlineExceeded") == 1


@both
async def test_errors_are_counted_by_their_code(
    stub: scorer_pb2_grpc.ScorerStub, server: ServiceServer, call: Call
) -> None:
    method = "Release" if call is release else "Score"
    for word in ("KvEvicted", "abort", "ValueError", ""):
        with pytest.raises(grpc.aio.AioRpcError) if word else nullcontext():
            await call(stub, word)
    for code in ("NotFound", "Aborted", "Internal", "OK"):
        assert await handled(server, method, code) == 1
