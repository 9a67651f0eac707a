"""The target behind real gRPC: what it streams, keeps, and leaves behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from serving import errors, status
from specprefill.v1 import target_pb2, types_pb2
from tests.service.scorer_rig import TIMEOUT_S, eventually
from tests.service.target_rig import (
    BOOT_ID,
    PAGE_TOKENS,
    PAGES,
    POISON,
    RunningTarget,
    prompt,
    request_for,
    running_target,
)
from tests.target_rig import keep_all, keep_plan
from tests.tiny_models import write_tiny_model

POSITIONS_MAX = 2048
# Chunks of 8; the head is 24 tokens, so chunks 0 to 2.
HEAD = 24
PROMPT_TOKENS = 100
KEPT = (4, 5, 9, 11, 12)
ENDLESS = {"max_tokens": 500}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    return write_tiny_model(directory, positions_max=POSITIONS_MAX)


@pytest.fixture
async def target(model_dir: Path) -> AsyncIterator[RunningTarget]:
    async with running_target(model_dir) as target:
        yield target


def sparse_plan() -> Any:
    return keep_plan(PROMPT_TOKENS, KEPT, head=HEAD)


async def test_a_dense_request_streams_started_progress_tokens_finished(
    target: RunningTarget,
) -> None:
    reply = await target.generate(request_for(prompt(20)))
    kinds = [message.WhichOneof("event") for message in reply.messages]
    assert kinds[0] == "started"
    assert kinds[1:4] == ["progress"] * 3
    assert set(kinds[4:-1]) == {"tokens"}
    assert kinds[-1] == "finished"
    progress = reply.of("progress")
    assert [each.done_tokens for each in progress] == [8, 16, 19]
    assert {each.total_tokens for each in progress} == {19}
    assert {each.phase for each in progress} == {types_pb2.PHASE_DENSE_PREFILL}
    assert reply.finished.boot_id == reply.of("started")[0].boot_id == BOOT_ID
    assert len(reply.tokens) == reply.finished.counts.completion_tokens == 6
    assert reply.finished.counts.executed_tokens == 20
    # The last sampled token was never run.
    assert reply.finished.positions == reply.finished.slots == 25
    assert not reply.finished.sparse
    await target.settles_at(pages=0, handles=0)


async def test_a_sparse_request_runs_the_head_what_is_kept_and_the_kick_off(
    target: RunningTarget,
) -> None:
    reply = await target.generate(request_for(prompt(PROMPT_TOKENS), plan=sparse_plan()))
    phases = [each.phase for each in reply.of("progress")]
    assert phases == [types_pb2.PHASE_PROTECTED_PREFILL] * 3 + [types_pb2.PHASE_SPARSE_PREFILL] * 5
    finished = reply.finished
    assert finished.sparse
    # Chunks 4, 5, 9 and 11 whole and the last one's 4 tokens.
    assert finished.counts.executed_tokens == HEAD + 36
    assert finished.counts.protected_executed_tokens == HEAD
    assert finished.positions == PROMPT_TOKENS + 5
    assert finished.slots == HEAD + 36 + 5


async def test_the_stages_add_up_to_the_first_token(target: RunningTarget) -> None:
    reply = await target.generate(request_for(prompt(PROMPT_TOKENS), plan=sparse_plan()))
    first, *others = reply.of("tokens")
    assert first.HasField("first_token_timings")
    assert not any(each.HasField("first_token_timings") for each in others)
    for timings in (first.first_token_timings, reply.finished.timings):
        stages = [
            timings.queue_s,
            timings.restore_s,
            timings.protected_prefill_s,
            timings.sparse_prefill_s,
            timings.dense_prefill_s,
            timings.kick_off_s,
        ]
        assert sum(stages) == pytest.approx(timings.first_token_s, abs=1e-6)
        assert timings.protected_prefill_s > 0
        assert timings.sparse_prefill_s > 0
        assert timings.dense_prefill_s == 0
    total = reply.finished.timings
    assert total.total_s == pytest.approx(total.first_token_s + total.decode_s)
    assert total.decode_s > 0
    kinds = {
        kind: target.sample("target_prefill_seconds_count", kind=kind)
        for kind in ("protected", "sparse", "dense")
    }
    assert kinds == {"protected": 1, "sparse": 1, "dense": 0}
    assert target.sample("target_first_token_seconds_count") == 1
    assert target.sample("target_inter_token_seconds_count") == 5


async def test_keep_all_over_the_wire_answers_as_dense(target: RunningTarget) -> None:
    dense = await target.generate(request_for(prompt(PROMPT_TOKENS)))
    plan = keep_all(PROMPT_TOKENS, head=HEAD)
    sparse = await target.generate(request_for(prompt(PROMPT_TOKENS), plan=plan))
    assert sparse.finished.sparse
    assert sparse.tokens == dense.tokens


async def test_a_protected_head_is_restored_and_not_run_again(target: RunningTarget) -> None:
    cold = await target.generate(request_for(prompt(PROMPT_TOKENS), plan=sparse_plan()))
    stop = {"max_tokens": 1}
    await target.generate(
        request_for(prompt(PROMPT_TOKENS)[:HEAD], handle="head", retain=True, stop=stop)
    )
    warm = await target.generate(
        request_for(prompt(PROMPT_TOKENS), plan=sparse_plan(), base=("head", HEAD))
    )
    assert warm.of("started")[0].restored_tokens == HEAD
    assert warm.finished.counts.protected_executed_tokens == 0
    assert warm.finished.counts.dense_restored_tokens == HEAD
    assert warm.finished.counts.executed_tokens == 36
    assert warm.tokens == cold.tokens
    assert await target.usage() == (HEAD // PAGE_TOKENS, 1)


async def test_a_kept_state_forked_and_continued_equals_a_fresh_prompt(
    target: RunningTarget,
) -> None:
    first = await target.generate(request_for(prompt(40), handle="turn", retain=True))
    state = np.append(prompt(40), first.tokens[:-1]).astype(np.uint32)
    assert first.finished.positions == state.size == 45
    # A rewind into the prompt, inside a page.
    forked = await target.fork("turn", 45, at=37, to="rewound")
    assert (forked.positions, forked.slots, forked.boot_id) == (37, 37, BOOT_ID)
    for base, length in (("turn", 45), ("rewound", 37)):
        longer = np.append(state[:length], prompt(13, seed=5)).astype(np.uint32)
        found = await target.generate(request_for(longer, base=(base, length)))
        fresh = await target.generate(request_for(longer))
        assert found.of("started")[0].restored_tokens == length
        assert found.finished.counts.executed_tokens == 13
        assert found.tokens == fresh.tokens
    # Forks share their pages.
    assert await target.usage() == (6, 2)


async def test_a_sparse_state_is_resumed_and_counted_as_sparse(target: RunningTarget) -> None:
    plan = sparse_plan()
    first = await target.generate(
        request_for(prompt(PROMPT_TOKENS), plan=plan, handle="turn", retain=True)
    )
    state = np.append(prompt(PROMPT_TOKENS), first.tokens[:-1]).astype(np.uint32)
    longer = np.append(state, prompt(9, seed=3)).astype(np.uint32)
    second = await target.generate(
        request_for(longer, base=("turn", state.size), handle="next", retain=True)
    )
    assert second.finished.counts.sparse_restored_tokens == state.size
    assert second.finished.counts.dense_restored_tokens == 0
    assert second.finished.counts.executed_tokens == 9
    assert second.finished.positions - second.finished.slots == PROMPT_TOKENS - HEAD - 36
    # A fork inside the head is dense again, one behind it is not.
    await target.fork("next", second.finished.positions, at=HEAD, to="head")
    await target.fork("next", second.finished.positions, at=50, to="sparse-50")
    warm = await target.generate(request_for(prompt(PROMPT_TOKENS), plan=plan, base=("head", HEAD)))
    assert warm.tokens == first.tokens
    resumed = await target.generate(request_for(prompt(60), base=("sparse-50", 50)))
    assert resumed.finished.counts.sparse_restored_tokens == 50
    await target.gpu.call(target.core.sequences.check_invariants)


async def test_release_frees_once_and_ignores_what_it_does_not_know(target: RunningTarget) -> None:
    for handle in ("a", "b"):
        await target.generate(request_for(prompt(20), handle=handle, retain=True))
    answer = await target.release("a", "unknown")
    info = await target.stub.GetInfo(target_pb2.TargetGetInfoRequest())
    assert answer.released == 1
    assert answer.freed_bytes == 4 * info.kv.page_bytes
    again = await target.release("a", "unknown")
    assert (again.released, again.freed_bytes) == (0, 0)
    assert await target.usage() == (4, 1)


async def test_a_base_released_while_a_request_runs_on_it_stays_until_it_ends(
    target: RunningTarget,
) -> None:
    kept = await target.generate(request_for(prompt(40), handle="base", retain=True))
    state = np.append(prompt(40), kept.tokens[:-1]).astype(np.uint32)
    longer = np.append(state, prompt(40, seed=2)).astype(np.uint32)
    expected = await target.generate(request_for(longer))
    target.decoder.forwards, target.decoder.stop_before = 0, 2
    running = asyncio.create_task(target.generate(request_for(longer, base=("base", state.size))))
    await asyncio.to_thread(target.decoder.reached.wait, TIMEOUT_S)
    releasing = asyncio.create_task(target.release("base"))
    target.decoder.gate.set()
    assert (await releasing).released == 1
    assert (await running).tokens == expected.tokens
    await target.settles_at(pages=0, handles=0)


async def test_a_new_instance_frees_what_the_old_one_left(target: RunningTarget) -> None:
    await target.generate(request_for(prompt(20), handle="old", retain=True))
    assert await target.usage() == (4, 1)
    await target.generate(request_for(prompt(9), instance_id="gateway-2"))
    await target.settles_at(pages=0, handles=0)


async def test_a_call_without_instance_touches_no_states(target: RunningTarget) -> None:
    await target.generate(request_for(prompt(20), handle="kept", retain=True))
    await target.generate(request_for(prompt(9), instance_id=""))
    assert await target.usage() == (4, 1)


async def test_a_lease_that_is_over_frees_the_state(model_dir: Path) -> None:
    async with running_target(model_dir) as target:
        await target.generate(request_for(prompt(20), handle="brief", retain=True, lease_s=1e-6))
        await target.gpu.call(target.core.sequences.expire)
        await target.settles_at(pages=0, handles=0)


async def test_get_info_tells_what_was_loaded(target: RunningTarget) -> None:
    info = await target.stub.GetInfo(target_pb2.TargetGetInfoRequest())
    assert info.boot_id == BOOT_ID
    assert info.model.name == "tiny-llama"
    assert info.model.architecture == "llama"
    assert info.model.layers == info.model.layers_used == 2
    assert info.model.positions_max == POSITIONS_MAX
    assert info.model.dtype == "float64"
    assert len(info.model.tokenizer_digest) == len(info.model.revision) == 64
    assert (info.kv.pages_total, info.kv.pages_free) == (PAGES, PAGES)


# The forward at whose start the caller leaves: 3 of the head, 5 of what is kept, the kick-off.
PHASES = {"protected": 1, "sparse": 5, "kick-off": 8, "decode": 12}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("retain", [False, True])
async def test_a_cancel_in_any_phase_stops_the_work_and_frees_the_pages(
    target: RunningTarget, phase: str, retain: bool
) -> None:
    target.decoder.stop_before = PHASES[phase]
    request = request_for(
        prompt(PROMPT_TOKENS), plan=sparse_plan(), stop=ENDLESS, retain=retain, handle="kept"
    )
    await cancelled_at_gate(target, request)
    await target.settles_at(pages=0, handles=0)
    assert target.decoder.forwards < 9 + 499
    assert target.sample("target_requests_total", outcome="cancelled") == 1
    assert target.sample("target_requests_total", outcome="finished") == 0


async def test_a_cancel_of_a_dense_prefill_stops_it(target: RunningTarget) -> None:
    target.decoder.stop_before = 3
    await cancelled_at_gate(target, request_for(prompt(400), stop=ENDLESS))
    await target.settles_at(pages=0, handles=0)
    assert target.decoder.forwards < 50 + 499


async def cancelled_at_gate(
    target: RunningTarget, request: target_pb2.TargetGenerateRequest
) -> None:
    stream = target.stub.Generate(request, timeout=TIMEOUT_S)
    reading = asyncio.create_task(read_all(stream))
    await asyncio.to_thread(target.decoder.reached.wait, TIMEOUT_S)
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    target.decoder.gate.set()


async def read_all(stream: Any) -> list[Any]:
    return [message async for message in stream]


async def test_a_cancel_in_the_queue_runs_nothing(target: RunningTarget) -> None:
    async with Occupied(target):
        stream = target.stub.Generate(request_for(prompt(20)), timeout=TIMEOUT_S)
        reading = asyncio.create_task(read_all(stream))
        await eventually(lambda: target.gpu.jobs_waiting == 1)
        stream.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        # Two round trips later the service has heard of it.
        assert await target.usage() == await target.usage() == (0, 0)
    await target.settles_at(pages=0, handles=0)
    assert target.decoder.forwards == 0


async def test_what_was_kept_for_a_caller_who_left_is_taken_back(target: RunningTarget) -> None:
    """The caller leaves between the end of the work and the message that tells of it."""
    request = request_for(prompt(20), handle="kept", retain=True)
    stream = target.servicer.Generate(request, None)
    async for message in stream:
        if message.WhichOneof("event") == "finished":
            break
    assert await target.usage() == (4, 1)
    await stream.aclose()
    await target.settles_at(pages=0, handles=0)


async def test_an_expired_deadline_ends_the_request_and_frees_its_pages(
    target: RunningTarget,
) -> None:
    target.decoder.stop_before = 2
    stream = target.stub.Generate(request_for(prompt(200), stop=ENDLESS), timeout=0.3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(stream)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    target.decoder.gate.set()
    await target.settles_at(pages=0, handles=0)
    assert target.decoder.forwards < 25 + 499


class Occupied:
    """While inside, the GPU thread is busy with something else."""

    def __init__(self, target: RunningTarget) -> None:
        self._target = target
        self._busy, self._free = threading.Event(), threading.Event()

    async def __aenter__(self) -> None:
        self._job = asyncio.create_task(self._target.gpu.call(self._occupy))
        await asyncio.to_thread(self._busy.wait, TIMEOUT_S)

    async def __aexit__(self, *caught: object) -> None:
        self._free.set()
        await self._job

    def _occupy(self) -> None:
        self._busy.set()
        assert self._free.wait(TIMEOUT_S)


async def test_a_decode_goes_on_while_another_request_prefills(target: RunningTarget) -> None:
    """By the order of events, not by time: a decode step between any two prefill chunks."""
    log: list[str] = []
    decoding = asyncio.create_task(
        logged(target, request_for(prompt(10), stop=ENDLESS), log, "decode")
    )
    await eventually(lambda: log.count("decode tokens") > 3)
    long = asyncio.create_task(logged(target, request_for(prompt(400, seed=1)), log, "prefill"))
    await long
    began, ended = log.index("prefill progress"), log.index("prefill tokens")
    during = log[began:ended]
    assert during.count("prefill progress") == 50
    assert during.count("decode tokens") > 25
    await decoding
    assert log.count("decode finished") == log.count("prefill finished") == 1
    await target.settles_at(pages=0, handles=0)


async def logged(target: RunningTarget, request: Any, log: list[str], name: str) -> None:
    async for message in target.stub.Generate(request, timeout=TIMEOUT_S):
        kind = message.WhichOneof("event")
        log.append(f"{name} {kind}")


async def test_requests_beside_each_other_answer_as_alone(target: RunningTarget) -> None:
    requests = [
        request_for(prompt(PROMPT_TOKENS), plan=sparse_plan()),
        request_for(prompt(70, seed=1)),
        request_for(prompt(30, seed=2), sampling=types_pb2.SamplingParams(temperature=1, seed=5)),
    ]
    alone = [(await target.generate(request)).tokens for request in requests]
    together = await asyncio.gather(*(target.generate(request) for request in requests))
    assert [reply.tokens for reply in together] == alone


async def test_a_reply_that_outgrows_the_pages_is_refused_and_others_go_on(
    target: RunningTarget,
) -> None:
    other = asyncio.create_task(target.generate(request_for(prompt(10), stop=ENDLESS)))
    await eventually(lambda: target.decoder.forwards > 5)
    error = await refused(target, request_for(prompt(600)))
    assert isinstance(error, errors.KvCacheFull)
    assert error.retry_after_s is not None
    assert len((await other).tokens) == 500
    await target.settles_at(pages=0, handles=0)


async def test_a_prompt_larger_than_the_pool_is_refused_before_any_work(
    target: RunningTarget,
) -> None:
    error = await refused(target, request_for(prompt(PAGES * PAGE_TOKENS + 1)))
    assert isinstance(error, errors.KvCacheFull)
    assert error.metadata["free_pages"] == str(PAGES)
    # Nobody is in the way: waiting would not help.
    assert error.retry_after_s is None
    assert target.decoder.forwards == 0
    # One that fits exactly is served: its last token takes no slot.
    fits = request_for(prompt(PAGES * PAGE_TOKENS - 5))
    assert len((await target.generate(fits)).tokens) == 6


async def test_logits_that_are_not_finite_fail_their_request_only(target: RunningTarget) -> None:
    other = asyncio.create_task(target.generate(request_for(prompt(10), stop=ENDLESS)))
    await eventually(lambda: target.decoder.forwards > 3)
    poisoned = np.append(prompt(20), POISON).astype(np.uint32)
    error = await refused(target, request_for(poisoned, handle="kept", retain=True))
    assert isinstance(error, errors.InternalError)
    assert len((await other).tokens) == 500
    assert target.sample("target_requests_total", outcome="failed") == 1
    await target.settles_at(pages=0, handles=0)


async def test_more_requests_than_places_are_told_to_wait(model_dir: Path) -> None:
    async with running_target(model_dir, jobs_max=1) as target:
        other = asyncio.create_task(target.generate(request_for(prompt(10), stop=ENDLESS)))
        await eventually(lambda: target.decoder.forwards > 3)
        error = await refused(target, request_for(prompt(10)))
        assert isinstance(error, errors.QueueFull)
        assert error.retry_after_s is not None
        # A release has a place of its own.
        assert (await target.release("unknown")).released == 0
        assert len((await other).tokens) == 500


async def refused(target: RunningTarget, request: Any) -> errors.ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await target.generate(request)
    return status.raised(caught.value)
