"""Chunks, runs and positions of keep plans, digests of settings, and plans that are rejected."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import PlanRejected
from serving.keep_plan import (
    KeepPlan,
    PlanSettings,
    QueryMode,
    Run,
    check_plan,
    chunk_count,
    chunks_kept_at,
    kept_positions,
    run_length,
    run_members,
    runs_of,
    settings_digest,
    span_chunks,
    tail_chunks,
)

# Of public server logs: prompt tokens, keep in basis points, kept chunks, kept tokens, and
# whether the last chunk was among them. Chunks of 32, nothing forced.
LOGGED = [
    (21002, 2000, 132, 4224, False),
    (44711, 2000, 280, 8960, False),
    (16384, 2000, 103, 3296, False),
    (16384, 2000, 103, 3296, True),
    (23444, 5000, 367, 11744, False),
    (9167, 2000, 58, 1839, True),
    (13647, 2500, 107, 3407, True),
    (25224, 2500, 198, 6312, True),
    (9561, 2500, 75, 2393, True),
    (8171, 2000, 52, 1643, True),
]


def plan_of(*kept: int, **changes: object) -> KeepPlan:
    """A plan of 100 tokens in 10 chunks, without tail, head and spans unless changed."""
    base = KeepPlan(
        prompt_tokens=100,
        settings=PlanSettings(chunk_tokens=10, tail_tokens=0),
        kept=runs_of(kept),
        forced=(),
        protected_head_tokens=0,
        protected_spans=(),
        settings_digest=b"",
    )
    return dataclasses.replace(base, **changes)


def check(plan: KeepPlan, **request: object) -> None:
    """check_plan with a request that says what the plan says, unless changed."""
    agreeing = {
        "prompt_tokens": plan.prompt_tokens,
        "protected_head_tokens": plan.protected_head_tokens,
        "protected_spans": plan.protected_spans,
    }
    check_plan(plan, **(agreeing | request))


@pytest.mark.parametrize(
    ("prompt_tokens", "keep", "kept_chunks", "kept_tokens", "last_kept"), LOGGED
)
def test_the_counts_of_public_logs_come_out_exactly(
    prompt_tokens: int, keep: int, kept_chunks: int, kept_tokens: int, last_kept: bool
) -> None:
    settings = PlanSettings(keep_basis_points=keep, tail_tokens=0)
    total = chunk_count(prompt_tokens, settings.chunk_tokens)
    kept = chunks_kept_at(total, keep)
    assert kept == kept_chunks
    chosen = range(total - kept, total) if last_kept else range(kept)
    plan = plan_of(*chosen, prompt_tokens=prompt_tokens, settings=settings)
    assert plan.kept_tokens == kept_tokens
    assert kept_positions(plan).size == kept_tokens
    assert plan.selectable_chunks == total
    assert plan.kept_chunks == plan.ranked_chunks == kept


@given(selectable=st.integers(0, 10**6), keep=st.integers(1, 10000))
def test_the_kept_chunks_are_the_rate_rounded_up(selectable: int, keep: int) -> None:
    kept = chunks_kept_at(selectable, keep)
    assert (kept - 1) * 10000 < selectable * keep <= kept * 10000


def test_a_rate_of_all_keeps_all_and_the_smallest_rate_keeps_one() -> None:
    assert chunks_kept_at(657, 10000) == 657
    assert chunks_kept_at(657, 1) == 1
    # 0.07 * 100 is 7.000000000000001 as a float.
    assert chunks_kept_at(100, 700) == 7


@pytest.mark.parametrize(
    ("tail_tokens", "kept_chunks", "tail"),
    [
        (0, 100, 0),
        (1, 100, 1),  # 95 tokens in chunks of 10: the last chunk has 5
        (5, 100, 1),
        (6, 100, 2),
        (15, 100, 2),
        (16, 100, 3),
        (95, 100, 10),
        (9999, 100, 10),
        (95, 8, 2),
        (95, 11, 2),
        (95, 12, 3),
        (95, 1, 2),
    ],
)
def test_the_tail_covers_its_tokens_up_to_a_quarter_of_the_kept_chunks(
    tail_tokens: int, kept_chunks: int, tail: int
) -> None:
    assert tail_chunks(95, 10, tail_tokens, kept_chunks) == tail


def test_a_span_touches_the_chunks_of_its_first_and_last_position() -> None:
    assert span_chunks([Run(9, 11), Run(30, 40)], 10) == {0, 1, 3}


@given(members=st.sets(st.integers(0, 60)))
def test_runs_and_members_are_the_same_indices(members: set[int]) -> None:
    ascending = sorted(members)
    runs = runs_of(ascending)
    assert run_members(runs) == ascending
    assert run_length(runs) == len(ascending)
    # As few runs as possible: between two there is a gap.
    assert all(left.end < right.start for left, right in itertools.pairwise(runs))


@pytest.mark.parametrize("indices", [[1, 0], [1, 1], [0, 1, 1], [5, 6, 2]])
def test_runs_of_what_does_not_ascend_are_our_bug(indices: list[int]) -> None:
    with pytest.raises(AssertionError):
        runs_of(indices)


def test_runs_of_an_array_hold_plain_integers() -> None:
    (run,) = runs_of(np.array([3, 4]))
    assert (type(run.start), type(run.end)) == (int, int)


@st.composite
def any_plans(draw: st.DrawFn) -> KeepPlan:
    prompt_tokens, chunk_tokens = draw(st.integers(1, 300)), draw(st.integers(1, 40))
    total = chunk_count(prompt_tokens, chunk_tokens)
    head = draw(st.integers(0, prompt_tokens - 1))
    chunks = st.integers(head // chunk_tokens, total - 1)
    return plan_of(
        *sorted(draw(st.sets(chunks, min_size=1))),
        prompt_tokens=prompt_tokens,
        settings=PlanSettings(chunk_tokens=chunk_tokens, tail_tokens=0),
        protected_head_tokens=head,
    )


@given(plan=any_plans())
def test_kept_positions_are_the_members_of_kept_chunks_after_the_head(plan: KeepPlan) -> None:
    kept = set(run_members(plan.kept))
    expected = [
        position
        for position in range(plan.protected_head_tokens, plan.prompt_tokens)
        if position // plan.settings.chunk_tokens in kept
    ]
    assert kept_positions(plan).tolist() == expected
    assert kept_positions(plan).dtype == np.int64
    assert plan.kept_tokens == len(expected)


@given(plan=any_plans())
def test_selectable_chunks_are_those_not_wholly_in_the_head(plan: KeepPlan) -> None:
    chunk_tokens = plan.settings.chunk_tokens
    ends = [
        min((chunk + 1) * chunk_tokens, plan.prompt_tokens) for chunk in range(plan.chunks_total)
    ]
    assert plan.selectable_chunks == sum(end > plan.protected_head_tokens for end in ends)


@given(plan=any_plans())
def test_a_plan_passes_exactly_if_it_keeps_the_last_token(plan: KeepPlan) -> None:
    if plan.chunks_total - 1 in run_members(plan.kept):
        check(plan)
    else:
        with pytest.raises(PlanRejected, match="drops the last prompt token"):
            check(plan)


def test_a_plan_that_keeps_what_it_must_passes() -> None:
    # A head of 15 tokens covers chunk 0 and half of chunk 1; 12 tail tokens touch chunks 8 and 9.
    check(
        plan_of(
            *(1, 4, 5, 8, 9),
            settings=PlanSettings(chunk_tokens=10, tail_tokens=12),
            protected_head_tokens=15,
            protected_spans=(Run(3, 12), Run(49, 51)),
            forced=runs_of([1, 4, 5, 8, 9]),
        )
    )


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (plan_of(), "keeps nothing"),
        (plan_of(0, 8), "drops the last prompt token"),
        (plan_of(0, kept=(Run(9, 10), Run(0, 1))), "not ascending"),
        (plan_of(0, kept=(Run(0, 3), Run(2, 10))), "not ascending"),
        (plan_of(0, kept=(Run(9, 11),)), "past the last chunk, 9"),
        (plan_of(0, kept=(Run(9, 10), Run(2**32, 2**32 + 1))), "past the last chunk, 9"),
        (plan_of(0, 9, protected_head_tokens=10), "lie in the head"),
        (plan_of(9, protected_head_tokens=100), "leaves no token"),
        (plan_of(9, protected_head_tokens=10**6), "leaves no token"),
        (plan_of(9, protected_spans=(Run(49, 51),)), "protected span 49 to 51"),
        (plan_of(4, 9, protected_spans=(Run(49, 51),)), "protected span 49 to 51"),
        (plan_of(5, 9, protected_spans=(Run(49, 51),)), "protected span 49 to 51"),
        (plan_of(9, protected_spans=(Run(90, 101),)), "span goes past the prompt"),
        (
            plan_of(1, 9, settings=PlanSettings(chunk_tokens=10, tail_tokens=11)),
            "drops one of the last 2 chunks",
        ),
        (plan_of(9, settings=PlanSettings(chunk_tokens=0, tail_tokens=0)), "chunks of 0 tokens"),
        (plan_of(8, 9, forced=(Run(7, 9),)), "forces a chunk that it does not keep"),
        (plan_of(8, 9, forced=(Run(9, 10), Run(8, 9))), "not ascending"),
        (plan_of(8, 9, forced=(Run(9, 11),)), "past the last chunk"),
    ],
)
def test_a_plan_that_drops_what_must_be_kept_or_is_malformed_is_rejected(
    plan: KeepPlan, message: str
) -> None:
    with pytest.raises(PlanRejected, match=message):
        check(plan)


@pytest.mark.parametrize(
    ("request_says", "message"),
    [
        ({"prompt_tokens": 101}, "is for 100 tokens, the prompt has 101"),
        ({"protected_head_tokens": 1}, "head of 0 tokens, the request says 1"),
        ({"protected_spans": (Run(90, 91),)}, "other protected spans"),
    ],
)
def test_a_plan_for_another_request_is_rejected(
    request_says: dict[str, object], message: str
) -> None:
    check(plan_of(9))
    with pytest.raises(PlanRejected, match=message):
        check(plan_of(9), **request_says)


def digest_of(settings: PlanSettings, **changes: object) -> bytes:
    others: dict[str, object] = {
        "head_set": "all", "draft_layers": 12, "protected_spans": (Run(1, 2),)
    }  # fmt: skip
    return settings_digest(settings, **(others | changes))


LOOKAHEAD = PlanSettings(
    query_mode=QueryMode.LOOKAHEAD, lookahead_temperature=0.5, lookahead_seed=1
)
TAIL_WINDOW = PlanSettings(query_mode=QueryMode.TAIL_WINDOW)
CHANGES = {
    "keep_basis_points": 2001,
    "chunk_tokens": 33,
    "tail_tokens": 0,
    "pool_tokens": 15,
    "query_mode": QueryMode.TAIL_WINDOW,
    "lookahead_tokens": 9,
    "window_tokens": 17,
    "lookahead_temperature": 0.25,
    "lookahead_seed": 2,
}


def test_every_setting_has_a_change_to_test_with() -> None:
    assert set(CHANGES) == {field.name for field in dataclasses.fields(PlanSettings)}


@pytest.mark.parametrize("name", sorted(set(CHANGES) - {"window_tokens"}))
def test_the_digest_changes_with_each_setting_of_lookahead(name: str) -> None:
    changed = dataclasses.replace(LOOKAHEAD, **{name: CHANGES[name]})
    assert digest_of(changed) != digest_of(LOOKAHEAD)


@pytest.mark.parametrize(
    "name", ["chunk_tokens", "keep_basis_points", "pool_tokens", "tail_tokens", "window_tokens"]
)
def test_the_digest_changes_with_each_setting_of_a_tail_window(name: str) -> None:
    changed = dataclasses.replace(TAIL_WINDOW, **{name: CHANGES[name]})
    assert digest_of(changed) != digest_of(TAIL_WINDOW)


@pytest.mark.parametrize(
    "change",
    [
        {"head_set": "abc"},
        {"draft_layers": 11},
        {"protected_spans": ()},
        {"protected_spans": (Run(1, 3),)},
        {"protected_spans": (Run(1, 2), Run(3, 4))},
    ],
)
def test_the_digest_changes_with_heads_layers_and_spans(change: dict[str, object]) -> None:
    assert digest_of(LOOKAHEAD, **change) != digest_of(LOOKAHEAD)


def test_the_digest_ignores_what_the_query_mode_does_not_read() -> None:
    assert digest_of(dataclasses.replace(LOOKAHEAD, window_tokens=99)) == digest_of(LOOKAHEAD)
    other = dataclasses.replace(
        TAIL_WINDOW, lookahead_tokens=99, lookahead_temperature=0.5, lookahead_seed=5
    )
    assert digest_of(other) == digest_of(TAIL_WINDOW)


@pytest.mark.parametrize(
    ("one", "other"), [(0.6, float(np.float32(0.6))), (0, 0.0), (-0.0, 0.0), (1, 1.0)]
)
def test_the_digest_is_the_same_on_both_ends_of_the_wire(one: float, other: float) -> None:
    left, right = PlanSettings(lookahead_temperature=one), PlanSettings(lookahead_temperature=other)
    assert left == right
    assert digest_of(left) == digest_of(right)


@pytest.mark.parametrize(
    ("settings", "deterministic"),
    [
        (PlanSettings(), True),
        (PlanSettings(lookahead_temperature=0.5), False),
        (PlanSettings(lookahead_temperature=0.5, lookahead_seed=0), True),
        (PlanSettings(lookahead_temperature=0.5, query_mode=QueryMode.TAIL_WINDOW), True),
    ],
)
def test_only_an_unseeded_draw_makes_a_plan_that_cannot_be_repeated(
    settings: PlanSettings, deterministic: bool
) -> None:
    assert settings.is_deterministic is deterministic
