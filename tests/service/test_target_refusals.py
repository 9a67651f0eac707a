"""What the target refuses, how precisely, and that nothing was run for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from serving import errors, status
from serving.keep_plan import KeepPlan, Run
from serving.wire import ids_to_bytes
from specprefill.v1 import types_pb2
from tests.service.scorer_rig import TIMEOUT_S
from tests.service.target_rig import RunningTarget, prompt, request_for, running_target
from tests.target_rig import keep_all, keep_plan
from tests.tiny_models import write_tiny_model

POSITIONS_MAX = 512
PROMPT_TOKENS = 100
HEAD = 24
NAN, INFINITE = float("nan"), float("inf")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    return write_tiny_model(directory, positions_max=POSITIONS_MAX)


@pytest.fixture
async def target(model_dir: Path) -> AsyncIterator[RunningTarget]:
    async with running_target(model_dir) as target:
        yield target


async def refusal(target: RunningTarget, request: Any) -> errors.ServiceError:
    """The error a request ends in; nothing was run for it and nothing more is held."""
    before = target.decoder.forwards, await target.usage()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await target.generate(request)
    assert (target.decoder.forwards, await target.usage()) == before
    await target.gpu.call(target.core.sequences.check_invariants)
    assert target.sample("target_requests_total", outcome="refused") == 1
    return status.raised(caught.value)


def sampling(**fields: Any) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(**fields)


BAD_REQUESTS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt_token_ids": b""}, "prompt_token_ids", "empty"),
    ({"prompt_token_ids": b"\0\0\0"}, "prompt_token_ids", "multiple of 4"),
    ({"prompt_token_ids": ids_to_bytes([5, 6, 400])}, "prompt_token_ids", "[2] is 400"),
    ({"stop": {"stop_token_ids": ids_to_bytes([2**32 - 1])}}, "stop.stop_token_ids", "[0] is"),
    ({"stop": {"max_tokens": 0}}, "stop.max_tokens", "1 to 1024"),
    ({"stop": {"max_tokens": 1025}}, "stop.max_tokens", "1 to 1024"),
    ({"stop": {"stop_strings": [""]}}, "stop.stop_strings", "[0] is 0"),
    ({"stop": {"stop_strings": ["x"] * 17}}, "stop.stop_strings", "at most 16"),
    ({"sampling": sampling(temperature=NAN)}, "sampling.temperature", "finite"),
    ({"sampling": sampling(temperature=INFINITE)}, "sampling.temperature", "finite"),
    ({"sampling": sampling(temperature=-1.0)}, "sampling.temperature", "at least 0"),
    ({"sampling": sampling(top_p=0.0)}, "sampling.top_p", "above 0 and at most 1"),
    ({"sampling": sampling(top_p=1.5)}, "sampling.top_p", "above 0 and at most 1"),
    ({"sampling": sampling(top_p=NAN)}, "sampling.top_p", "above 0 and at most 1"),
    ({"sampling": sampling(top_k=2**31)}, "sampling.top_k", "0 to 4096"),
    ({"protected_head_tokens": PROMPT_TOKENS}, "protected_head_tokens", "0 to 99"),
    (
        {"protected_spans": [types_pb2.PositionSpan(start=90, end=101)]},
        "protected_spans",
        "100 tokens",
    ),
    ({"lease_s": NAN}, "lease_s", "above 0"),
    ({"lease_s": 0.0}, "lease_s", "above 0"),
    ({"lease_s": 1e9}, "lease_s", "at most"),
    ({"retain": True}, "handle", "length"),
    ({"retain": True, "handle": "a b"}, "handle", "ASCII"),
    ({"retain": True, "handle": "a", "instance_id": ""}, "instance_id", "length"),
    ({"base": ("", 5)}, "base.handle", "length"),
]


@pytest.mark.parametrize(("fields", "field", "text"), BAD_REQUESTS)
async def test_a_bad_field_is_named_with_its_limit(
    target: RunningTarget, fields: dict[str, Any], field: str, text: str
) -> None:
    error = await refusal(target, request_for(prompt(PROMPT_TOKENS), **fields))
    assert type(error) is errors.InvalidRequest
    assert error.field == field
    assert text in error.message


async def test_a_prompt_past_the_models_positions_is_refused(target: RunningTarget) -> None:
    error = await refusal(target, request_for(prompt(POSITIONS_MAX + 1)))
    assert isinstance(error, errors.ContextLengthExceeded)
    assert (error.metadata["limit"], error.metadata["got"]) == ("512", "513")


def plan(*kept: int, **fields: Any) -> KeepPlan:
    return keep_plan(PROMPT_TOKENS, kept, head=HEAD, **fields)


def runs(*pairs: tuple[int, int]) -> KeepPlan:
    return replace(plan(12), kept=tuple(Run(*pair) for pair in pairs))


BAD_PLANS: dict[str, KeepPlan] = {
    "not ascending": runs((9, 11), (5, 6), (12, 13)),
    "overlapping": runs((5, 9), (8, 10), (12, 13)),
    "in the head": runs((2, 5), (12, 13)),
    "past the end": runs((5, 9), (12, 14)),
    "far past the end": runs((5, 2**32)),
    "nothing kept": runs(),
    "last token dropped": plan(5, 9, 11),
    "tail dropped": plan(5, 6, 7, 8, 9, 10, 12, tail_tokens=12),
    "protected span dropped": plan(5, 9, 12, spans=[(60, 63)]),
    "other prompt length": replace(plan(5, 12), prompt_tokens=PROMPT_TOKENS + 1),
}


@pytest.mark.parametrize("name", BAD_PLANS)
async def test_a_plan_that_does_not_fit_is_rejected_and_not_repaired(
    target: RunningTarget, name: str
) -> None:
    error = await refusal(target, request_for(prompt(PROMPT_TOKENS), plan=BAD_PLANS[name]))
    assert isinstance(error, errors.PlanRejected)


@pytest.mark.parametrize("field", ["protected_head_tokens", "protected_spans"])
async def test_a_plan_for_another_protected_part_is_rejected(
    target: RunningTarget, field: str
) -> None:
    request = request_for(prompt(PROMPT_TOKENS), plan=plan(5, 12))
    if field == "protected_spans":
        request.protected_spans.add(start=40, end=42)
    else:
        request.protected_head_tokens = HEAD + 8
    assert isinstance(await refusal(target, request), errors.PlanRejected)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"chunk_tokens": 0}, "plan.settings.chunk_tokens"),
        ({"keep_basis_points": 10_001}, "plan.settings.keep_basis_points"),
        ({"lookahead_temperature": NAN}, "plan.settings.lookahead_temperature"),
        ({"query_mode": 7}, "plan.settings.query_mode"),
    ],
)
async def test_a_plan_with_absurd_settings_is_refused(
    target: RunningTarget, change: dict[str, Any], field: str
) -> None:
    request = request_for(prompt(PROMPT_TOKENS), plan=plan(5, 12))
    for name, value in change.items():
        setattr(request.plan.settings, name, value)
    error = await refusal(target, request)
    assert isinstance(error, errors.InvalidRequest)
    assert error.field == field


async def test_an_empty_run_in_a_plan_is_refused(target: RunningTarget) -> None:
    request = request_for(prompt(PROMPT_TOKENS), plan=plan(5, 12))
    request.plan.kept.add(first_chunk=12, chunks=0)
    assert isinstance(await refusal(target, request), errors.InvalidRequest)


async def hold(target: RunningTarget, tokens: int, *, handle: str = "held", **fields: Any) -> None:
    """Keep the state of a prompt's first `tokens` tokens."""
    stop = {"max_tokens": 1}
    await target.generate(
        request_for(prompt(PROMPT_TOKENS)[:tokens], handle=handle, retain=True, stop=stop, **fields)
    )


async def test_an_unknown_handle_is_a_lost_one(target: RunningTarget) -> None:
    error = await refusal(target, request_for(prompt(PROMPT_TOKENS), base=("unknown", 24)))
    assert isinstance(error, errors.KvEvicted)


@pytest.mark.parametrize("declared", [0, 23, 25])
async def test_a_wrong_base_length_is_refused(target: RunningTarget, declared: int) -> None:
    await hold(target, 24)
    error = await refusal(target, request_for(prompt(PROMPT_TOKENS), base=("held", declared)))
    assert isinstance(error, errors.BaseMismatch)


async def test_a_base_of_other_tokens_is_refused(target: RunningTarget) -> None:
    await hold(target, 24)
    other = prompt(PROMPT_TOKENS)
    other[23] += 1
    error = await refusal(target, request_for(other, base=("held", 24)))
    assert isinstance(error, errors.BaseMismatch)


async def test_a_base_must_leave_a_token_to_run(target: RunningTarget) -> None:
    await hold(target, 24)
    error = await refusal(target, request_for(prompt(PROMPT_TOKENS)[:24], base=("held", 24)))
    assert isinstance(error, errors.BaseMismatch)
    shorter = request_for(prompt(PROMPT_TOKENS)[:25], base=("held", 24))
    assert (await target.generate(shorter)).finished.counts.executed_tokens == 1


@pytest.mark.parametrize("held", [16, 32])
async def test_with_a_plan_the_base_is_exactly_the_head(target: RunningTarget, held: int) -> None:
    await hold(target, held)
    request = request_for(prompt(PROMPT_TOKENS), plan=plan(5, 9, 12), base=("held", held))
    assert isinstance(await refusal(target, request), errors.BaseMismatch)


async def test_with_a_plan_the_base_is_dense(target: RunningTarget) -> None:
    """Also if the sparse state kept every token: the two kinds never mix."""
    await hold(target, HEAD, plan=keep_all(HEAD))
    request = request_for(prompt(PROMPT_TOKENS), plan=plan(5, 9, 12), base=("held", HEAD))
    assert isinstance(await refusal(target, request), errors.BaseMismatch)
    dense = request_for(prompt(PROMPT_TOKENS), base=("held", HEAD))
    assert (await target.generate(dense)).finished.counts.sparse_restored_tokens == HEAD


async def test_a_taken_handle_is_refused_before_any_work(target: RunningTarget) -> None:
    await hold(target, 24)
    request = request_for(prompt(PROMPT_TOKENS), handle="held", retain=True)
    assert isinstance(await refusal(target, request), errors.AlreadyExists)


async def test_no_more_states_are_kept_than_allowed(model_dir: Path) -> None:
    async with running_target(model_dir, handles_max=1) as target:
        await hold(target, 24)
        request = request_for(prompt(PROMPT_TOKENS), handle="second", retain=True)
        assert isinstance(await refusal(target, request), errors.ResourceExhausted)


async def fork_error(target: RunningTarget, *args: Any, **fields: Any) -> errors.ServiceError:
    before = await target.usage()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await target.fork(*args, **fields)
    assert await target.usage() == before
    await target.gpu.call(target.core.sequences.check_invariants)
    return status.raised(caught.value)


async def test_forks_that_cannot_be_are_refused(target: RunningTarget) -> None:
    await hold(target, 24)
    cases = {
        errors.KvEvicted: ("unknown", 24, {"at": 5, "to": "new"}),
        errors.BaseMismatch: ("held", 25, {"at": 5, "to": "new"}),
        errors.AlreadyExists: ("held", 24, {"at": 5, "to": "held"}),
        errors.InvalidRequest: ("held", 24, {"at": 25, "to": "new"}),
    }
    for expected, (handle, tokens, fields) in cases.items():
        assert type(await fork_error(target, handle, tokens, **fields)) is expected
    for fields in ({"at": 0, "to": "new"}, {"at": 5, "to": ""}):
        assert isinstance(await fork_error(target, "held", 24, **fields), errors.InvalidRequest)


async def test_a_fork_of_nothing_is_refused(target: RunningTarget) -> None:
    """A plan without a head that drops the first chunk: below position 8 there is no slot."""
    request = request_for(
        prompt(PROMPT_TOKENS),
        plan=keep_plan(PROMPT_TOKENS, (1, 12)),
        handle="held",
        retain=True,
        stop={"max_tokens": 1},
    )
    await target.generate(request)
    assert isinstance(
        await fork_error(target, "held", PROMPT_TOKENS, at=8, to="new"), errors.WrongState
    )
    assert (await target.fork("held", PROMPT_TOKENS, at=9, to="new")).slots == 1


async def test_a_release_of_absurdly_many_handles_is_refused(target: RunningTarget) -> None:
    handles = [f"handle-{n}" for n in range(1025)]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await target.release(*handles)
    assert isinstance(status.raised(caught.value), errors.InvalidRequest)


async def test_malformed_bytes_are_refused(model_dir: Path) -> None:
    async with running_target(model_dir) as target:
        method = target.channel.unary_stream("/specprefill.v1.Target/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [message async for message in method(b"\x0a\xff", timeout=TIMEOUT_S)]
    assert isinstance(status.raised(caught.value), errors.MalformedRequest)


async def test_an_oversize_message_is_refused_by_the_transport(model_dir: Path) -> None:
    async with running_target(model_dir, message_bytes_max=4096) as target:
        request = request_for(np.zeros(2000, dtype=np.uint32))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await target.generate(request)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert target.decoder.forwards == 0


async def test_a_hundred_refusals_leave_nothing_behind(target: RunningTarget) -> None:
    await hold(target, 24)
    request = request_for(prompt(PROMPT_TOKENS), base=("held", 23))
    for _ in range(100):
        with pytest.raises(grpc.aio.AioRpcError):
            await target.generate(request)
    await target.settles_at(pages=3, handles=1)
