"""Metrics and logs of a service: registry, buckets, RPC metrics, metrics port, JSON log lines."""

from __future__ import annotations

import itertools
import logging
import platform
import socket
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping, MutableMapping
from importlib import metadata
from socketserver import ThreadingMixIn
from typing import Any, TextIO, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import grpc
import prometheus_client
import structlog
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    make_wsgi_app,
)
from prometheus_client.process_collector import ProcessCollector

DISTRIBUTION = "specprefill-serving"
STACK_LINES_MAX = 40
CLOSE_POLL_S = 0.05


def buckets_1_2_5(first: int, last: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... from first to last, both inside."""
    series = (step * 10**power for power in range(12) for step in (1, 2, 5))
    return tuple(float(value) for value in series if first <= value <= last)


TTFT_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0,
)  # fmt: skip
STAGE_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0,
    40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
TOKEN_BUCKETS = buckets_1_2_5(1, 200_000)

Metric = TypeVar("Metric", Counter, Gauge, Histogram)


def make_registry(service: str) -> CollectorRegistry:
    """A service's own registry, with its process and its build in it.

    service: "gateway", "scorer" or "target", the first word of every metric of its own.
    """
    # The _created series double what a scrape carries and nobody reads them.
    prometheus_client.disable_created_metrics()
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    build = Info(f"{service}_build", f"Versions the {service} runs on.", registry=registry)
    build.info(
        {
            "version": distribution_version(),
            "python": platform.python_version(),
            "grpc": grpc.__version__,
        }
    )
    return registry


def distribution_version() -> str:
    """This distribution's version, or "unknown" where it runs without being installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


def with_children(metric: Metric, **labels: Iterable[str]) -> Metric:
    """Create the children of a labelled metric now: every series is exported from the start.

    labels: for every label name the closed set of its values; all combinations are made.
    """
    for values in itertools.product(*labels.values()):
        metric.labels(**dict(zip(labels, values, strict=True)))
    return metric


def stage_histograms(
    registry: CollectorRegistry, service: str, stages: Mapping[str, str]
) -> dict[str, Histogram]:
    """One histogram `<service>_<stage>_seconds` a stage. stages: name -> help text."""
    return {
        stage: Histogram(
            f"{service}_{stage}_seconds", text, buckets=STAGE_BUCKETS, registry=registry
        )
        for stage, text in stages.items()
    }


class RpcMetrics:
    """Counts and times finished RPCs of known methods, under the names that gRPC dashboards use.

    methods: full names, "/package.Service/Method". Others (health, reflection) are not counted.
    """

    def __init__(self, registry: CollectorRegistry, methods: Iterable[str]) -> None:
        labels = ("grpc_service", "grpc_method")
        self._handled = Counter(
            "grpc_server_handled_total",
            "RPCs that ended, by status code.",
            (*labels, "grpc_code"),
            registry=registry,
        )
        self._handling = Histogram(
            "grpc_server_handling_seconds",
            "Seconds from an RPC's start to its end, streams included.",
            labels,
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self._methods = {name: split_method(name) for name in methods}
        for service, method in self._methods.values():
            self._handling.labels(service, method)
            for code in grpc.StatusCode:
                self._handled.labels(service, method, code_label(code))

    def observe(self, method: str, code: grpc.StatusCode, handling_s: float) -> None:
        """Count one RPC that ended."""
        names = self._methods.get(method)
        if names is not None:
            self._handled.labels(*names, code_label(code)).inc()
            self._handling.labels(*names).observe(handling_s)


def split_method(name: str) -> tuple[str, str]:
    """("package.Service", "Method") of "/package.Service/Method"."""
    service, _, method = name.lstrip("/").rpartition("/")
    return service, method


def code_label(code: grpc.StatusCode) -> str:
    """A code as gRPC dashboards write it: "OK", "InvalidArgument"."""
    return "OK" if code is grpc.StatusCode.OK else code.name.title().replace("_", "")


def start_metrics_server(
    registry: CollectorRegistry, host: str, port: int
) -> tuple[WSGIServer, int]:
    """Serve the registry over HTTP from a daemon thread; returns the server and its real port.

    Raises OSError if the address is taken. Close it with stop_metrics_server.
    """
    kind = _MetricsServer6 if ":" in host else _MetricsServer
    server = make_server(
        host.strip("[]"), port, make_wsgi_app(registry), kind, handler_class=_ScrapeHandler
    )
    threading.Thread(
        target=server.serve_forever, args=(CLOSE_POLL_S,), name="metrics", daemon=True
    ).start()
    return server, server.server_port


def stop_metrics_server(server: WSGIServer) -> None:
    """Close the port; blocks until the serving thread has seen it, CLOSE_POLL_S at most."""
    server.shutdown()
    server.server_close()


class _MetricsServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _MetricsServer6(_MetricsServer):
    address_family = socket.AF_INET6


class _ScrapeHandler(WSGIRequestHandler):
    # A scraper that sends nothing must not hold its thread.
    timeout = 10.0

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not worth a line."""


class LineSink:
    """Writes log lines and counts those it could not: a closed pipe must not fail a request."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.dropped = 0

    def msg(self, line: str) -> None:
        """Write one line."""
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self.dropped += 1

    log = debug = info = warning = error = critical = exception = fatal = msg


def configure_logging(service: str, level: str, stream: TextIO | None = None) -> None:
    """JSON lines with ts, level, event, service and what was bound; stdout by default.

    Log events with ids and counts; never prompt text or token ids. Other libraries' records from
    level warning come through without arguments and exception texts, which may quote a request.
    """
    sink = LineSink(sys.stdout if stream is None else stream)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
            _Envelope(service),
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=lambda *_: sink,
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, LibraryRecords)]:
        root.removeHandler(handler)
    root.addHandler(LibraryRecords())


def stack_of(error: BaseException) -> list[str]:
    """Where an exception came from: class names and places, but no message and no value."""
    lines: list[str] = []
    seen: BaseException | None = error
    while seen is not None and len(lines) < STACK_LINES_MAX:
        lines.append(type(seen).__name__)
        frames = reversed(traceback.extract_tb(seen.__traceback__))
        lines += [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        seen = seen.__cause__ or seen.__context__
    return lines[:STACK_LINES_MAX]


class LibraryRecords(logging.Handler):
    """Sends a library's log record through structlog: where it came from, not what it says."""

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        structlog.get_logger().log(
            record.levelno,
            "library_record",
            logger=record.name,
            at=f"{record.filename}:{record.lineno}",
            trace=stack_of(error) if error else None,
        )


class _Envelope:
    """Puts the fields that every line has in front."""

    def __init__(self, service: str) -> None:
        self._service = service

    def __call__(
        self, logger: Any, name: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        front = {key: event.pop(key) for key in ("ts", "level", "event")}
        return {**front, "service": self._service, **event}
