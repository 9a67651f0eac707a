"""Which positions are filled, and as what."""

from __future__ import annotations

import numpy as np
import pytest

from serving.keep_plan import KeepPlan
from target_service.prefill import PrefillKind, prefill_parts
from tests.target_rig import keep_all, keep_plan


def parts(
    prompt_tokens: int, *, base: int = 0, plan: KeepPlan | None = None
) -> dict[PrefillKind, list[int]]:
    found = prefill_parts(prompt_tokens=prompt_tokens, base_tokens=base, plan=plan)
    assert all(part.positions.dtype == np.int64 for part in found)
    return {part.kind: part.positions.tolist() for part in found}


def test_a_dense_prefill_fills_all_but_the_last_token() -> None:
    assert parts(5) == {PrefillKind.DENSE: [0, 1, 2, 3]}
    assert parts(5, base=3) == {PrefillKind.DENSE: [3]}


def test_nothing_is_filled_where_only_the_kick_off_is_left() -> None:
    assert parts(1) == {}
    assert parts(5, base=4) == {}


def test_a_plan_fills_the_head_and_then_what_is_kept_behind_it() -> None:
    # Chunks of 8: the head ends inside chunk 0, whose rest is kept; chunk 2 is 16 to 19.
    plan = keep_plan(20, (0, 2), head=5)
    assert parts(20, plan=plan) == {
        PrefillKind.PROTECTED: [0, 1, 2, 3, 4],
        PrefillKind.SPARSE: [5, 6, 7, 16, 17, 18],
    }
    assert parts(20, base=5, plan=plan) == {PrefillKind.SPARSE: [5, 6, 7, 16, 17, 18]}


def test_the_rest_of_the_heads_last_chunk_can_be_dropped() -> None:
    assert parts(20, plan=keep_plan(20, (2,), head=5)) == {
        PrefillKind.PROTECTED: [0, 1, 2, 3, 4],
        PrefillKind.SPARSE: [16, 17, 18],
    }


def test_keeping_the_last_token_alone_leaves_nothing_to_fill() -> None:
    assert parts(17, plan=keep_plan(17, (2,))) == {}
    assert parts(17, plan=keep_plan(17, (2,), head=16)) == {PrefillKind.PROTECTED: list(range(16))}


@pytest.mark.parametrize("head", [0, 3, 8, 16])
@pytest.mark.parametrize("prompt_tokens", [17, 24, 25])
def test_keeping_all_fills_what_dense_fills(prompt_tokens: int, head: int) -> None:
    filled = parts(prompt_tokens, plan=keep_all(prompt_tokens, head=head))
    positions = [
        p for kind in (PrefillKind.PROTECTED, PrefillKind.SPARSE) for p in filled.get(kind, [])
    ]
    assert positions == parts(prompt_tokens)[PrefillKind.DENSE]


def test_a_base_that_is_not_the_head_is_our_own_bug() -> None:
    with pytest.raises(AssertionError):
        parts(20, base=4, plan=keep_plan(20, (2,), head=5))
