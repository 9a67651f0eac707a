"""serve(): what starts, what ends a process, and with which exit code."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from serving import errors, status
from serving.channel import channel_options
from serving.telemetry import configure_logging
from specprefill.v1 import scorer_pb2, scorer_pb2_grpc
from tests.service.fake_scorer import FakeSettings, run

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 20


class LogLines(io.StringIO):
    """A log stream that tests can wait on."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def write(self, text: str) -> int:
        self._queue.put_nowait(json.loads(text))
        return len(text)

    async def event(self, name: str) -> dict[str, Any]:
        """The next event of this name; earlier ones are skipped."""
        while (event := await asyncio.wait_for(self._queue.get(), TIMEOUT_S))["event"] != name:
            pass
        return event


@pytest.fixture
def log_lines() -> Iterator[LogLines]:
    lines = LogLines()
    configure_logging("fake", "info", lines)
    yield lines
    structlog.reset_defaults()


def scorer_at(port: int, **settings: float) -> tuple[grpc.aio.Channel, scorer_pb2_grpc.ScorerStub]:
    options = channel_options(FakeSettings(**settings))
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
    return channel, scorer_pb2_grpc.ScorerStub(channel)


async def test_a_stop_drains_and_exits_with_0_and_runs_on_stop_last(log_lines: LogLines) -> None:
    calls: list[str] = []

    def note(name: str) -> Any:
        async def callback() -> None:
            calls.append(name)

        return callback

    stop = asyncio.Event()
    how = {name: note(name) for name in ("on_start", "on_drain", "on_stop")}
    serving = asyncio.ensure_future(run(FakeSettings(), stop=stop, **how))
    starting = await log_lines.event("starting")
    assert starting["settings"]["host"] == "127.0.0.1"
    event = await log_lines.event("serving")
    assert event["port"] > 0
    assert event["metrics_port"] > 0
    assert calls == ["on_start"]
    stop.set()
    assert await asyncio.wait_for(serving, TIMEOUT_S) == 0
    assert calls == ["on_start", "on_drain", "on_stop"]


async def test_a_start_that_fails_exits_with_1_and_says_why(log_lines: LogLines) -> None:
    async def load() -> None:
        raise ValueError("model.safetensors is missing")

    assert await asyncio.wait_for(run(FakeSettings(), on_start=load), TIMEOUT_S) == 1
    assert (await log_lines.event("start_failed"))["reason"] == "model.safetensors is missing"


async def test_a_taken_port_exits_with_1_whichever_port_it_is(log_lines: LogLines) -> None:
    stop = asyncio.Event()
    serving = asyncio.ensure_future(run(FakeSettings(), stop=stop))
    event = await log_lines.event("serving")
    for taken in ({"port": event["port"]}, {"metrics_port": event["metrics_port"]}):
        assert await asyncio.wait_for(run(FakeSettings(**taken)), TIMEOUT_S) == 1
        assert (await log_lines.event("start_failed"))["reason"]
    stop.set()
    assert await asyncio.wait_for(serving, TIMEOUT_S) == 0


async def test_a_stop_while_loading_does_not_wait_for_the_model(log_lines: LogLines) -> None:
    stop = asyncio.Event()
    serving = asyncio.ensure_future(
        run(FakeSettings(), stop=stop, on_start=lambda: asyncio.Event().wait())
    )
    await log_lines.event("listening")
    stop.set()
    assert await asyncio.wait_for(serving, TIMEOUT_S) == 0


async def test_a_broken_invariant_answers_without_text_and_ends_the_process(
    log_lines: LogLines,
) -> None:
    serving = asyncio.ensure_future(run(FakeSettings(grace_s=3600)))
    channel, stub = scorer_at((await log_lines.event("serving"))["port"])
    waiting = stub.Score(scorer_pb2.ScoreRequest(instance_id="wait"), timeout=TIMEOUT_S)
    await waiting.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Release(scorer_pb2.ScorerReleaseRequest(instance_id="AssertionError"))
    assert type(status.raised(caught.value)) is errors.InternalError
    assert await asyncio.wait_for(serving, TIMEOUT_S) == 1
    assert (await log_lines.event("fatal"))["level"] == "critical"
    await channel.close()


async def test_a_problem_of_the_event_loop_is_logged_without_its_text(
    log_lines: LogLines,
) -> None:
    stop = asyncio.Event()
    serving = asyncio.ensure_future(run(FakeSettings(), stop=stop))
    await log_lines.event("serving")
    asyncio.get_running_loop().call_exception_handler(
        {"message": "Task exception was never retrieved", "exception": ValueError("private")}
    )
    problem = await log_lines.event("loop_problem")
    assert problem["trace"] == ["ValueError"]
    assert "private" not in str(problem)
    stop.set()
    assert await asyncio.wait_for(serving, TIMEOUT_S) == 0


@pytest.mark.parametrize("limit_s", [0.1, 5.0], ids=["hangs", "fails"])
async def test_last_words_that_fail_or_hang_are_an_exit_code_of_1(
    log_lines: LogLines, limit_s: float
) -> None:
    async def close() -> None:
        if limit_s == 0.1:
            await asyncio.Event().wait()
        raise ValueError("private")

    stop = asyncio.Event()
    stop.set()
    code = await asyncio.wait_for(
        run(FakeSettings(stop_s=limit_s), stop=stop, on_stop=close), TIMEOUT_S
    )
    assert code == 1
    event = await log_lines.event("stop_timed_out" if limit_s == 0.1 else "stop_failed")
    assert "private" not in str(event)


class Process:
    """The fake service as a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def event(self, name: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        while True:
            line = await asyncio.wait_for(self.process.stdout.readline(), TIMEOUT_S)
            assert line, f"the process ended before {name}"
            event: dict[str, Any] = json.loads(line)
            if event["event"] == name:
                return event

    async def exit_code(self) -> int:
        return await asyncio.wait_for(self.process.wait(), TIMEOUT_S)


@asynccontextmanager
async def started(**environ: str) -> AsyncIterator[Process]:
    variables = {f"SPECPREFILL_FAKE_{name}": value for name, value in environ.items()}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.service.fake_scorer",
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_a_running_stream_finish_and_exits_with_0(
    number: signal.Signals,
) -> None:
    async with started() as service:
        channel, stub = scorer_at((await service.event("serving"))["port"])
        stream = stub.Score(scorer_pb2.ScoreRequest(instance_id="wait"), timeout=TIMEOUT_S)
        await stream.read()
        service.process.send_signal(number)
        assert (await service.event("draining"))["running"] == 1
        assert (await stream.read()).progress.done_tokens == 2
        assert await stream.read() is grpc.aio.EOF
        assert (await service.event("stopped"))["exit_code"] == 0
        assert await service.exit_code() == 0
        await channel.close()


async def test_a_second_signal_does_not_wait_for_streams() -> None:
    async with started(GRACE_S="3600", DRAIN_S="600") as service:
        channel, stub = scorer_at((await service.event("serving"))["port"])
        stream = stub.Score(scorer_pb2.ScoreRequest(instance_id="flood"), timeout=TIMEOUT_S)
        await stream.read()
        service.process.terminate()
        await service.event("draining")
        service.process.terminate()
        assert await service.exit_code() == 0
        await channel.close()


async def test_bad_settings_exit_with_2_and_one_line() -> None:
    async with started(PROT="1") as service:
        _, err = await asyncio.wait_for(service.process.communicate(), TIMEOUT_S)
        assert service.process.returncode == 2
        assert err.decode().splitlines() == [
            "SPECPREFILL_FAKE_PROT is not a setting of this service,"
            " did you mean SPECPREFILL_FAKE_PORT?"
        ]


async def test_a_hung_process_is_found_by_the_pings_of_its_caller() -> None:
    async with started(KEEPALIVE_INTERVAL_MIN_S="0.05") as service:
        port = (await service.event("serving"))["port"]
        channel, stub = scorer_at(port, keepalive_interval_s=0.2, keepalive_timeout_s=0.3)
        stream = stub.Score(scorer_pb2.ScoreRequest(instance_id="wait"), timeout=TIMEOUT_S)
        await stream.read()
        service.process.send_signal(signal.SIGSTOP)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(stream.read(), 10)
        assert type(status.raised(caught.value)) is errors.UpstreamUnavailable
        await channel.close()
