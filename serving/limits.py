"""What a request may ask for. The gateway checks its callers, the services check the gateway.

Every refusal is an InvalidRequest that names the field, its limit and the value it got.
`field` arguments say where the value sits in the caller's own request.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass

from serving.errors import InvalidRequest
from serving.keep_plan import PlanSettings
from serving.sampling_settings import Sampling, Stops

IDENTIFIER_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-_.:/")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Largest values that a request may ask for, where no model decides."""

    chunk_tokens_max: int = 4096
    tail_tokens_max: int = 65_536
    # The paper pools over 13 tokens; other odd widths are for experiments.
    pool_tokens_max: int = 127
    top_k_max: int = 4096
    stop_strings_max: int = 16
    stop_string_characters_max: int = 256
    stop_token_ids_max: int = 256
    protected_spans_max: int = 1024
    # Of request ids and handles. They travel as metadata, too, so they are plain ASCII.
    identifier_characters_max: int = 128


DEFAULT_LIMITS = RequestLimits()


def check_plan_settings(
    settings: PlanSettings,
    *,
    lookahead_max: int,
    window_max: int,
    limits: RequestLimits = DEFAULT_LIMITS,
    field: str = "settings",
) -> None:
    """Refuse plan settings out of bounds. The fields of the other query mode are checked, too."""
    bounds = {
        "keep_basis_points": (1, 10_000),
        "chunk_tokens": (1, limits.chunk_tokens_max),
        "tail_tokens": (0, limits.tail_tokens_max),
        "pool_tokens": (1, limits.pool_tokens_max),
        "lookahead_tokens": (1, lookahead_max),
        "window_tokens": (1, window_max),
    }
    for name, (low, high) in bounds.items():
        check_range(getattr(settings, name), low=low, high=high, field=f"{field}.{name}")
    if settings.pool_tokens % 2 == 0:
        raise _refusal(f"{field}.pool_tokens", settings.pool_tokens, limit="an odd number")
    _check_temperature(settings.lookahead_temperature, field=f"{field}.lookahead_temperature")


def check_sampling(
    sampling: Sampling, *, limits: RequestLimits = DEFAULT_LIMITS, field: str = "sampling"
) -> None:
    """Refuse a temperature, top_k or top_p that no distribution can be drawn from."""
    _check_temperature(sampling.temperature, field=f"{field}.temperature")
    check_range(sampling.top_k, low=0, high=limits.top_k_max, field=f"{field}.top_k")
    # Written so that NaN, which compares false with everything, is refused.
    if not 0.0 < sampling.top_p <= 1.0:
        raise _refusal(f"{field}.top_p", sampling.top_p, limit="above 0 and at most 1")


def check_stops(
    stops: Stops,
    *,
    completion_tokens_max: int,
    vocab: int,
    limits: RequestLimits = DEFAULT_LIMITS,
    field: str = "stop",
) -> None:
    """Refuse a reply length, stop strings or stop ids out of bounds. vocab: ids of the model."""
    check_range(stops.max_tokens, low=1, high=completion_tokens_max, field=f"{field}.max_tokens")
    _check_stop_strings(stops.stop_strings, limits=limits, field=f"{field}.stop_strings")
    ids_field = f"{field}.stop_token_ids"
    ids = len(stops.stop_token_ids)
    if ids > limits.stop_token_ids_max:
        raise _refusal(
            f"the number of {ids_field}",
            ids,
            limit=f"at most {limits.stop_token_ids_max}",
            field=ids_field,
        )
    for token_id in sorted(stops.stop_token_ids):
        check_range(token_id, low=0, high=vocab - 1, field=ids_field)


def check_identifier(value: str, *, limits: RequestLimits = DEFAULT_LIMITS, field: str) -> None:
    """Refuse a request id, instance id or handle that is empty, too long or not plain ASCII."""
    check_range(
        len(value),
        low=1,
        high=limits.identifier_characters_max,
        field=field,
        name=f"the length of {field}",
    )
    if not IDENTIFIER_CHARACTERS.issuperset(value):
        raise InvalidRequest(
            f"{field} may have ASCII letters, digits and any of -_.:/ only", field=field
        )


def check_range(
    value: float, *, low: float, high: float, field: str, name: str | None = None
) -> None:
    """Refuse a value outside low..high, both allowed. name: what the message calls it."""
    if not low <= value <= high:
        raise _refusal(name or field, value, limit=f"{low} to {high}", field=field)


def _check_temperature(temperature: float, *, field: str) -> None:
    if not math.isfinite(temperature) or temperature < 0.0:
        raise _refusal(field, temperature, limit="finite and at least 0")


def _check_stop_strings(strings: Sequence[str], *, limits: RequestLimits, field: str) -> None:
    if len(strings) > limits.stop_strings_max:
        raise _refusal(
            f"the number of {field}",
            len(strings),
            limit=f"at most {limits.stop_strings_max}",
            field=field,
        )
    for index, text in enumerate(strings):
        check_range(
            len(text),
            low=1,
            high=limits.stop_string_characters_max,
            field=field,
            name=f"the length of {field}[{index}]",
        )


def _refusal(name: str, value: float, *, limit: str, field: str | None = None) -> InvalidRequest:
    return InvalidRequest(
        f"{name} is {value}, it must be {limit}",
        field=field or name,
        metadata={"limit": limit, "got": str(value)},
    )
