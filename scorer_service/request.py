"""A request as a value, and every check that needs no state of the service: before it is queued.

Messages are taken as they come (any object with the fields of scorer.proto).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scorer_service.keep import check_draft_positions
from scorer_service.scoring import ScoreJob
from serving import wire
from serving.errors import BaseMismatch, InvalidRequest
from serving.handle_calls import lease_s_of
from serving.limits import check_identifier, check_plan_settings, check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """vocab: ids of the model; lease_s_max: also what a caller gets who names no lease."""

    vocab: int
    positions_max: int
    lookahead_tokens_max: int
    window_tokens_max: int
    lease_s_max: float


def score_job(message: Any, *, limits: CallLimits) -> ScoreJob:
    """A ScoreRequest as a value. Raises InvalidRequest, PromptExceedsDraft or BaseMismatch."""
    if not message.HasField("settings"):
        raise InvalidRequest("settings are missing", field="settings")
    settings = wire.plan_settings_from(message.settings)
    check_plan_settings(
        settings, lookahead_max=limits.lookahead_tokens_max, window_max=limits.window_tokens_max
    )
    # By its bytes: a prompt that is too long is not even unpacked.
    tokens = len(message.prompt_token_ids) // wire.ID_BYTES
    check_draft_positions(settings, prompt_tokens=tokens, positions_max=limits.positions_max)
    job = ScoreJob(
        request_id=message.request_id,
        instance_id=message.instance_id,
        prompt_ids=wire.ids_from_bytes(
            message.prompt_token_ids,
            field="prompt_token_ids",
            vocab=limits.vocab,
            tokens_max=limits.positions_max,
        ),
        settings=settings,
        protected_head_tokens=message.protected_head_tokens,
        protected_spans=wire.spans_from(message.protected_spans, tokens),
        base=(message.base.handle, message.base.tokens) if message.HasField("base") else None,
        keep_handle=message.keep_handle if message.HasField("keep_handle") else None,
        lease_s=lease_s_of(message, lease_s_max=limits.lease_s_max),
    )
    check_range(job.protected_head_tokens, low=0, high=tokens - 1, field="protected_head_tokens")
    _check_names(job)
    _check_base(job)
    return job


def _check_names(job: ScoreJob) -> None:
    """Who touches states says who it is; a call that touches none may stay anonymous."""
    check_identifier(job.request_id, field="request_id")
    if job.instance_id or job.keep_handle is not None or job.base is not None:
        check_identifier(job.instance_id, field="instance_id")
    if job.keep_handle is not None:
        check_identifier(job.keep_handle, field="keep_handle")


def _check_base(job: ScoreJob) -> None:
    if job.base is None:
        return
    handle, tokens = job.base
    check_identifier(handle, field="base.handle")
    check_range(tokens, low=1, high=2**32 - 1, field="base.tokens")
    if tokens > job.prompt_tokens:
        raise BaseMismatch(
            f"a base of {tokens} tokens does not start a prompt of {job.prompt_tokens}",
            field="base.tokens",
        )
