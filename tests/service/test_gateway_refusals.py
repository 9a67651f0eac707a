"""What a gateway refuses, precisely and before any model work."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from specprefill.v1 import gateway_pb2
from tests.service.fake_ports import Hold, reply
from tests.service.gateway_rig import (
    Rig,
    complete_request,
    gateway_rig,
    generate_request,
    text_prompt,
)
from tests.unit.gateway.tokenizer_dirs import write_byte_level

INVALID = grpc.StatusCode.INVALID_ARGUMENT
VOCAB = 319


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def rig(model_dir: Path) -> AsyncIterator[Rig]:
    async with gateway_rig(model_dir, prompt_bytes_max=20_000) as opened:
        yield opened


def _ids(*token_ids: int) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in token_ids)


def _talk(**fields: Any) -> gateway_pb2.Prompt:
    message = gateway_pb2.Message(**{"role": "user", "content": "a", **fields})
    return gateway_pb2.Prompt(conversation=gateway_pb2.Conversation(messages=[message]))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("no prompt", {"prompt": gateway_pb2.Prompt()}, "prompt"),
    ("empty text", {"prompt": text_prompt("")}, "prompt.text"),
    ("no ids", {"prompt": gateway_pb2.Prompt(token_ids=b"")}, "prompt.token_ids"),
    (
        "no messages",
        {"prompt": gateway_pb2.Prompt(conversation=gateway_pb2.Conversation())},
        "prompt.conversation.messages",
    ),
    ("role", {"prompt": _talk(role="root")}, "prompt.conversation.messages[0].role"),
    (
        "tool calls",
        {"prompt": _talk(tool_calls_json="{")},
        "prompt.conversation.messages[0].tool_calls_json",
    ),
    ("ids cut", {"prompt": gateway_pb2.Prompt(token_ids=b"\1\0\0")}, "prompt.token_ids"),
    ("id", {"prompt": gateway_pb2.Prompt(token_ids=_ids(1, VOCAB))}, "prompt.token_ids"),
    ("huge id", {"prompt": gateway_pb2.Prompt(token_ids=_ids(2**32 - 1))}, "prompt.token_ids"),
    ("ids too long", {"prompt": gateway_pb2.Prompt(token_ids=_ids(3) * 4097)}, "prompt.token_ids"),
    ("text too long", {"prompt": text_prompt("x." * 2500)}, "prompt"),
    ("text too large", {"prompt": text_prompt("x" * 20_001)}, "prompt.text"),
    ("keep 0", {"prefill": {"keep_basis_points": 0}}, "prefill.keep_basis_points"),
    ("keep", {"prefill": {"keep_basis_points": 10_001}}, "prefill.keep_basis_points"),
    ("chunk 0", {"prefill": {"chunk_tokens": 0}}, "prefill.chunk_tokens"),
    ("chunk", {"prefill": {"chunk_tokens": 2**31}}, "prefill.chunk_tokens"),
    ("tail", {"prefill": {"tail_tokens": 2**31}}, "prefill.tail_tokens"),
    ("lookahead 0", {"prefill": {"lookahead_tokens": 0}}, "prefill.lookahead_tokens"),
    ("lookahead", {"prefill": {"lookahead_tokens": 65}}, "prefill.lookahead_tokens"),
    ("window 0", {"prefill": {"window_tokens": 0}}, "prefill.window_tokens"),
    ("window", {"prefill": {"window_tokens": 257}}, "prefill.window_tokens"),
    ("lookahead NaN", {"prefill": {"lookahead_temperature": float("nan")}},
     "prefill.lookahead_temperature"),
    ("query mode", {"prefill": {"query_mode": 77}}, "prefill.query_mode"),
    ("mode", {"prefill": {"mode": 77}}, "prefill.mode"),
    ("empty span", {"prefill": {"protected_spans": [{"start": 3, "end": 3}]}},
     "prefill.protected_spans"),
    ("spans overlap",
     {"prefill": {"protected_spans": [{"start": 0, "end": 3}, {"start": 2, "end": 4}]}},
     "prefill.protected_spans"),
    ("span past the prompt", {"prefill": {"protected_spans": [{"start": 0, "end": 4000}]}},
     "prefill.protected_spans"),
    ("span past the model", {"prefill": {"protected_spans": [{"start": 0, "end": 2**31}]}},
     "prefill.protected_spans"),
    ("NaN", {"sampling": {"temperature": float("nan")}}, "sampling.temperature"),
    ("infinite", {"sampling": {"temperature": float("inf")}}, "sampling.temperature"),
    ("negative", {"sampling": {"temperature": -0.5}}, "sampling.temperature"),
    ("top_p 0", {"sampling": {"top_p": 0.0}}, "sampling.top_p"),
    ("top_p", {"sampling": {"top_p": 1.5}}, "sampling.top_p"),
    ("top_p NaN", {"sampling": {"top_p": float("nan")}}, "sampling.top_p"),
    ("top_k", {"sampling": {"top_k": 2**31}}, "sampling.top_k"),
    ("max_tokens 0", {"stop": {"max_tokens": 0}}, "stop.max_tokens"),
    ("max_tokens", {"stop": {"max_tokens": 2**31}}, "stop.max_tokens"),
    ("stop id", {"stop": {"stop_token_ids": _ids(VOCAB)}}, "stop.stop_token_ids"),
    ("stop ids", {"stop": {"stop_token_ids": _ids(3) * 257}}, "stop.stop_token_ids"),
    ("stop strings", {"stop": {"stop_strings": ["a"] * 17}}, "stop.stop_strings"),
    ("empty stop", {"stop": {"stop_strings": [""]}}, "stop.stop_strings"),
    ("long stop", {"stop": {"stop_strings": ["a" * 257]}}, "stop.stop_strings"),
    ("id with a blank", {"request_id": "a b"}, "request_id"),
    ("long id", {"request_id": "a" * 129}, "request_id"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "field"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
async def test_what_no_model_can_do_is_refused_with_the_field(
    rig: Rig, fields: dict[str, Any], field: str
) -> None:
    for call in (
        rig.stub.Complete(complete_request(**fields)),
        _first(rig.stub.Generate(generate_request(**fields))),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is INVALID
        violations, info = _details(refused.value)
        assert violations == [field]
        assert info.metadata["request_id"]
    assert rig.scorer.calls == rig.target.calls == []
    assert rig.target.released == []


@pytest.mark.parametrize("name", [r[0] for r in REFUSED if r[2].startswith("p")])
async def test_explain_refuses_the_same(rig: Rig, name: str) -> None:
    (fields,) = [r[1] for r in REFUSED if r[0] == name]
    request = gateway_pb2.ExplainRequest(**{"prompt": text_prompt("the fox"), **fields})
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await rig.stub.Explain(request)
    assert refused.value.code() is INVALID


async def test_the_limit_and_the_first_bad_id_are_named(rig: Rig) -> None:
    prompt = gateway_pb2.Prompt(token_ids=_ids(1, 2, VOCAB + 4, VOCAB))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await rig.stub.Complete(complete_request(prompt, request_id="mine"))
    _, info = _details(refused.value)
    assert {"limit": "319", "got": "323", "index": "2"}.items() <= dict(info.metadata).items()
    assert info.metadata["request_id"] == "mine"
    assert ("x-request-id", "mine") in tuple(refused.value.trailing_metadata())


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff", b"\x12\x7f\x08", b"\x12\x04\x12\x02\xff\xfe"],
    ids=["no message", "cut off", "not UTF-8"],
)
@pytest.mark.parametrize("method", ["Complete", "Explain", "Generate"])
async def test_bytes_that_are_no_request_are_refused(rig: Rig, data: bytes, method: str) -> None:
    path = f"/specprefill.v1.Gateway/{method}"
    if method == "Generate":
        call: Any = _first(rig.channel.unary_stream(path)(data))
    else:
        call = rig.channel.unary_unary(path)(data)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    assert refused.value.code() is INVALID
    assert _details(refused.value)[1].reason == "MALFORMED_REQUEST"


async def test_a_message_over_the_limit_is_refused_by_the_transport(model_dir: Path) -> None:
    async with gateway_rig(model_dir, message_bytes_max=10_000) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rig.stub.Complete(complete_request(text_prompt("x" * 20_000)))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await rig.stub.Complete(complete_request(text_prompt("the fox")))


async def test_no_turn_starts_while_the_target_is_away(rig: Rig) -> None:
    facts, rig.target.facts = rig.target.facts, None
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await rig.stub.Complete(complete_request())
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert _details(refused.value)[1].reason == "UPSTREAM_UNAVAILABLE"
    assert _retry_s(refused.value) == 1.0
    assert facts is not None
    rig.target.facts = replace(facts, model=replace(facts.model, tokenizer_digest="another"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await rig.stub.Complete(complete_request())
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert _details(refused.value)[1].reason == "TOKENIZER_MISMATCH"
    assert rig.target.calls == []


async def test_a_full_gateway_says_when_to_come_back(model_dir: Path) -> None:
    async with gateway_rig(model_dir, turns_running_max=1, turns_waiting_max=0) as rig:
        hold = Hold()
        rig.target.steps = lambda call: (hold, *reply(call, (72,)))
        first = rig.stub.Complete(complete_request())
        await hold.reached.wait()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rig.stub.Complete(complete_request())
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert _details(refused.value)[1].reason == "QUEUE_FULL"
        assert _retry_s(refused.value) == 1.0
        hold.let_go.set()
        await first


async def _first(call: Any) -> Any:
    async for response in call:
        return response
    raise AssertionError("the stream ended without a message")


def _details(error: grpc.aio.AioRpcError) -> tuple[list[str], error_details_pb2.ErrorInfo]:
    """The fields that are wrong, and the ErrorInfo."""
    bad, info = error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo()
    for detail in _status(error).details:
        detail.Unpack(bad)
        detail.Unpack(info)
    return [violation.field for violation in bad.field_violations], info


def _retry_s(error: grpc.aio.AioRpcError) -> float:
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in _status(error).details)
    return retry.retry_delay.ToTimedelta().total_seconds()


def _status(error: grpc.aio.AioRpcError) -> Any:
    data = dict(error.trailing_metadata())["grpc-status-details-bin"]
    status = rpc_status.status_pb2.Status()
    status.ParseFromString(data)
    return status
