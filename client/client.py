"""Python clients of the gateway: Client (blocking) and AsyncClient (asyncio), the same methods.

    with Client("127.0.0.1:50050") as client:
        for event in client.generate([{"role": "user", "content": text}], max_tokens=60):
            if isinstance(event, Delta):
                print(event.text, end="")

Errors are the classes of serving.errors, rebuilt from the status; a gateway that cannot be reached
is UpstreamUnavailable. Leaving a generate() loop early, or closing its iterator, cancels the turn.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Self, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from client import results
from client.prompts import (
    GenerateOptions,
    PrefillOptions,
    PromptInput,
    complete_request,
    explain_request,
    generate_request,
)
from serving import status
from serving.channel import CLIENT_CHANNEL_OPTIONS
from specprefill.v1 import gateway_pb2, gateway_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:50050"
TURN_S_MAX = 1800.0
INFO_S_MAX = 10.0
GATEWAY_SERVICE = "specprefill.v1.Gateway"


class Client:
    """Blocking client. timeout_s: the deadline of a turn that names none."""

    def __init__(self, address: str = DEFAULT_ADDRESS, *, timeout_s: float = TURN_S_MAX) -> None:
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(address, options=list(CLIENT_CHANNEL_OPTIONS))
        self._gateway = gateway_pb2_grpc.GatewayStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def generate(
        self, prompt: PromptInput, **options: Unpack[GenerateOptions]
    ) -> Iterator[results.Event]:
        """Started, progress, text deltas and the finished message, as they come."""
        call = self._gateway.Generate(
            generate_request(prompt, options), timeout=options.get("timeout_s", self._timeout_s)
        )
        try:
            for message in call:
                event = results.event_from(message)
                if event is not None:
                    yield event
        except grpc.RpcError as error:
            raise status.raised(error) from error
        finally:
            call.cancel()

    def complete(self, prompt: PromptInput, **options: Unpack[GenerateOptions]) -> results.Reply:
        """The whole turn at once."""
        timeout_s = options.get("timeout_s", self._timeout_s)
        try:
            message = self._gateway.Complete(complete_request(prompt, options), timeout=timeout_s)
        except grpc.RpcError as error:
            raise status.raised(error) from error
        return results.reply_from(message)

    def explain(
        self, prompt: PromptInput, *, include_text: bool = False, **options: Unpack[PrefillOptions]
    ) -> results.Explanation:
        """The keep plan and the importance of every chunk, without generating."""
        request = explain_request(prompt, options, include_text=include_text)
        timeout_s = options.get("timeout_s", self._timeout_s)
        try:
            return results.explanation_from(self._gateway.Explain(request, timeout=timeout_s))
        except grpc.RpcError as error:
            raise status.raised(error) from error

    def server_info(self) -> results.ServerInfo:
        try:
            message = self._gateway.GetServerInfo(
                gateway_pb2.GetServerInfoRequest(), timeout=INFO_S_MAX
            )
        except grpc.RpcError as error:
            raise status.raised(error) from error
        return results.info_from(message)

    def health(self, service: str = GATEWAY_SERVICE) -> str:
        """SERVING or NOT_SERVING. service "" asks whether the process is alive at all."""
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            return _health_name(self._health.Check(request, timeout=INFO_S_MAX))
        except grpc.RpcError as error:
            raise status.raised(error) from error


class AsyncClient:
    """The same for asyncio; create and use it inside one event loop."""

    def __init__(self, address: str = DEFAULT_ADDRESS, *, timeout_s: float = TURN_S_MAX) -> None:
        self._timeout_s = timeout_s
        self._channel = grpc.aio.insecure_channel(address, options=list(CLIENT_CHANNEL_OPTIONS))
        self._gateway = gateway_pb2_grpc.GatewayStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def generate(
        self, prompt: PromptInput, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[results.Event]:
        """As Client.generate; close it (contextlib.aclosing) to cancel the turn at once."""
        call = self._gateway.Generate(
            generate_request(prompt, options), timeout=options.get("timeout_s", self._timeout_s)
        )
        try:
            async for message in call:
                event = results.event_from(message)
                if event is not None:
                    yield event
        except grpc.aio.AioRpcError as error:
            raise status.raised(error) from error
        finally:
            call.cancel()

    async def complete(
        self, prompt: PromptInput, **options: Unpack[GenerateOptions]
    ) -> results.Reply:
        timeout_s = options.get("timeout_s", self._timeout_s)
        request = complete_request(prompt, options)
        try:
            return results.reply_from(await self._gateway.Complete(request, timeout=timeout_s))
        except grpc.aio.AioRpcError as error:
            raise status.raised(error) from error

    async def explain(
        self, prompt: PromptInput, *, include_text: bool = False, **options: Unpack[PrefillOptions]
    ) -> results.Explanation:
        request = explain_request(prompt, options, include_text=include_text)
        timeout_s = options.get("timeout_s", self._timeout_s)
        try:
            return results.explanation_from(await self._gateway.Explain(request, timeout=timeout_s))
        except grpc.aio.AioRpcError as error:
            raise status.raised(error) from error

    async def server_info(self) -> results.ServerInfo:
        request = gateway_pb2.GetServerInfoRequest()
        try:
            message = await self._gateway.GetServerInfo(request, timeout=INFO_S_MAX)
        except grpc.aio.AioRpcError as error:
            raise status.raised(error) from error
        return results.info_from(message)

    async def health(self, service: str = GATEWAY_SERVICE) -> str:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            return _health_name(await self._health.Check(request, timeout=INFO_S_MAX))
        except grpc.aio.AioRpcError as error:
            raise status.raised(error) from error


def _health_name(response: health_pb2.HealthCheckResponse) -> str:
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
