"""What a turn tells: TurnStarted, progress, deltas, then exactly one TurnFinished."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from gateway.planner import Decision
from gateway.ports import Progress, Scored
from gateway.prompt import Prompt
from gateway.timings import Timings
from serving.finish import FinishReason
from serving.keep_plan import KeepPlan


class TurnPhase(enum.Enum):
    """Where a turn is, for the count of those that were cancelled there."""

    QUEUE = "queue"
    TOKENISE = "tokenise"
    SCORE = "score"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Tokens, by what was done with them."""

    prompt_tokens: int = 0
    protected_head_tokens: int = 0
    target_dense_restored_tokens: int = 0
    target_sparse_restored_tokens: int = 0
    draft_restored_tokens: int = 0
    draft_prefilled_tokens: int = 0
    scored_tokens: int = 0
    selected_tokens: int = 0
    executed_tokens: int = 0
    completion_tokens: int = 0
    queries: int = 0


@dataclass(frozen=True, slots=True)
class TurnStarted:
    prompt_tokens: int
    protected_head_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Reply tokens and the text that became certain with them; either may be empty.

    gap_s: since the tokens before; None for the first ones.
    """

    text: str
    token_ids: tuple[int, ...]
    gap_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFinished:
    finish_reason: FinishReason
    matched_stop_string: str | None
    matched_stop_token_id: int | None
    decision: Decision
    counts: Counts
    timings: Timings
    plan: KeepPlan | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What Explain found. scored: None where nothing was scored, or scoring failed."""

    prompt: Prompt
    decision: Decision
    scored: Scored | None
    counts: Counts
    timings: Timings


TurnEvent = TurnStarted | Progress | Delta | TurnFinished
