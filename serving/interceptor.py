"""The outermost interceptor: parses requests and names them, maps exceptions to statuses."""

from __future__ import annotations

import asyncio
import inspect
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from serving import status
from serving.errors import InternalError, InvalidRequest, MalformedRequest, ServiceError
from serving.telemetry import stack_of

RpcObserver = Callable[[str, grpc.StatusCode, float], None]
REQUEST_ID = re.compile(r"[!-~]{1,128}")

log = structlog.get_logger()


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Guards every method, unary and streaming on either side.

    A ServiceError becomes its status. Any other exception becomes INTERNAL with an incident id; its
    stack is logged, its text is not. Bytes that are no message of the type are INVALID_ARGUMENT.
    CancelledError and AbortError pass.

    Every error carries the request id: the message's `request_id`, else the `x-request-id`
    metadata, else a new one. An empty `request_id` field is filled in: servicers always find one.

    A servicer's generator is closed as soon as its RPC ends, so its `finally` blocks run then:
    clean up there. Request streams are read through the iterator, not through context.read().

    observer: told method, code and seconds of every RPC that ended.
    on_fatal: told of an AssertionError, after which the process must not go on.
    hold: entered around every RPC with its method's name; may refuse with a ServiceError.
    """

    def __init__(
        self,
        *,
        observer: RpcObserver | None = None,
        on_fatal: Callable[[BaseException], None] | None = None,
        hold: Callable[[str], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._observer = observer or (lambda method, code, handling_s: None)
        self._on_fatal = on_fatal or (lambda error: None)
        self._hold = hold or (lambda method: nullcontext())

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler inside the guard; None for a method nobody serves."""
        method = handler_call_details.method
        request_id = _request_id_of(handler_call_details.invocation_metadata)
        try:
            handler = await continuation(handler_call_details)
        except Exception as error:  # noqa: BLE001
            return self._refusing(error, method, request_id)
        return None if handler is None else self._guarding(handler, method, request_id)

    def _guarding(self, handler: Any, method: str, request_id: str) -> Any:
        behaviour = _behaviour(handler)
        serialize = handler.response_serializer or _unchanged

        async def once(raw: Any, context: Any) -> Any:
            rpc = _Rpc(method, request_id, handler)
            async with self._guard(rpc, context):
                request = rpc.request(raw)
                with self._hold(method):
                    response = behaviour(request, context)
                    return serialize(await response if inspect.isawaitable(response) else response)

        async def stream(raw: Any, context: Any) -> None:
            rpc = _Rpc(method, request_id, handler)
            async with self._guard(rpc, context):
                request = rpc.request(raw)
                with self._hold(method):
                    await _send(behaviour(request, context), context, serialize)

        wrapped = stream if handler.response_streaming else once
        return _FACTORIES[handler.request_streaming, handler.response_streaming](
            wrapped, request_deserializer=None, response_serializer=_unless_bytes(serialize)
        )

    def _refusing(self, error: Exception, method: str, request_id: str) -> Any:
        """A handler for any kind of method: an interceptor behind this one raised."""

        async def refuse(requests: Any, context: Any) -> None:
            async with self._guard(_Rpc(method, request_id, None), context):
                raise error

        return grpc.stream_stream_rpc_method_handler(refuse)

    @asynccontextmanager
    async def _guard(self, rpc: _Rpc, context: Any) -> AsyncIterator[None]:
        started = time.perf_counter()
        code: grpc.StatusCode | None = None
        try:
            yield
        except asyncio.CancelledError:
            code = _cancel_code(context)
            raise
        except grpc.aio.InternalError:
            # A write failed because the client went away; the cancellation is on its way.
            code = grpc.StatusCode.CANCELLED
            raise
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001
            await self._answer(error, rpc, context)
        finally:
            handling_s = time.perf_counter() - started
            self._observer(rpc.method, code or context.code() or grpc.StatusCode.OK, handling_s)

    async def _answer(self, error: Exception, rpc: _Rpc, context: Any) -> None:
        unimplemented = grpc.StatusCode.UNIMPLEMENTED
        if isinstance(error, NotImplementedError) and context.code() is unimplemented:
            # The generated base class of a method that the servicer does not have.
            await context.abort(unimplemented, "this method is not implemented")
        told = self._told(error, rpc)
        details = status.to_status(told, rpc.request_id)
        set_before = tuple(context.trailing_metadata() or ())
        trailing = (*set_before, *status.trailing_metadata(details, rpc.request_id))
        await context.abort(status.code_of(told), details.message, trailing)

    def _told(self, error: Exception, rpc: _Rpc) -> ServiceError:
        """What the caller is told of an exception; logs it."""
        if isinstance(error, ServiceError):
            log.info(
                "rpc_refused", method=rpc.method, request_id=rpc.request_id, reason=error.reason
            )
            return error
        if isinstance(error, AssertionError):
            self._on_fatal(error)
        incident = uuid.uuid4().hex[:8]
        log.error(
            "rpc_failed",
            method=rpc.method,
            request_id=rpc.request_id,
            incident=incident,
            trace=stack_of(error),
        )
        return InternalError(
            f"internal error, incident {incident}", metadata={"incident": incident}
        )


class _Rpc:
    """One RPC: its method, its request id and how its bytes are parsed."""

    def __init__(self, method: str, request_id: str, handler: Any) -> None:
        self.method = method
        self.request_id = request_id
        self._handler = handler

    def request(self, raw: Any) -> Any:
        """The parsed request, or the iterator of parsed requests; raises MalformedRequest."""
        return self._each(raw) if self._handler.request_streaming else self._one(raw)

    async def _each(self, raw: Any) -> AsyncIterator[Any]:
        async for data in raw:
            yield self._one(data)

    def _one(self, data: bytes) -> Any:
        parse = self._handler.request_deserializer or _unchanged
        try:
            request = parse(data)
        except (DecodeError, ValueError):
            raise MalformedRequest(
                "the bytes of the request are not a message of this method's type"
            ) from None
        self._name(request)
        return request

    def _name(self, request: Any) -> None:
        given = getattr(request, "request_id", None)
        if given is None:
            return
        if given and not REQUEST_ID.fullmatch(given):
            raise InvalidRequest(
                "request_id must be 1 to 128 printable ASCII characters without spaces",
                field="request_id",
            )
        if given:
            self.request_id = given
        else:
            request.request_id = self.request_id


_FACTORIES: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _behaviour(handler: Any) -> Callable[..., Any]:
    kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    return next(kind for kind in kinds if kind is not None)


async def _send(responses: Any, context: Any, serialize: Callable[[Any], bytes]) -> None:
    """Write a servicer's responses, unless it is a coroutine, which writes them itself."""
    if inspect.isawaitable(responses):
        await responses
        return
    async with aclosing(responses):
        async for response in responses:
            await context.write(serialize(response))


def _cancel_code(context: Any) -> grpc.StatusCode:
    remaining_s = context.time_remaining()
    expired = remaining_s is not None and remaining_s <= 0
    return grpc.StatusCode.DEADLINE_EXCEEDED if expired else grpc.StatusCode.CANCELLED


def _request_id_of(metadata: Sequence[tuple[str, Any]] | None) -> str:
    for key, value in metadata or ():
        if key == status.REQUEST_ID_KEY and REQUEST_ID.fullmatch(str(value)):
            return str(value)
    return uuid.uuid4().hex


def _unless_bytes(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """The guard serialises; what a servicer writes through its context is still a message."""
    return lambda response: response if isinstance(response, bytes) else serialize(response)


def _unchanged(value: Any) -> Any:
    return value
