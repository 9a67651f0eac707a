"""Every setting reaches the service it is for, by every entry point, and is echoed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from gateway.ports import GenerateCall, ScoreCall
from gateway.settings import GatewaySettings
from serving.keep_plan import QueryMode, Run
from serving.settings import load_settings
from specprefill.v1 import gateway_pb2, types_pb2
from tests.service.gateway_rig import (
    Rig,
    complete_request,
    gateway_rig,
    generate_request,
    long_prompt,
    short_prompt,
)
from tests.unit.gateway.tokenizer_dirs import write_byte_level

PREFILL_FIELDS: list[tuple[str, Any, Any]] = [
    ("keep_basis_points", 1234, 1234),
    ("chunk_tokens", 16, 16),
    ("tail_tokens", 24, 24),
    ("query_mode", types_pb2.QUERY_MODE_LOOKAHEAD, QueryMode.LOOKAHEAD),
    ("lookahead_tokens", 5, 5),
    ("window_tokens", 9, 9),
    ("lookahead_temperature", 0.5, 0.5),
    ("lookahead_seed", 11, 11),
]
SAMPLING_FIELDS: list[tuple[str, Any, Any]] = [
    ("temperature", 0.5, 0.5),
    ("top_k", 7, 7),
    ("top_p", 0.25, 0.25),
    ("seed", 0, 0),
]
STOP_FIELDS: list[tuple[str, Any, Any]] = [
    ("max_tokens", 3, 3),
    ("stop_strings", ["zzz", "yy"], ("zzz", "yy")),
    ("stop_token_ids", b"\x05\0\0\0\x07\0\0\0", frozenset({5, 7})),
    ("ignore_end_tokens", True, True),
]
SERVER_FIELDS: list[tuple[str, Any, str, Any]] = [
    ("keep_basis_points", 777, "keep_basis_points", 777),
    ("chunk_tokens", 4, "chunk_tokens", 4),
    ("tail_tokens", 0, "tail_tokens", 0),
    ("pool_tokens", 7, "pool_tokens", 7),
    ("query_mode", "lookahead", "query_mode", QueryMode.LOOKAHEAD),
    ("query_mode", "tail_window", "query_mode", QueryMode.TAIL_WINDOW),
    # auto: the scorer's default.
    ("query_mode", "auto", "query_mode", QueryMode.TAIL_WINDOW),
    ("lookahead_tokens", 3, "lookahead_tokens", 3),
    ("window_tokens", 3, "window_tokens", 3),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("model"))


async def _send(rig: Rig, entry: str, **fields: Any) -> Any:
    """One request by an entry point; returns the settings it echoes."""
    if entry == "generate":
        events = [event async for event in rig.stub.Generate(generate_request(**fields))]
        assert events[0].started.settings.plan == events[-1].finished.settings.plan
        return events[-1].finished.settings
    if entry == "complete":
        return (await rig.stub.Complete(complete_request(**fields))).finished.settings
    request = gateway_pb2.ExplainRequest(prompt=long_prompt(), **fields)
    return (await rig.stub.Explain(request)).settings


@pytest.mark.parametrize("entry", ["generate", "complete", "explain"])
async def test_every_prefill_option_reaches_the_scorer(model_dir: Path, entry: str) -> None:
    async with gateway_rig(model_dir) as rig:
        for name, asked, expected in PREFILL_FIELDS:
            echoed = await _send(rig, entry, prefill={name: asked})
            assert getattr(rig.scorer.calls[-1].settings, name) == expected, name
            assert getattr(echoed.plan, name) == asked, name
        span = {"start": 4, "end": 9}
        await _send(rig, entry, prefill={"protected_spans": [span]})
        assert rig.scorer.calls[-1].protected_spans == (Run(4, 9),)
        if entry != "explain":
            assert rig.target.calls[-1].protected_spans == (Run(4, 9),)


@pytest.mark.parametrize("entry", ["generate", "complete"])
async def test_every_sampling_and_stop_field_reaches_the_target(
    model_dir: Path, entry: str
) -> None:
    async with gateway_rig(model_dir) as rig:
        for name, asked, expected in SAMPLING_FIELDS:
            echoed = await _send(rig, entry, sampling={name: asked})
            assert getattr(rig.target.calls[-1].sampling, name) == expected, name
            assert getattr(echoed, name) == asked, name
            assert echoed.HasField("seed") == (name == "seed")
        for name, asked, expected in STOP_FIELDS:
            echoed = await _send(rig, entry, stop={name: asked})
            assert getattr(rig.target.calls[-1].stops, name) == expected, name
        assert (await _send(rig, entry, stop={"max_tokens": 4})).max_tokens == 4


@pytest.mark.parametrize(("setting", "value", "name", "expected"), SERVER_FIELDS)
async def test_every_default_of_the_gateway_reaches_the_scorer(
    model_dir: Path, setting: str, value: Any, name: str, expected: Any
) -> None:
    async with gateway_rig(model_dir, **{setting: value}) as rig:
        await _send(rig, "complete")
        assert getattr(rig.scorer.calls[-1].settings, name) == expected
        info = await rig.stub.GetServerInfo(gateway_pb2.GetServerInfoRequest())
        echoed = getattr(info.defaults.plan, name)
        assert echoed == (expected if name != "query_mode" else (1, 2)[echoed - 1])


async def test_the_other_defaults_are_applied_too(model_dir: Path) -> None:
    async with gateway_rig(
        model_dir, prefill_mode="sparse", threshold_tokens=99, max_tokens_default=21
    ) as rig:
        echoed = await _send(rig, "complete", prompt=short_prompt())
        assert echoed.mode == gateway_pb2.PREFILL_MODE_SPARSE
        assert echoed.threshold_tokens == 99
        assert echoed.max_tokens == rig.target.calls[-1].stops.max_tokens == 21
        assert rig.scorer.calls, "a short prompt went sparse because the default says so"


async def test_unary_and_streaming_ask_the_services_for_the_same(model_dir: Path) -> None:
    fields = {
        "request_id": "r-1",
        "sampling": {"temperature": 0.5, "seed": 3},
        "stop": {"max_tokens": 5, "stop_strings": ["zzz"]},
        "prefill": {"keep_basis_points": 5000, "protected_spans": [{"start": 20, "end": 30}]},
    }
    async with gateway_rig(model_dir) as rig:
        streamed = [event async for event in rig.stub.Generate(generate_request(**fields))]
        whole = await rig.stub.Complete(complete_request(**fields))
    assert _values(rig.scorer.calls[0]) == _values(rig.scorer.calls[1])
    assert _values(rig.target.calls[0]) == _values(rig.target.calls[1])
    deltas = [event.delta for event in streamed if event.HasField("delta")]
    assert whole.text == "".join(delta.text for delta in deltas)
    assert whole.token_ids == b"".join(delta.token_ids for delta in deltas)
    assert whole.started == streamed[0].started
    assert _without_timings(whole.finished) == _without_timings(streamed[-1].finished)


def _values(call: ScoreCall | GenerateCall) -> dict[str, Any]:
    names = [name for name in call.__dataclass_fields__ if name != "handle"]
    values = {name: getattr(call, name) for name in names}
    return values | {"prompt_ids": call.prompt_ids.tolist()}


def _without_timings(finished: gateway_pb2.Finished) -> dict[str, Any]:
    values = MessageToDict(finished)
    del values["timings"]
    return values


def test_settings_come_from_variables_with_the_gateways_prefix(model_dir: Path) -> None:
    given = {
        "SPECPREFILL_GATEWAY_MODEL_DIR": str(model_dir),
        "SPECPREFILL_GATEWAY_SCORER_ADDRESS": "127.0.0.1:7001",
        "SPECPREFILL_GATEWAY_TARGET_ADDRESS": "[::1]:7002",
        "SPECPREFILL_GATEWAY_THRESHOLD_TOKENS": "1024",
        "SPECPREFILL_GATEWAY_QUERY_MODE": "tail_window",
    }
    settings = load_settings(GatewaySettings, given)
    assert settings.threshold_tokens == 1024
    assert settings.keep_basis_points == 2000
    for name, bad in (
        ("KEEP_BASIS_POINTS", "10001"),
        ("POOL_TOKENS", "4"),
        ("QUERY_MODE", "both"),
        ("MAX_TOKENS_DEFAULT", "9999"),
        ("TARGET_ADDRESS", "localhost"),
        ("THRESHOLD", "1"),
    ):
        variable = f"SPECPREFILL_GATEWAY_{name}"
        with pytest.raises(ValueError, match=variable):
            load_settings(GatewaySettings, given | {variable: bad})
