"""Keep plans from numbers a person can check by hand, and properties that hold for all of them."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scorer_service.keep import Budget, budget_of, check_draft_positions, mean_per_chunk, select
from serving.errors import PromptExceedsDraft, ProtectedExceedsBudget
from serving.keep_plan import (
    KeepPlan,
    PlanSettings,
    QueryMode,
    Run,
    check_plan,
    kept_positions,
    run_members,
)

DIGEST = b"digest"

# Kept-token counts of public server logs that select without forcing:
# prompt tokens, keep in basis points, kept chunks, kept tokens, whether the last chunk was kept.
LOGGED_SELECTIONS = [
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


def make_budget(
    prompt_tokens: int,
    settings: PlanSettings,
    *,
    head: int = 0,
    spans: tuple[Run, ...] = (),
) -> Budget:
    return budget_of(
        settings, prompt_tokens=prompt_tokens, protected_head_tokens=head, protected_spans=spans
    )


def plan_for(budget: Budget, by_chunk: list[float]) -> KeepPlan:
    return select(budget, np.array(by_chunk, dtype=np.float32), settings_digest=DIGEST)


def chunks_of(plan: KeepPlan) -> list[int]:
    return run_members(plan.kept)


@pytest.mark.parametrize(
    ("prompt_tokens", "keep", "kept_chunks", "kept_tokens", "last_kept"), LOGGED_SELECTIONS
)
def test_the_counts_of_public_logs_come_out_exactly(
    prompt_tokens: int, keep: int, kept_chunks: int, kept_tokens: int, last_kept: bool
) -> None:
    unforced = PlanSettings(keep_basis_points=keep, tail_tokens=0)
    importance = np.random.default_rng(1).random(prompt_tokens).astype(np.float32)
    importance[-(prompt_tokens % 32 or 32) :] = 2.0 if last_kept else 0.0
    plan = select(
        make_budget(prompt_tokens, unforced),
        mean_per_chunk(importance, 32),
        settings_digest=DIGEST,
    )
    assert (plan.chunks_total - 1 in chunks_of(plan)) is last_kept
    assert plan.kept_chunks == kept_chunks
    assert plan.kept_tokens == kept_tokens
    assert plan.forced == ()


def test_a_short_last_chunk_is_averaged_over_its_true_length() -> None:
    importance = np.array([1, 3, 5, 7, 9], dtype=np.float32)
    assert mean_per_chunk(importance, 2).tolist() == [2.0, 6.0, 9.0]


def test_the_first_and_the_last_chunks_are_kept_whatever_their_importance() -> None:
    # 20 chunks of 4 tokens, half kept: k = 10, and a tail of 4 tokens is one chunk.
    settings = PlanSettings(keep_basis_points=5000, chunk_tokens=4, tail_tokens=4)
    budget = make_budget(80, settings)
    assert budget.forced == (0, 19)
    plan = plan_for(budget, [0.0] * 10 + [1.0] * 9 + [0.0])
    assert chunks_of(plan) == [0, *range(10, 18), 19]
    assert plan.ranked_chunks == 8


def test_a_tail_that_begins_inside_a_chunk_keeps_that_chunk() -> None:
    settings = PlanSettings(keep_basis_points=5000, chunk_tokens=4, tail_tokens=5)
    assert make_budget(80, settings).forced == (0, 18, 19)


def test_the_forced_tail_is_at_most_a_quarter_of_the_kept_chunks() -> None:
    settings = PlanSettings(keep_basis_points=5000, chunk_tokens=4, tail_tokens=4096)
    assert make_budget(160, settings).forced == (0, 35, 36, 37, 38, 39)  # k = 20


def test_two_tail_chunks_are_forced_even_where_a_quarter_is_less() -> None:
    settings = PlanSettings(keep_basis_points=2000, chunk_tokens=4, tail_tokens=4096)
    assert make_budget(80, settings).forced == (0, 18, 19)  # k = 4


def test_chunks_that_touch_a_protected_span_are_kept() -> None:
    settings = PlanSettings(keep_basis_points=5000, chunk_tokens=4, tail_tokens=4)
    budget = make_budget(80, settings, spans=(Run(23, 29), Run(40, 41)))
    assert budget.forced == (0, 5, 6, 7, 10, 19)
    plan = plan_for(budget, [0.0] * 20)
    assert set(budget.forced) <= set(chunks_of(plan))
    assert plan.protected_spans == (Run(23, 29), Run(40, 41))


def test_the_protected_head_is_neither_selectable_nor_paid_for() -> None:
    # A head of 10 tokens covers chunks 0 and 1 wholly and half of chunk 2, which stays selectable.
    settings = PlanSettings(keep_basis_points=5000, chunk_tokens=4, tail_tokens=4)
    budget = make_budget(80, settings, head=10)
    assert budget.selectable_chunks == 18
    assert budget.kept_chunks == 9
    assert budget.forced == (2, 19)
    plan = plan_for(budget, [9.0, 9.0] + [0.0] * 18)
    assert min(chunks_of(plan)) == 2
    assert kept_positions(plan).min() == 10


def test_equal_importance_is_decided_by_the_lower_index() -> None:
    settings = PlanSettings(keep_basis_points=5000, chunk_tokens=1, tail_tokens=0)
    plan = plan_for(make_budget(6, settings), [1.0, 2.0, 1.0, 1.0, 2.0, 1.0])
    assert chunks_of(plan) == [0, 1, 4]


def test_no_tail_tokens_force_neither_end() -> None:
    settings = PlanSettings(keep_basis_points=2500, chunk_tokens=1, tail_tokens=0)
    budget = make_budget(8, settings)
    assert budget.forced == ()
    assert chunks_of(plan_for(budget, [0, 0, 0, 1, 0, 1, 0, 0])) == [3, 5]


def test_forced_chunks_that_use_up_the_budget_are_refused_before_any_importance() -> None:
    # 15 chunks at 20 % keep 3, and the first and the last two are forced.
    settings = PlanSettings(keep_basis_points=2000, chunk_tokens=4, tail_tokens=512)
    with pytest.raises(ProtectedExceedsBudget, match="3 of 15 chunks") as refused:
        make_budget(60, settings)
    assert refused.value.metadata == {"forced_chunks": "3", "kept_chunks": "3"}
    assert make_budget(64, settings).ranked_chunks == 1  # 16 chunks keep 4


def test_keeping_everything_is_never_refused() -> None:
    settings = PlanSettings(keep_basis_points=10000, chunk_tokens=4, tail_tokens=512)
    plan = plan_for(make_budget(9, settings), [0.0, 0.0, 0.0])
    assert chunks_of(plan) == [0, 1, 2]


def test_lookahead_needs_a_position_for_every_decoded_token() -> None:
    settings = PlanSettings(query_mode=QueryMode.LOOKAHEAD, lookahead_tokens=8)
    check_draft_positions(settings, prompt_tokens=93, positions_max=100)
    with pytest.raises(PromptExceedsDraft, match="94 tokens and scoring decodes 7 more"):
        check_draft_positions(settings, prompt_tokens=94, positions_max=100)


def test_a_tail_window_needs_no_position_past_the_prompt() -> None:
    settings = PlanSettings(query_mode=QueryMode.TAIL_WINDOW, window_tokens=16)
    check_draft_positions(settings, prompt_tokens=100, positions_max=100)
    with pytest.raises(PromptExceedsDraft):
        check_draft_positions(settings, prompt_tokens=101, positions_max=100)


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, PlanSettings, int, tuple[Run, ...]]:
    prompt_tokens = draw(st.integers(1, 400))
    plan_settings = PlanSettings(
        keep_basis_points=draw(st.integers(1, 10000)),
        chunk_tokens=draw(st.integers(1, 40)),
        tail_tokens=draw(st.integers(0, 100)),
    )
    head = draw(st.integers(0, prompt_tokens - 1))
    spans = ()
    if draw(st.booleans()):
        start = draw(st.integers(0, prompt_tokens - 1))
        spans = (Run(start, draw(st.integers(start + 1, prompt_tokens))),)
    return prompt_tokens, plan_settings, head, spans


@given(request=requests(), seed=st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_every_plan_keeps_exactly_its_count_and_passes_the_targets_check(
    request: tuple[int, PlanSettings, int, tuple[Run, ...]], seed: int
) -> None:
    prompt_tokens, plan_settings, head, spans = request
    try:
        budget = make_budget(prompt_tokens, plan_settings, head=head, spans=spans)
    except ProtectedExceedsBudget:
        assume(False)
    importance = np.random.default_rng(seed).random(prompt_tokens).astype(np.float32)
    by_chunk = mean_per_chunk(importance, plan_settings.chunk_tokens)
    plan = select(budget, by_chunk, settings_digest=DIGEST)
    kept = chunks_of(plan)
    n, keep = plan.selectable_chunks, plan_settings.keep_basis_points
    assert n == budget.selectable_chunks
    assert plan.kept_chunks == -(-n * keep // 10000)
    assert kept == sorted(set(kept))
    assert set(run_members(plan.forced)) <= set(kept)
    ranked = [c for c in kept if c not in budget.forced]
    dropped = set(range(budget.first_selectable_chunk, plan.chunks_total)) - set(kept)
    if ranked and dropped:
        assert min(by_chunk[ranked]) >= max(by_chunk[list(dropped)])
    if plan_settings.tail_tokens > 0:
        check_plan(
            plan,
            prompt_tokens=prompt_tokens,
            protected_head_tokens=head,
            protected_spans=spans,
        )


@given(request=requests())
@settings(max_examples=100, deadline=None)
def test_a_request_is_refused_exactly_if_it_drops_chunks_and_ranks_none(
    request: tuple[int, PlanSettings, int, tuple[Run, ...]],
) -> None:
    prompt_tokens, plan_settings, head, spans = request
    roomy = dataclasses.replace(plan_settings, keep_basis_points=10000)
    forced = len(make_budget(prompt_tokens, roomy, head=head, spans=spans).forced)
    try:
        budget = make_budget(prompt_tokens, plan_settings, head=head, spans=spans)
    except ProtectedExceedsBudget as error:
        refused: ProtectedExceedsBudget | None = error
    else:
        refused = None
        assert budget.ranked_chunks > 0 or budget.kept_chunks == budget.selectable_chunks
    if refused is not None:
        kept_chunks = int(refused.metadata["kept_chunks"])
        assert kept_chunks <= int(refused.metadata["forced_chunks"]) <= forced
