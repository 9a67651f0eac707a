"""One service's process: gRPC server, health, reflection, limits, metrics port; start to end."""

from __future__ import annotations

import asyncio
import enum
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from wsgiref.simple_server import WSGIServer

import grpc
import structlog
from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from serving.admission import Admission, State
from serving.channel import server_options
from serving.interceptor import ErrorInterceptor
from serving.settings import ServiceSettings, describe
from serving.telemetry import RpcMetrics, stack_of, start_metrics_server, stop_metrics_server

EXIT_OK = 0
EXIT_FAILED = 1
# After a broken invariant: long enough for the statuses of what was running.
FATAL_GRACE_S = 1.0
# After the last request ended: its status is still on its way.
SETTLE_S = 0.2

log = structlog.get_logger()

Callback = Callable[[], Awaitable[None]]


async def serve(
    *,
    settings: ServiceSettings,
    service_name: str,
    service_names: Sequence[str],
    add_services: Callable[[grpc.aio.Server], None],
    registry: CollectorRegistry,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    on_start: Callback | None = None,
    on_drain: Callback | None = None,
    on_stop: Callback | None = None,
    fatal: asyncio.Event | None = None,
    stop: asyncio.Event | None = None,
) -> int:
    """Run a service until SIGTERM or SIGINT; returns the exit code. A __main__ is this:

        async def run(settings: ScorerSettings) -> int:
            registry = make_registry("scorer")
            fatal = asyncio.Event()
            gpu = GpuThread(..., on_fatal=fatal_reporter(fatal))
            servicer = ScorerServicer(settings, gpu, ScorerMetrics(registry))
            return await serve(
                settings=settings,
                service_name="scorer",
                service_names=["specprefill.v1.Scorer"],
                add_services=lambda server: add_ScorerServicer_to_server(servicer, server),
                registry=registry,
                on_start=servicer.load,
                on_stop=servicer.close,
                fatal=fatal,
            )

        def main() -> None:
            settings = load_settings_or_exit(ScorerSettings, os.environ)
            configure_logging("scorer", settings.log_level)
            raise SystemExit(asyncio.run(run(settings)))

    service_names: fully qualified; their readiness becomes SERVING after on_start. Until then their
    RPCs get UNAVAILABLE, while liveness ("") is SERVING at once.
    The first signal, or `stop`: NOT_SERVING, on_drain, drain_s, then the listener closes and
    running RPCs have grace_s; code 0. A second signal cuts them off. `fatal`: NOT_SERVING, a short
    grace, code 1, as for an on_start that fails or a port that is taken. on_stop runs last, always.
    """
    fatal = fatal or asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(_log_loop_problem)
    log.info("starting", settings=describe(settings))
    server = ServiceServer(
        settings=settings,
        service_names=service_names,
        add_services=add_services,
        registry=registry,
        interceptors=interceptors,
        on_fatal=fatal_reporter(fatal),
    )
    with _signals(stop or asyncio.Event()) as (stop, hurry):
        outcome = await _until_stopped(server, on_start=on_start, stop=stop, fatal=fatal)
        if outcome is _Outcome.STOP:
            log.info("draining", running=server.admission.running)
            await server.drain()
            await _finish(on_drain, settings.stop_s, "drain")
            await _any(asyncio.sleep(settings.drain_s), hurry.wait(), fatal.wait())
            await server.stop(settings.grace_s, cut=(hurry, fatal))
        else:
            await server.drain()
            await server.stop(FATAL_GRACE_S)
        clean = await _finish(on_stop, settings.stop_s, "stop")
    ok = outcome is _Outcome.STOP and clean and not fatal.is_set()
    code = EXIT_OK if ok else EXIT_FAILED
    log.info("stopped", service_name=service_name, exit_code=code)
    return code


class ServiceServer:
    """A gRPC server with everything our services share, without signals: serve() adds those.

    Order of calls: start, ready, drain, stop. `port` and `metrics_port` are real after start.
    """

    def __init__(
        self,
        *,
        settings: ServiceSettings,
        service_names: Sequence[str],
        add_services: Callable[[grpc.aio.Server], None],
        registry: CollectorRegistry,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        on_fatal: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._settings = settings
        self._service_names = tuple(service_names)
        self.registry = registry
        self._health = health.aio.HealthServicer()
        self._metrics_server: WSGIServer | None = None
        self.port = 0
        self.metrics_port = 0
        self.admission = Admission(services=service_names, rpcs_max=settings.concurrent_rpcs_max)
        rpc_metrics = RpcMetrics(registry, _methods_of(service_names))
        guard = ErrorInterceptor(
            observer=rpc_metrics.observe, on_fatal=on_fatal, hold=self.admission.held
        )
        self._server = grpc.aio.server(
            interceptors=[guard, *interceptors],
            options=server_options(settings),
            # This ceiling counts health checks and has no details: it stays far above admission's.
            maximum_concurrent_rpcs=2 * settings.concurrent_rpcs_max + 64,
        )
        add_services(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if settings.reflection:
            names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)

    async def start(self) -> None:
        """Listen, not ready yet. Raises OSError or RuntimeError if a port is taken."""
        for name in self._service_names:
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        self._metrics_server, self.metrics_port = start_metrics_server(
            self.registry, self._settings.metrics_host, self._settings.metrics_port
        )
        self.port = self._server.add_insecure_port(
            _address(self._settings.host, self._settings.port)
        )
        await self._server.start()
        log.info("listening", host=self._settings.host, port=self.port)

    async def ready(self) -> None:
        """Take requests."""
        self.admission.state = State.SERVING
        for name in self._service_names:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        log.info(
            "serving",
            host=self._settings.host,
            port=self.port,
            metrics_host=self._settings.metrics_host,
            metrics_port=self.metrics_port,
        )

    async def drain(self) -> None:
        """Tell health checks NOT_SERVING, for good. Requests are still taken."""
        await self._health.enter_graceful_shutdown()
        if self.admission.state is State.SERVING:
            self.admission.state = State.DRAINING

    async def stop(self, grace_s: float, *, cut: Sequence[asyncio.Event] = ()) -> None:
        """Close the listener; cancel what still runs after grace_s or at an event of `cut`."""
        self.admission.state = State.STOPPED
        stopping = asyncio.ensure_future(self._server.stop(grace_s))
        # Health watches never end by themselves, so the requests are what is waited for.
        cuts = (event.wait() for event in cut)
        await _any(_joined(stopping), self.admission.idle(), *cuts)
        if self.admission.running == 0:
            await asyncio.wait({stopping}, timeout=SETTLE_S)
        await self._server.stop(None)
        await stopping
        if self._metrics_server is not None:
            await asyncio.to_thread(stop_metrics_server, self._metrics_server)


@asynccontextmanager
async def running(server: ServiceServer, *, grace_s: float = 0.0) -> AsyncIterator[ServiceServer]:
    """A server that takes requests inside the block."""
    try:
        await server.start()
        await server.ready()
        yield server
    finally:
        await server.drain()
        await server.stop(grace_s)


def fatal_reporter(fatal: asyncio.Event) -> Callable[[BaseException], None]:
    """A callback for any thread that logs an error and sets the event; made on the event loop."""
    loop = asyncio.get_running_loop()

    def report(error: BaseException) -> None:
        log.critical("fatal", trace=stack_of(error))
        if not loop.is_closed():
            loop.call_soon_threadsafe(fatal.set)

    return report


class _Outcome(enum.Enum):
    STOP = "stop"
    FAILED = "failed"


async def _until_stopped(
    server: ServiceServer, *, on_start: Callback | None, stop: asyncio.Event, fatal: asyncio.Event
) -> _Outcome:
    try:
        await server.start()
    except (OSError, RuntimeError) as error:
        log.error("start_failed", reason=str(error))
        return _Outcome.FAILED
    if on_start is not None:
        loading = asyncio.ensure_future(on_start())
        await _any(_joined(loading), stop.wait(), fatal.wait())
        if not loading.done():
            loading.cancel()
        elif (problem := loading.exception()) is not None:
            # No request has come in yet, so this text quotes none.
            log.error("start_failed", reason=str(problem), trace=stack_of(problem))
            return _Outcome.FAILED
    if not stop.is_set() and not fatal.is_set():
        await server.ready()
        await _any(stop.wait(), fatal.wait())
    return _Outcome.FAILED if fatal.is_set() else _Outcome.STOP


async def _finish(callback: Callback | None, limit_s: float, name: str) -> bool:
    """Run a service's last words for at most limit_s; False if they failed or did not end."""
    if callback is None:
        return True
    task = asyncio.ensure_future(callback())
    await asyncio.wait({task}, timeout=limit_s)
    if not task.done():
        task.cancel()
        log.error(f"{name}_timed_out", limit_s=limit_s)
        return False
    if (error := task.exception()) is not None:
        log.error(f"{name}_failed", trace=stack_of(error))
        return False
    return True


@contextmanager
def _signals(stop: asyncio.Event) -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Events of the first and of the second SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    hurry = asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop, hurry
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _any(*waits: Coroutine[Any, Any, Any]) -> None:
    """Wait for the first of them and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _joined(task: asyncio.Future[Any]) -> None:
    """Wait for a task without owning it: neither its error nor our cancellation passes."""
    await asyncio.wait({task})


def _methods_of(service_names: Sequence[str]) -> list[str]:
    pool = descriptor_pool.Default()
    return [
        f"/{name}/{method.name}"
        for name in service_names
        for method in pool.FindServiceByName(name).methods
    ]


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _log_loop_problem(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """In place of the loop's own handler, whose text quotes exceptions."""
    error = context.get("exception")
    log.error("loop_problem", trace=stack_of(error) if error else [str(context["message"])])
