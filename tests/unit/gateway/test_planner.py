from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.planner import (
    Decision,
    Path,
    PrefillMode,
    Reason,
    draft_positions_needed,
    plan_turn,
    reason_of,
)
from gateway.ports import ScorerFacts
from serving import errors
from serving.keep_plan import PlanSettings, QueryMode
from tests.service.fake_ports import SCORER_FACTS

AUTO, DENSE, SPARSE = PrefillMode.AUTO, PrefillMode.DENSE, PrefillMode.SPARSE
OTHER_TOKENIZER = replace(
    SCORER_FACTS, model=replace(SCORER_FACTS.model, tokenizer_digest="another")
)
SHORT_DRAFT = replace(SCORER_FACTS, model=replace(SCORER_FACTS.model, positions_max=106))
LOOKAHEAD_8 = PlanSettings(lookahead_tokens=8)
WINDOW_16 = PlanSettings(query_mode=QueryMode.TAIL_WINDOW, window_tokens=16)


def _plan(**given: Any) -> Decision:
    values: dict[str, Any] = {
        "mode": AUTO,
        "prompt_tokens": 100,
        "target_uncached_tokens": 100,
        "threshold_tokens": 100,
        "settings": LOOKAHEAD_8,
        "scorer": SCORER_FACTS,
        "target_tokenizer_digest": SCORER_FACTS.model.tokenizer_digest,
    }
    return plan_turn(**(values | given))


@pytest.mark.parametrize(
    ("given", "path", "reason"),
    [
        ({}, Path.SPARSE, Reason.ELIGIBLE),
        ({"mode": SPARSE}, Path.SPARSE, Reason.REQUESTED),
        ({"mode": DENSE}, Path.DENSE, Reason.DISABLED),
        ({"target_uncached_tokens": 99}, Path.DENSE, Reason.BELOW_THRESHOLD),
        ({"target_uncached_tokens": 1, "mode": SPARSE}, Path.SPARSE, Reason.REQUESTED),
        ({"scorer": None}, Path.DENSE, Reason.SCORER_UNAVAILABLE),
        ({"scorer": None, "mode": SPARSE}, Path.DENSE, Reason.SCORER_UNAVAILABLE),
        ({"scorer": OTHER_TOKENIZER}, Path.DENSE, Reason.TOKENIZER_MISMATCH),
        ({"scorer": OTHER_TOKENIZER, "mode": SPARSE}, Path.DENSE, Reason.TOKENIZER_MISMATCH),
        ({"scorer": SHORT_DRAFT}, Path.DENSE, Reason.PROMPT_EXCEEDS_DRAFT),
        ({"scorer": SHORT_DRAFT, "settings": WINDOW_16}, Path.SPARSE, Reason.ELIGIBLE),
        ({"scorer": SHORT_DRAFT, "prompt_tokens": 99}, Path.SPARSE, Reason.ELIGIBLE),
        # The wish goes before the prompt, the prompt before the scorer.
        ({"mode": DENSE, "scorer": None}, Path.DENSE, Reason.DISABLED),
        ({"target_uncached_tokens": 99, "scorer": None}, Path.DENSE, Reason.BELOW_THRESHOLD),
    ],
)
def test_every_situation_has_one_decision(
    given: dict[str, ScorerFacts], path: Path, reason: Reason
) -> None:
    assert _plan(**given) == Decision(path, reason)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.ProtectedExceedsBudget("x"), Reason.PROTECTED_EXCEEDS_BUDGET),
        (errors.PromptExceedsDraft("x"), Reason.PROMPT_EXCEEDS_DRAFT),
        (errors.ContextLengthExceeded("x"), Reason.PROMPT_EXCEEDS_DRAFT),
        (errors.TokenizerMismatch("x"), Reason.TOKENIZER_MISMATCH),
        (errors.UpstreamUnavailable("x"), Reason.SCORER_UNAVAILABLE),
        (errors.Unavailable("x"), Reason.SCORER_UNAVAILABLE),
        (errors.QueueFull("x"), Reason.SCORER_ERROR),
        (errors.KvCacheFull("x"), Reason.SCORER_ERROR),
        (errors.NonFiniteImportance("x"), Reason.SCORER_ERROR),
        (errors.InternalError("x"), Reason.SCORER_ERROR),
        (errors.InvalidRequest("x"), Reason.SCORER_ERROR),
        (errors.PlanRejected("x"), Reason.SCORER_ERROR),
        (errors.DeadlineExceeded("x"), Reason.SCORER_ERROR),
    ],
)
def test_every_scorer_error_has_a_reason(error: errors.ServiceError, reason: Reason) -> None:
    assert reason_of(error) is reason


def test_a_lookahead_needs_positions_but_its_last_token_does_not() -> None:
    assert draft_positions_needed(100, LOOKAHEAD_8) == 107
    assert draft_positions_needed(100, PlanSettings(lookahead_tokens=1)) == 100
    assert draft_positions_needed(100, WINDOW_16) == 100
