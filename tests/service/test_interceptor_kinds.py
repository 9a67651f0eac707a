"""The interceptor over all four kinds of methods, in front of handlers written by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc
import pytest

from serving import errors, status
from serving.interceptor import ErrorInterceptor
from specprefill.v1 import scorer_pb2

TIMEOUT_S = 20
BROKEN_BYTES = b"\xff\xff\xff\xff"
# Field 1, a string of two bytes that are no UTF-8.
BAD_UTF8 = b"\x0a\x02\xff\xfe"


class BareServer:
    """A server of hand-written handlers behind the interceptor alone; enters as a channel to it."""

    def __init__(
        self, handlers: dict[str, Any], *more: grpc.aio.ServerInterceptor, **how: Any
    ) -> None:
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor(**how), *more])
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("bare", handlers),)
        )

    async def __aenter__(self) -> grpc.aio.Channel:
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        return self._channel

    async def __aexit__(self, *caught: object) -> None:
        await self._channel.close()
        await self._server.stop(None)


async def count(requests: AsyncIterator[Any], context: Any) -> Any:
    released = sum([len(request.handles) async for request in requests])
    return scorer_pb2.ScorerReleaseResponse(released=released)


async def echo(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
    async for request in requests:
        if request.instance_id:
            raise getattr(errors, request.instance_id)("not today")
        yield scorer_pb2.ScorerReleaseResponse(released=len(request.handles))


async def count_writing(requests: AsyncIterator[Any], context: Any) -> None:
    async for request in requests:
        await context.write(scorer_pb2.ScorerReleaseResponse(released=len(request.handles)))


def streaming_handlers() -> dict[str, Any]:
    parse = scorer_pb2.ScorerReleaseRequest.FromString
    serialize = scorer_pb2.ScorerReleaseResponse.SerializeToString
    return {
        "Count": grpc.stream_unary_rpc_method_handler(count, parse, serialize),
        "Echo": grpc.stream_stream_rpc_method_handler(echo, parse, serialize),
        "Write": grpc.stream_stream_rpc_method_handler(count_writing, parse, serialize),
    }


def requests(*items: bytes) -> AsyncIterator[bytes]:
    async def each() -> AsyncIterator[bytes]:
        for item in items:
            yield item

    return each()


def released(data: bytes) -> int:
    return scorer_pb2.ScorerReleaseResponse.FromString(data).released


TWO = scorer_pb2.ScorerReleaseRequest(handles=["a", "b"]).SerializeToString()
CONFLICT = scorer_pb2.ScorerReleaseRequest(instance_id="Conflict").SerializeToString()


async def failure(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_request_streams_are_parsed_and_guarded() -> None:
    async with BareServer(streaming_handlers()) as other:
        unary = other.stream_unary("/bare/Count")
        stream = other.stream_stream("/bare/Echo")
        writing = other.stream_stream("/bare/Write")
        assert released(await unary(requests(TWO, TWO), timeout=TIMEOUT_S)) == 4
        for method in (stream, writing):
            answers = [a async for a in method(requests(TWO, TWO), timeout=TIMEOUT_S)]
            assert [released(answer) for answer in answers] == [2, 2]
        bad = stream(requests(TWO, BROKEN_BYTES), timeout=TIMEOUT_S)
        assert released(await bad.read()) == 2
        assert type(status.raised(await failure(bad.read()))) is errors.MalformedRequest
        seen = await failure(unary(requests(TWO, BAD_UTF8), timeout=TIMEOUT_S))
        assert type(status.raised(seen)) is errors.MalformedRequest
        refused = stream(requests(TWO, CONFLICT), timeout=TIMEOUT_S)
        assert released(await refused.read()) == 2
        assert type(status.raised(await failure(refused.read()))) is errors.Conflict


class Doorman(grpc.aio.ServerInterceptor):
    """An interceptor behind the outermost one that lets nobody in."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        raise errors.Unauthenticated("no")


async def test_an_inner_interceptor_refuses_by_raising() -> None:
    async with BareServer(streaming_handlers(), Doorman()) as other:
        unary = other.unary_unary("/bare/Any")(b"", timeout=TIMEOUT_S)
        stream = other.stream_stream("/bare/Echo")(requests(TWO), timeout=TIMEOUT_S)
        for call in (unary, stream.read()):
            assert type(status.raised(await failure(call))) is errors.Unauthenticated


async def test_an_assertion_error_is_reported_as_fatal_and_others_are_not() -> None:
    fatal: list[BaseException] = []

    async def fail(request: bytes, context: Any) -> bytes:
        raise AssertionError if request else ValueError

    handlers = {"Fail": grpc.unary_unary_rpc_method_handler(fail)}
    async with BareServer(handlers, on_fatal=fatal.append) as other:
        await failure(other.unary_unary("/bare/Fail")(b"", timeout=TIMEOUT_S))
        assert fatal == []
        await failure(other.unary_unary("/bare/Fail")(b"x", timeout=TIMEOUT_S))
        assert [type(error) for error in fatal] == [AssertionError]


async def test_the_longest_error_still_fits_its_metadata() -> None:
    """The status of a text and values far over the limits arrives whole."""
    error = errors.InvalidRequest(
        "€" * 9000, field="ü" * 9000, metadata={f"{i}" * 200: "😀" * 9000 for i in range(99)}
    )

    async def fail(request: bytes, context: Any) -> bytes:
        raise error

    async with BareServer({"Fail": grpc.unary_unary_rpc_method_handler(fail)}) as other:
        call = other.unary_unary("/bare/Fail")(
            b"", timeout=TIMEOUT_S, metadata=(("x-request-id", "r" * 128),)
        )
        back = status.raised(await failure(call))
    assert type(back) is errors.InvalidRequest
    assert back.metadata["request_id"] == "r" * 128
