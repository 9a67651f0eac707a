"""Dense or sparse, and why. Pure: values in, a decision out."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from gateway.ports import ScorerFacts
from serving.errors import (
    ContextLengthExceeded,
    PromptExceedsDraft,
    ProtectedExceedsBudget,
    ServiceError,
    TokenizerMismatch,
    Unavailable,
)
from serving.keep_plan import PlanSettings, QueryMode


class PrefillMode(enum.Enum):
    """What the caller wants. The numbers are those of PrefillMode in gateway.proto."""

    AUTO = 1
    DENSE = 2
    SPARSE = 3


class Path(enum.Enum):
    """How the prompt is prefilled. The numbers are those of Path in gateway.proto."""

    DENSE = 1
    SPARSE = 2
    RESUMED = 3
    TOPPED_UP = 4
    RESELECTED = 5
    REPLAYED = 6


class Reason(enum.Enum):
    """Why that path. The numbers are those of Reason in gateway.proto."""

    REQUESTED = 1
    ELIGIBLE = 2
    DISABLED = 3
    BELOW_THRESHOLD = 4
    TARGET_PREFIX_WARM = 5
    COST_MODEL = 6
    PROTECTED_EXCEEDS_BUDGET = 7
    PROMPT_EXCEEDS_DRAFT = 8
    SCORER_UNAVAILABLE = 9
    SCORER_ERROR = 10
    TOKENIZER_MISMATCH = 11
    UNSUPPORTED_MODEL = 12


@dataclass(frozen=True, slots=True)
class Decision:
    path: Path
    reason: Reason


def plan_turn(
    *,
    mode: PrefillMode,
    prompt_tokens: int,
    target_uncached_tokens: int,
    threshold_tokens: int,
    settings: PlanSettings,
    scorer: ScorerFacts | None,
    target_tokenizer_digest: str,
) -> Decision:
    """The decision before any model work; a sparse one still depends on the scorer's success.

    scorer: None while it is not there. The caller's wish is looked at first, then the prompt, then
    the scorer.
    """
    if mode is PrefillMode.DENSE:
        return dense(Reason.DISABLED)
    if mode is PrefillMode.AUTO and target_uncached_tokens < threshold_tokens:
        return dense(Reason.BELOW_THRESHOLD)
    if scorer is None:
        return dense(Reason.SCORER_UNAVAILABLE)
    if scorer.model.tokenizer_digest != target_tokenizer_digest:
        return dense(Reason.TOKENIZER_MISMATCH)
    if draft_positions_needed(prompt_tokens, settings) > scorer.model.positions_max:
        return dense(Reason.PROMPT_EXCEEDS_DRAFT)
    reason = Reason.REQUESTED if mode is PrefillMode.SPARSE else Reason.ELIGIBLE
    return Decision(Path.SPARSE, reason)


def dense(reason: Reason) -> Decision:
    """A dense decision."""
    return Decision(Path.DENSE, reason)


def draft_positions_needed(prompt_tokens: int, settings: PlanSettings) -> int:
    """Positions the draft fills: the prompt, and the lookahead, whose last token gets no KV."""
    if settings.query_mode is QueryMode.TAIL_WINDOW:
        return prompt_tokens
    return prompt_tokens + settings.lookahead_tokens - 1


def reason_of(error: ServiceError) -> Reason:
    """Why a turn goes dense after the scorer failed with this error."""
    for kind, reason in _REASONS.items():
        if isinstance(error, kind):
            return reason
    return Reason.SCORER_ERROR


_REASONS: dict[type[ServiceError], Reason] = {
    ProtectedExceedsBudget: Reason.PROTECTED_EXCEEDS_BUDGET,
    ContextLengthExceeded: Reason.PROMPT_EXCEEDS_DRAFT,
    PromptExceedsDraft: Reason.PROMPT_EXCEEDS_DRAFT,
    TokenizerMismatch: Reason.TOKENIZER_MISMATCH,
    Unavailable: Reason.SCORER_UNAVAILABLE,
}
