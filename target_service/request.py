"""A request as a value, and every check that needs no state of the service; done before queueing.

Messages are taken as they come (any object with the fields of target.proto).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from serving import wire
from serving.errors import BaseMismatch
from serving.handle_calls import lease_s_of
from serving.keep_plan import KeepPlan, check_plan
from serving.limits import (
    check_identifier,
    check_plan_settings,
    check_range,
    check_sampling,
    check_stops,
)
from serving.sampling_settings import Sampling, Stops

# Of a plan the target reads the chunks; what the draft allows is the scorer's to check.
UINT32_MAX = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """vocab: ids of the model; lease_s_max: also what a caller gets who names no lease."""

    vocab: int
    positions_max: int
    completion_tokens_max: int
    lease_s_max: float
    release_handles_max: int


@dataclass(frozen=True, slots=True)
class BaseRef:
    """A state by its handle, and the length in positions that the caller believes it has."""

    handle: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """One Generate request. prompt_ids: uint32 [prompt_tokens]; received_at: service's clock."""

    request_id: str
    instance_id: str
    handle: str
    prompt_ids: np.ndarray
    base: BaseRef | None
    plan: KeepPlan | None
    protected_head_tokens: int
    sampling: Sampling
    stops: Stops
    retain: bool
    lease_s: float
    received_at: float

    @property
    def prompt_tokens(self) -> int:
        return int(self.prompt_ids.size)

    @property
    def base_tokens(self) -> int:
        return self.base.tokens if self.base else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkCall:
    instance_id: str
    base: BaseRef
    position: int
    handle: str
    lease_s: float


def generate_call(message: Any, *, limits: CallLimits, received_at: float) -> GenerateCall:
    """A TargetGenerateRequest as a value. Raises InvalidRequest, PlanRejected or BaseMismatch."""
    prompt_ids = wire.ids_from_bytes(
        message.prompt_token_ids,
        field="prompt_token_ids",
        vocab=limits.vocab,
        tokens_max=limits.positions_max,
    )
    call = GenerateCall(
        request_id=message.request_id,
        instance_id=message.instance_id,
        handle=message.handle,
        prompt_ids=prompt_ids,
        base=BaseRef(message.base.handle, message.base.tokens)
        if message.HasField("base")
        else None,
        plan=wire.plan_from(message.plan) if message.HasField("plan") else None,
        protected_head_tokens=message.protected_head_tokens,
        sampling=wire.sampling_from(message.sampling, defaults=Sampling()),
        stops=wire.stops_from(
            message.stop, max_tokens_default=limits.completion_tokens_max, vocab=limits.vocab
        ),
        retain=message.retain,
        lease_s=lease_s_of(message, lease_s_max=limits.lease_s_max),
        received_at=received_at,
    )
    check_sampling(call.sampling)
    check_stops(call.stops, completion_tokens_max=limits.completion_tokens_max, vocab=limits.vocab)
    _check_names(call)
    _check_prompt_parts(call, message)
    return call


def fork_call(message: Any, *, limits: CallLimits) -> ForkCall:
    """A ForkRequest as a value. Raises InvalidRequest."""
    check_identifier(message.instance_id, field="instance_id")
    check_identifier(message.handle, field="handle")
    check_identifier(message.base.handle, field="base.handle")
    check_range(message.position, low=1, high=max(message.base.tokens, 1), field="position")
    return ForkCall(
        instance_id=message.instance_id,
        base=_base(message),
        position=message.position,
        handle=message.handle,
        lease_s=lease_s_of(message, lease_s_max=limits.lease_s_max),
    )


def _base(message: Any) -> BaseRef:
    return BaseRef(message.base.handle, message.base.tokens)


def _check_names(call: GenerateCall) -> None:
    """Who touches states says who it is; a call that touches none may stay anonymous."""
    check_identifier(call.request_id, field="request_id")
    if call.instance_id or call.retain or call.base:
        check_identifier(call.instance_id, field="instance_id")
    if call.handle or call.retain:
        check_identifier(call.handle, field="handle")
    if call.base:
        check_identifier(call.base.handle, field="base.handle")


def _check_prompt_parts(call: GenerateCall, message: Any) -> None:
    """The protected head, the plan and the base against the prompt and each other."""
    last = call.prompt_tokens - 1
    check_range(call.protected_head_tokens, low=0, high=last, field="protected_head_tokens")
    spans = wire.spans_from(message.protected_spans, call.prompt_tokens)
    if call.base and call.base.tokens > last:
        raise BaseMismatch(
            f"a base of {call.base.tokens} tokens leaves nothing to run of {last + 1}",
            field="base.tokens",
        )
    if call.plan is None:
        return
    check_plan_settings(
        call.plan.settings,
        lookahead_max=UINT32_MAX,
        window_max=UINT32_MAX,
        field="plan.settings",
    )
    check_plan(
        call.plan,
        prompt_tokens=call.prompt_tokens,
        protected_head_tokens=call.protected_head_tokens,
        protected_spans=spans,
    )
    if call.base and call.base.tokens != call.protected_head_tokens:
        raise BaseMismatch(
            f"with a keep plan the base is exactly the protected head of "
            f"{call.protected_head_tokens} tokens, the request says {call.base.tokens}",
            field="base.tokens",
        )
