"""Cancels, deadlines and failures: work stops everywhere, handles are released exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.ports import GenerateCall, Restored, Tokens
from serving import errors, status
from tests.service.fake_ports import FIRST_TIMES, Hold, generated, reply, score_steps
from tests.service.gateway_rig import (
    Rig,
    complete_request,
    gateway_rig,
    generate_request,
    text_prompt,
)
from tests.unit.gateway.tokenizer_dirs import write_byte_level

PHASES = ["score", "prefill", "decode"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def rig(model_dir: Path) -> AsyncIterator[Rig]:
    async with gateway_rig(model_dir) as opened:
        yield opened


def _hold_in(rig: Rig, phase: str) -> Hold:
    """Make the services stop in a phase of the turn."""
    hold = Hold()
    if phase == "score":
        rig.scorer.steps = lambda call: (hold, *score_steps(call))
    elif phase == "prefill":
        rig.target.steps = lambda call: (Restored(0), hold, *reply(call, (72,)))
    else:
        rig.target.steps = lambda call: (Tokens((72,), FIRST_TIMES), hold, generated(call, 1))
    return hold


async def _until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_true():  # noqa: ASYNC110 - nothing of what is waited for has an event.
            await asyncio.sleep(0)


async def _settled(rig: Rig) -> None:
    """Nothing runs any more."""
    await _until(lambda: rig.scorer.open == rig.target.open == 0)
    await _until(lambda: rig.sample("gateway_turns_running") == 0)
    await rig.releases.settled()


def _released_once(rig: Rig) -> bool:
    return sorted(rig.target.released) == sorted(call.handle for call in rig.target.calls)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("entry", ["Complete", "Generate"])
async def test_a_cancel_stops_the_work_in_every_phase(rig: Rig, phase: str, entry: str) -> None:
    hold = _hold_in(rig, phase)
    if entry == "Complete":
        call: Any = rig.stub.Complete(complete_request())
    else:
        call = rig.stub.Generate(generate_request())
        await call.read()
    await hold.reached.wait()
    assert rig.scorer.open + rig.target.open == 1
    call.cancel()
    await _settled(rig)
    assert _released_once(rig)
    assert len(rig.target.calls) == (phase != "score")
    assert rig.sample("gateway_turns_cancelled_total", phase=phase) == 1
    # The next turn finds everything free.
    rig.scorer.steps, rig.target.steps = score_steps, lambda call: reply(call, (72,))
    await rig.stub.Complete(complete_request())


async def test_a_cancel_while_waiting_for_a_place_leaves_the_queue(model_dir: Path) -> None:
    async with gateway_rig(model_dir, turns_running_max=1) as rig:
        hold = _hold_in(rig, "prefill")
        first = rig.stub.Complete(complete_request())
        await hold.reached.wait()
        second = rig.stub.Complete(complete_request())
        await _until(lambda: rig.sample("gateway_turns_running") == 2)
        second.cancel()
        await _until(lambda: rig.sample("gateway_turns_running") == 1)
        assert rig.sample("gateway_turns_cancelled_total", phase="queue") == 1
        hold.let_go.set()
        await first
        assert len(rig.target.calls) == 1


@pytest.mark.parametrize("phase", PHASES)
async def test_a_deadline_ends_the_turn_in_every_phase(model_dir: Path, phase: str) -> None:
    # The client's own clock would hide who said DEADLINE_EXCEEDED: here it is the gateway's.
    async with gateway_rig(model_dir, turn_s_max=0.2) as rig:
        _hold_in(rig, phase)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await rig.stub.Complete(complete_request(), timeout=30)
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert isinstance(status.raised(ended.value), errors.DeadlineExceeded)
        assert "during" in (ended.value.details() or "")
        await _settled(rig)
        assert _released_once(rig)


async def test_services_get_what_is_left_of_the_callers_deadline(model_dir: Path) -> None:
    async with gateway_rig(model_dir, deadline_margin_s=2, score_s_max=7) as rig:
        await rig.stub.Complete(complete_request(), timeout=20)
        await rig.stub.Complete(complete_request(), timeout=8)
        await rig.stub.Complete(complete_request())
    assert rig.scorer.timeouts_s[0] == 7
    assert 4 < rig.scorer.timeouts_s[1] < 6.5
    assert rig.scorer.timeouts_s[2] == 7
    assert 15 < rig.target.timeouts_s[0] < 18.5
    assert 3 < rig.target.timeouts_s[1] < 6.5
    assert 3590 < rig.target.timeouts_s[2] < 3598


async def test_a_deadline_that_is_over_already_starts_nothing(model_dir: Path) -> None:
    async with gateway_rig(model_dir, deadline_margin_s=30) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await rig.stub.Complete(complete_request(), timeout=20)
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert rig.scorer.calls == rig.target.calls == []


@pytest.mark.parametrize(
    "error",
    [
        errors.UpstreamUnavailable("gone"),
        errors.KvCacheFull("no page is free", retry_after_s=0.5),
        errors.QueueFull("full", retry_after_s=0.5),
        errors.DeadlineExceeded("late"),
        errors.InternalError("internal error, incident 12345678"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_target_that_fails_before_the_first_token_is_not_tried_again(
    rig: Rig, error: errors.ServiceError
) -> None:
    rig.target.steps = lambda call: (Restored(0), error)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await rig.stub.Complete(complete_request(request_id="mine"))
    rebuilt = status.raised(failed.value)
    assert type(rebuilt) is type(error)
    assert rebuilt.retry_after_s == error.retry_after_s
    assert rebuilt.metadata["request_id"] == "mine"
    assert len(rig.target.calls) == 1
    await _settled(rig)
    assert _released_once(rig)


async def test_a_target_that_goes_after_the_first_token_tears_the_answer(rig: Rig) -> None:
    def steps(call: GenerateCall) -> tuple[Any, ...]:
        return (Tokens((72,), FIRST_TIMES), Tokens((73,)), errors.UpstreamUnavailable("gone"))

    rig.target.steps = steps
    call = rig.stub.Generate(generate_request())
    kinds = [(await call.read()).WhichOneof("event") for _ in range(4)]
    assert kinds == ["started", "progress", "delta", "delta"]
    error = await _error_of(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    rebuilt = status.raised(error)
    assert isinstance(rebuilt, errors.StreamInterrupted)
    assert rebuilt.metadata["tokens_sent"] == "2"
    assert len(rig.target.calls) == 1
    await _settled(rig)
    assert _released_once(rig)


async def test_a_target_that_ignores_the_plan_is_a_fault_and_no_answer(rig: Rig) -> None:
    def steps(call: GenerateCall) -> tuple[Any, ...]:
        return (Tokens((72,), FIRST_TIMES), replace(generated(call, 1), sparse=False))

    rig.target.steps = steps
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await rig.stub.Complete(complete_request())
    assert failed.value.code() is grpc.StatusCode.INTERNAL


async def test_a_release_that_fails_costs_the_turn_nothing(rig: Rig) -> None:
    rig.target.release_error = errors.UpstreamUnavailable("gone")
    response = await rig.stub.Complete(complete_request())
    assert response.finished.finish_reason
    await _settled(rig)
    assert _released_once(rig)


async def test_every_turn_has_its_own_handle(rig: Rig) -> None:
    for _ in range(3):
        await rig.stub.Complete(complete_request())
    await _settled(rig)
    assert len({call.handle for call in rig.target.calls}) == 3
    assert _released_once(rig)


async def test_a_client_that_does_not_read_loses_its_stream_alone(model_dir: Path) -> None:
    text = "word" * 4096

    def endless(call: GenerateCall) -> Any:
        yield Tokens((72,), FIRST_TIMES)
        # Far more than the transport buffers.
        for _ in range(200):
            yield Tokens(tuple([72] * len(text)))
        yield generated(call, 1)

    async with gateway_rig(model_dir, write_s_max=0.3) as rig:
        rig.target.steps = endless
        slow = rig.stub.Generate(generate_request(text_prompt("the fox")))
        await slow.read()
        await _until(lambda: rig.target.open == 1)
        rig.target.steps = lambda call: reply(call, (72, 73))
        quick = await rig.stub.Complete(complete_request())
        assert quick.finished.counts.completion_tokens == 2
        # The target is free again although the client has still not read.
        await _settled(rig)
        assert _released_once(rig)
        error = await _error_of(slow)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(status.raised(error), errors.SlowConsumer)


async def test_a_client_may_go_away_while_a_message_waits_for_it(model_dir: Path) -> None:
    async with gateway_rig(model_dir, turn_s_max=0.3) as rig:
        rig.target.steps = lambda call: (Tokens((72,) * 5_000_000, FIRST_TIMES), generated(call, 1))
        slow = rig.stub.Generate(generate_request(text_prompt("the fox")))
        await slow.read()
        await _settled(rig)
        slow.cancel()
        assert _released_once(rig)


async def _read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def _error_of(call: Any) -> grpc.aio.AioRpcError:
    """The error that ends a stream, once all messages before it are read."""
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await _read_all(call)
    return ended.value


async def test_a_hundred_cancels_leave_nothing_behind(rig: Rig) -> None:
    for index in range(100):
        hold = _hold_in(rig, PHASES[index % 3])
        call = rig.stub.Generate(generate_request(text_prompt("the fox " * 30)))
        await call.read()
        await hold.reached.wait()
        call.cancel()
        rig.scorer.steps = score_steps
    await _settled(rig)
    assert _released_once(rig)
    total = sum(rig.sample("gateway_turns_cancelled_total", phase=phase) for phase in PHASES)
    assert total == 100
