"""Metrics and logs: what is exported, and what must never be in a log line."""

from __future__ import annotations

import io
import json
import logging
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import structlog
from prometheus_client import Counter, Gauge, generate_latest

from serving import telemetry
from serving.telemetry import (
    RpcMetrics,
    configure_logging,
    make_registry,
    stack_of,
    stage_histograms,
    start_metrics_server,
    stop_metrics_server,
    with_children,
)

METHODS = ["/specprefill.v1.Scorer/Score", "/specprefill.v1.Scorer/Release"]
SECRET = "the prompt of a user"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """Where the log of this test goes; logging is as before afterwards."""
    stream = io.StringIO()
    configure_logging("scorer", "info", stream)
    yield stream
    structlog.reset_defaults()
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, telemetry.LibraryRecords)]:
        root.removeHandler(handler)


def events(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def value(registry: Any, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_a_registry_describes_its_process_and_its_build() -> None:
    text = generate_latest(make_registry("scorer")).decode()
    assert "process_resident_memory_bytes" in text
    assert "scorer_build_info{" in text
    assert "_created" not in text


def test_registries_are_independent() -> None:
    first, second = make_registry("scorer"), make_registry("scorer")
    Counter("scorer_things_total", "Things.", registry=first).inc()
    assert value(second, "scorer_things_total") is None


def test_children_are_exported_as_zero_before_anything_happened() -> None:
    registry = make_registry("gateway")
    counter = Counter("gateway_turns_total", "Turns.", ("path", "reason"), registry=registry)
    with_children(counter, path=["DENSE", "SPARSE"], reason=["REQUESTED"])
    assert value(registry, "gateway_turns_total", path="DENSE", reason="REQUESTED") == 0
    assert value(registry, "gateway_turns_total", path="SPARSE", reason="REQUESTED") == 0
    assert value(registry, "gateway_turns_total", path="SPARSE", reason="ELIGIBLE") is None


def test_each_stage_has_its_own_histogram() -> None:
    registry = make_registry("scorer")
    stages = stage_histograms(registry, "scorer", {"prefill": "Prefill.", "k_pass": "K pass."})
    stages["prefill"].observe(0.2)
    assert value(registry, "scorer_prefill_seconds_count") == 1
    assert value(registry, "scorer_k_pass_seconds_count") == 0


def test_rpcs_are_counted_by_method_and_code_and_unknown_methods_are_not() -> None:
    registry = make_registry("scorer")
    metrics = RpcMetrics(registry, METHODS)
    labels = {"grpc_service": "specprefill.v1.Scorer", "grpc_method": "Score"}
    name = "grpc_server_handled_total"
    assert value(registry, name, grpc_code="InvalidArgument", **labels) == 0
    metrics.observe(METHODS[0], grpc.StatusCode.INVALID_ARGUMENT, 0.1)
    metrics.observe(METHODS[0], grpc.StatusCode.OK, 0.1)
    metrics.observe("/made.up/Method", grpc.StatusCode.OK, 0.1)
    assert value(registry, name, grpc_code="InvalidArgument", **labels) == 1
    assert value(registry, name, grpc_code="OK", **labels) == 1
    assert value(registry, "grpc_server_handling_seconds_count", **labels) == 2
    assert "made" not in generate_latest(registry).decode()


def test_buckets_cover_what_they_promise() -> None:
    assert telemetry.TTFT_BUCKETS[-1] == 2560
    assert telemetry.ITL_BUCKETS[0] == 0.001
    assert telemetry.STAGE_BUCKETS[0] == 0.0005
    assert telemetry.buckets_1_2_5(1, 50) == (1, 2, 5, 10, 20, 50)
    for buckets in (telemetry.TTFT_BUCKETS, telemetry.ITL_BUCKETS, telemetry.STAGE_BUCKETS):
        assert list(buckets) == sorted(set(buckets))


def full_registry() -> Any:
    registry = make_registry("target")
    RpcMetrics(registry, METHODS)
    stage_histograms(registry, "target", {"protected_prefill": "Seconds of protected prefill."})
    Gauge("target_kv_pages_free", "Free pages.", registry=registry)
    with_children(
        Counter("target_evictions_total", "Evictions.", ("reason",), registry=registry),
        reason=["oldest"],
    )
    return registry


def test_promtool_finds_nothing_to_complain_about() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    result = subprocess.run(
        [promtool, "check", "metrics"],
        input=generate_latest(full_registry()),
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr.decode()


def test_every_metric_has_help_and_no_colon() -> None:
    for family in full_registry().collect():
        assert family.documentation, family.name
        assert ":" not in family.name


def test_the_metrics_port_is_chosen_by_the_system_and_closes() -> None:
    server, port = start_metrics_server(full_registry(), "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
            assert b"target_kv_pages_free" in response.read()
        with pytest.raises(OSError, match="Address already in use"):
            start_metrics_server(full_registry(), "127.0.0.1", port)
    finally:
        stop_metrics_server(server)
    again, _ = start_metrics_server(full_registry(), "127.0.0.1", port)
    stop_metrics_server(again)


def test_a_log_line_is_json_with_the_common_fields_first(lines: io.StringIO) -> None:
    structlog.get_logger().info("turn_finished", request_id="r-1", kept_tokens=7)
    (event,) = events(lines)
    assert list(event)[:4] == ["ts", "level", "event", "service"]
    assert event["ts"].endswith("Z")
    assert (event["level"], event["event"], event["service"]) == ("info", "turn_finished", "scorer")
    assert (event["request_id"], event["kept_tokens"]) == ("r-1", 7)


def test_events_below_the_level_are_not_written(lines: io.StringIO) -> None:
    structlog.get_logger().debug("detail")
    assert events(lines) == []


def test_a_stack_names_places_and_classes_but_quotes_nothing() -> None:
    def fail() -> None:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            raise ValueError(f"bad {SECRET}") from error

    with pytest.raises(ValueError, match="bad") as caught:
        fail()
    stack = stack_of(caught.value)
    assert stack[0] == "ValueError"
    assert "KeyError" in stack
    assert any(line.endswith(" fail") for line in stack)
    assert SECRET not in "".join(stack)


def test_a_stack_of_an_endless_chain_of_causes_is_bounded() -> None:
    error = ValueError()
    error.__cause__ = error
    assert len(stack_of(error)) <= telemetry.STACK_LINES_MAX


def test_records_of_libraries_come_through_without_their_texts(lines: io.StringIO) -> None:
    logger = logging.getLogger("grpc._cython.cygrpc")
    try:
        raise ValueError(SECRET)
    except ValueError as error:
        logger.exception("Unexpected %s", error)
    logger.info("not worth a line")
    (event,) = events(lines)
    assert event["level"] == "error"
    assert event["logger"] == "grpc._cython.cygrpc"
    assert event["trace"][0] == "ValueError"
    assert SECRET not in lines.getvalue()


def test_configuring_again_does_not_write_records_twice(lines: io.StringIO) -> None:
    configure_logging("scorer", "info", lines)
    logging.getLogger("grpc").warning("x")
    assert len(events(lines)) == 1


def test_a_closed_log_stream_fails_nobody() -> None:
    stream = io.StringIO()
    sink = telemetry.LineSink(stream)
    sink.msg("one")
    stream.close()
    sink.msg("two")
    assert sink.dropped == 1
