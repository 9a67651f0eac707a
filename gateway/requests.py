"""A request with every default filled in, once. What comes after reads nothing but this.

All entry points (streaming, unary, explain) resolve here, so they agree on every setting.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import Any

from gateway.conversation import conversation_from
from gateway.planner import PrefillMode
from gateway.ports import Model, ScorerFacts
from gateway.prompt import IdsInput, PromptInput, TextInput
from gateway.settings import GatewaySettings
from serving import wire
from serving.errors import InvalidRequest
from serving.keep_plan import PlanSettings, QueryMode, Run
from serving.limits import (
    DEFAULT_LIMITS,
    check_identifier,
    check_plan_settings,
    check_sampling,
    check_stops,
)
from serving.sampling_settings import Sampling, Stops

# While the scorer is away nobody knows its limits; they are checked again when it is there.
LOOKAHEAD_TOKENS_MAX = 1024
WINDOW_TOKENS_MAX = 4096
PLAN_FIELDS = (
    "keep_basis_points",
    "chunk_tokens",
    "tail_tokens",
    "lookahead_tokens",
    "window_tokens",
    "lookahead_temperature",
    "lookahead_seed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What a request gets that sets nothing."""

    mode: PrefillMode
    plan: PlanSettings
    threshold_tokens: int
    sampling: Sampling
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What the models and the settings allow."""

    vocab_tokens: int
    positions_max: int
    completion_tokens_max: int
    lookahead_tokens_max: int
    window_tokens_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One resolved request. protected_spans: of positions; the prompt's end is not known yet."""

    request_id: str
    source: PromptInput
    sampling: Sampling
    stops: Stops
    mode: PrefillMode
    plan: PlanSettings
    threshold_tokens: int
    protected_spans: tuple[Run, ...]


def defaults_of(settings: GatewaySettings, scorer: ScorerFacts | None) -> Defaults:
    """The defaults now: query mode "auto" is whatever the scorer calls its default."""
    if settings.query_mode != "auto":
        query_mode = QueryMode(settings.query_mode)
    else:
        query_mode = QueryMode.LOOKAHEAD if scorer is None else scorer.default_query_mode
    return Defaults(
        mode=PrefillMode[settings.prefill_mode.upper()],
        plan=PlanSettings(
            keep_basis_points=settings.keep_basis_points,
            chunk_tokens=settings.chunk_tokens,
            tail_tokens=settings.tail_tokens,
            pool_tokens=settings.pool_tokens,
            query_mode=query_mode,
            lookahead_tokens=settings.lookahead_tokens,
            window_tokens=settings.window_tokens,
        ),
        threshold_tokens=settings.threshold_tokens,
        sampling=Sampling(),
        max_tokens=settings.max_tokens_default,
    )


def bounds_of(settings: GatewaySettings, target: Model, scorer: ScorerFacts | None) -> Bounds:
    """The bounds now."""
    return Bounds(
        vocab_tokens=target.vocab_tokens,
        positions_max=target.positions_max,
        completion_tokens_max=settings.completion_tokens_max,
        lookahead_tokens_max=scorer.lookahead_tokens_max if scorer else LOOKAHEAD_TOKENS_MAX,
        window_tokens_max=scorer.window_tokens_max if scorer else WINDOW_TOKENS_MAX,
    )


def resolve_turn(message: Any, *, defaults: Defaults, bounds: Bounds) -> TurnRequest:
    """TurnRequest of a GenerateRequest or CompleteRequest. Raises InvalidRequest."""
    sampling = wire.sampling_from(message.sampling, defaults=defaults.sampling)
    check_sampling(sampling)
    stops = wire.stops_from(
        message.stop, max_tokens_default=defaults.max_tokens, vocab=bounds.vocab_tokens
    )
    return _resolve(message, sampling, stops, defaults=defaults, bounds=bounds)


def resolve_explain(message: Any, *, defaults: Defaults, bounds: Bounds) -> TurnRequest:
    """TurnRequest of an ExplainRequest, which generates nothing. Raises InvalidRequest."""
    stops = Stops(max_tokens=defaults.max_tokens)
    return _resolve(message, defaults.sampling, stops, defaults=defaults, bounds=bounds)


def _resolve(
    message: Any, sampling: Sampling, stops: Stops, *, defaults: Defaults, bounds: Bounds
) -> TurnRequest:
    if message.request_id:
        check_identifier(message.request_id, field="request_id")
    check_stops(
        stops, completion_tokens_max=bounds.completion_tokens_max, vocab=bounds.vocab_tokens
    )
    plan = _plan_settings(message.prefill, defaults.plan)
    check_plan_settings(
        plan,
        lookahead_max=bounds.lookahead_tokens_max,
        window_max=bounds.window_tokens_max,
        limits=DEFAULT_LIMITS,
        field="prefill",
    )
    return TurnRequest(
        request_id=message.request_id or uuid.uuid4().hex,
        source=_source(message, bounds),
        sampling=sampling,
        stops=stops,
        mode=_mode(message.prefill, defaults.mode),
        plan=plan,
        threshold_tokens=defaults.threshold_tokens,
        protected_spans=wire.spans_from(
            message.prefill.protected_spans,
            bounds.positions_max,
            field="prefill.protected_spans",
        ),
    )


def _plan_settings(prefill: Any, defaults: PlanSettings) -> PlanSettings:
    given = {name: getattr(prefill, name) for name in PLAN_FIELDS if prefill.HasField(name)}
    if prefill.query_mode:
        given["query_mode"] = wire.query_mode_from(prefill.query_mode, field="prefill.query_mode")
    return replace(defaults, **given)


def _mode(prefill: Any, default: PrefillMode) -> PrefillMode:
    if not prefill.mode:
        return default
    try:
        return PrefillMode(prefill.mode)
    except ValueError:
        known = ", ".join(f"{mode.value} ({mode.name})" for mode in PrefillMode)
        raise InvalidRequest(
            f"prefill.mode is {prefill.mode}, it must be one of {known}", field="prefill.mode"
        ) from None


def _source(message: Any, bounds: Bounds) -> PromptInput:
    kind = message.prompt.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("the prompt is empty", field="prompt")
    if kind == "conversation":
        return conversation_from(message.prompt.conversation)
    if kind == "text":
        if not message.prompt.text:
            raise InvalidRequest("the prompt is empty", field="prompt.text")
        return TextInput(message.prompt.text)
    return IdsInput(
        wire.ids_from_bytes(
            message.prompt.token_ids,
            field="prompt.token_ids",
            vocab=bounds.vocab_tokens,
            tokens_max=bounds.positions_max,
        )
    )
