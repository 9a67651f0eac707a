"""Enums that the gateway has in its own words must be those of the protos."""

from __future__ import annotations

import enum
from typing import Any

import pytest

from gateway.explain import ChunkState
from gateway.planner import Path, PrefillMode, Reason
from gateway.ports import Phase
from serving.finish import FinishReason
from specprefill.v1 import gateway_pb2, types_pb2


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (Path, gateway_pb2.Path, "PATH_"),
        (Reason, gateway_pb2.Reason, "REASON_"),
        (PrefillMode, gateway_pb2.PrefillMode, "PREFILL_MODE_"),
        (ChunkState, gateway_pb2.ChunkState, "CHUNK_STATE_"),
        (Phase, types_pb2.Phase, "PHASE_"),
        (FinishReason, types_pb2.FinishReason, "FINISH_REASON_"),
    ],
)
def test_numbers_and_names_are_those_of_the_protos(
    ours: type[enum.Enum], theirs: Any, prefix: str
) -> None:
    expected = dict(theirs.items())
    assert expected.pop(f"{prefix}UNSPECIFIED") == 0
    assert {f"{prefix}{member.name}": member.value for member in ours} == expected
