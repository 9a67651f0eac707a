"""Which chunks of a prompt are kept: pure functions from importance and settings to a keep plan.

Counts are integers throughout. What a request forces is known before any model runs, so a request
whose forced chunks leave nothing to rank is refused by `budget_of`, before its prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serving.errors import PromptExceedsDraft, ProtectedExceedsBudget
from serving.keep_plan import (
    KeepPlan,
    PlanSettings,
    QueryMode,
    Run,
    chunk_count,
    chunks_kept_at,
    runs_of,
    span_chunks,
    tail_chunks,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What is certain about a keep plan before its importance is known."""

    prompt_tokens: int
    settings: PlanSettings
    protected_head_tokens: int
    protected_spans: tuple[Run, ...]  # of positions
    selectable_chunks: int
    kept_chunks: int
    forced: tuple[int, ...]  # chunks, ascending

    @property
    def first_selectable_chunk(self) -> int:
        return self.protected_head_tokens // self.settings.chunk_tokens

    @property
    def ranked_chunks(self) -> int:
        return self.kept_chunks - len(self.forced)


def budget_of(
    settings: PlanSettings,
    *,
    prompt_tokens: int,
    protected_head_tokens: int,
    protected_spans: Sequence[Run],
) -> Budget:
    """Count the chunks to keep and name the forced ones.

    Raises ProtectedExceedsBudget if the forced chunks alone use up the budget. A keep rate that
    keeps every selectable chunk has nothing to rank and is never refused.
    """
    assert 0 <= protected_head_tokens < prompt_tokens
    chunk_tokens = settings.chunk_tokens
    first_selectable = protected_head_tokens // chunk_tokens
    selectable = chunk_count(prompt_tokens, chunk_tokens) - first_selectable
    kept = chunks_kept_at(selectable, settings.keep_basis_points)
    forced = _forced_chunks(
        settings, protected_spans, prompt_tokens=prompt_tokens, first=first_selectable, kept=kept
    )
    if kept <= len(forced) and kept < selectable:
        raise ProtectedExceedsBudget(
            f"{len(forced)} of {selectable} chunks are kept without ranking, "
            f"and {settings.keep_basis_points} basis points keep {kept}",
            metadata={"forced_chunks": str(len(forced)), "kept_chunks": str(kept)},
        )
    return Budget(
        prompt_tokens=prompt_tokens,
        settings=settings,
        protected_head_tokens=protected_head_tokens,
        protected_spans=tuple(protected_spans),
        selectable_chunks=selectable,
        kept_chunks=kept,
        forced=forced,
    )


def check_draft_positions(
    settings: PlanSettings, *, prompt_tokens: int, positions_max: int
) -> None:
    """Raise PromptExceedsDraft unless the draft has a position for all that scoring will run."""
    decoded = settings.lookahead_tokens - 1 if settings.query_mode is QueryMode.LOOKAHEAD else 0
    if prompt_tokens + decoded > positions_max:
        raise PromptExceedsDraft(
            f"the prompt has {prompt_tokens} tokens and scoring decodes {decoded} more, "
            f"the draft has {positions_max} positions",
            field="prompt_token_ids",
            metadata={"positions_max": str(positions_max)},
        )


def mean_per_chunk(importance: np.ndarray, chunk_tokens: int) -> np.ndarray:
    """Mean importance of each chunk's members; a short last chunk over its true length.

    importance: float32 [tokens]. Returns float32 [chunks], the head's chunks included: summed in
    float64, then rounded, so that what is ranked is what is reported.
    """
    tokens = importance.size
    chunks = chunk_count(tokens, chunk_tokens)
    padded = np.zeros(chunks * chunk_tokens)
    padded[:tokens] = importance
    members = np.full(chunks, chunk_tokens)
    members[-1] = tokens - (chunks - 1) * chunk_tokens
    means = padded.reshape(chunks, chunk_tokens).sum(axis=1) / members
    return np.asarray(means, dtype=np.float32)


def select(budget: Budget, chunk_importance: np.ndarray, *, settings_digest: bytes) -> KeepPlan:
    """Keep the forced chunks and the most important others, ties to the lower index.

    chunk_importance: float32 [chunks], finite.
    """
    assert chunk_importance.size == chunk_count(budget.prompt_tokens, budget.settings.chunk_tokens)
    assert np.isfinite(chunk_importance).all()
    forced = set(budget.forced)
    candidates = np.array(
        [c for c in range(budget.first_selectable_chunk, chunk_importance.size) if c not in forced],
        dtype=np.int64,
    )
    best_first = np.argsort(-chunk_importance[candidates], kind="stable")
    ranked = candidates[best_first[: max(budget.ranked_chunks, 0)]]
    kept = sorted(forced | set(ranked.tolist()))
    assert len(kept) == budget.kept_chunks
    return KeepPlan(
        prompt_tokens=budget.prompt_tokens,
        settings=budget.settings,
        kept=runs_of(kept),
        forced=runs_of(budget.forced),
        protected_head_tokens=budget.protected_head_tokens,
        protected_spans=budget.protected_spans,
        settings_digest=settings_digest,
    )


def _forced_chunks(
    settings: PlanSettings, spans: Sequence[Run], *, prompt_tokens: int, first: int, kept: int
) -> tuple[int, ...]:
    """The first selectable chunk, the last ones, and all that touch a span; ascending."""
    total = chunk_count(prompt_tokens, settings.chunk_tokens)
    tail = tail_chunks(prompt_tokens, settings.chunk_tokens, settings.tail_tokens, kept)
    ends = {first, *range(total - tail, total)} if settings.tail_tokens else set()
    forced = ends | span_chunks(spans, settings.chunk_tokens)
    return tuple(sorted(chunk for chunk in forced if chunk >= first))
