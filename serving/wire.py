"""Values out of and into messages: token ids, keep plans, sampling and stops.

Messages are taken as they come (any object with the fields of types.proto), so that no generated
class is imported here. What a message says wrongly is an InvalidRequest; what it asks for is
checked in serving/limits.py, and whether a plan fits its prompt in serving/keep_plan.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from serving.errors import ContextLengthExceeded, InternalError, InvalidRequest
from serving.keep_plan import KeepPlan, PlanSettings, QueryMode, Run
from serving.limits import DEFAULT_LIMITS, RequestLimits
from serving.sampling_settings import Sampling, Stops

ID_BYTES = 4
_ID_DTYPE = np.dtype("<u4")
_IMPORTANCE_DTYPE = np.dtype("<f4")
_MODE_NUMBERS = {QueryMode.LOOKAHEAD: 1, QueryMode.TAIL_WINDOW: 2}
_MODES = {number: mode for mode, number in _MODE_NUMBERS.items()}


def ids_to_bytes(token_ids: np.ndarray | Sequence[int]) -> bytes:
    """Token ids [tokens] as little-endian uint32."""
    ids = np.asarray(token_ids)
    if ids.size == 0:
        return b""
    assert ids.ndim == 1
    assert ids.dtype.kind in "iu"
    assert ids.min() >= 0
    assert ids.max() <= 0xFFFF_FFFF
    return ids.astype(_ID_DTYPE).tobytes()


def ids_from_bytes(data: bytes, *, field: str, vocab: int, tokens_max: int) -> np.ndarray:
    """Token ids uint32 [tokens], a copy.

    Raises InvalidRequest (empty, odd length, an id outside the vocabulary) or ContextLengthExceeded
    (more than tokens_max).
    """
    if not data:
        raise InvalidRequest(f"{field} is empty", field=field)
    tokens = _ids_in(data, field=field)
    if tokens > tokens_max:
        raise ContextLengthExceeded(
            f"{field} has {tokens} tokens, the limit is {tokens_max}",
            field=field,
            metadata={"limit": str(tokens_max), "got": str(tokens)},
        )
    return _ids_below(data, field=field, vocab=vocab)


def stop_ids_from_bytes(data: bytes, *, field: str, vocab: int, ids_max: int) -> frozenset[int]:
    """Stop token ids; none is fine. Raises InvalidRequest."""
    ids = _ids_in(data, field=field)
    if ids > ids_max:
        raise InvalidRequest(
            f"{field} has {ids} ids, the limit is {ids_max}",
            field=field,
            metadata={"limit": str(ids_max), "got": str(ids)},
        )
    return frozenset(_ids_below(data, field=field, vocab=vocab).tolist())


def importance_to_bytes(importance: np.ndarray) -> bytes:
    """Importance float32 [chunks] as little-endian float32."""
    return importance.astype(_IMPORTANCE_DTYPE).tobytes()


def importance_from_bytes(data: bytes, *, chunks: int) -> np.ndarray:
    """Importance float32 [chunks], a copy. Raises InternalError: it is a service that sent it."""
    if len(data) != chunks * _IMPORTANCE_DTYPE.itemsize:
        raise InternalError(f"{len(data)} bytes of importance for {chunks} chunks")
    return np.frombuffer(data, dtype=_IMPORTANCE_DTYPE).astype(np.float32)


def plan_settings_from(message: Any, *, field: str = "settings") -> PlanSettings:
    """PlanSettings out of its message. Raises InvalidRequest for an unknown query mode."""
    return PlanSettings(
        keep_basis_points=message.keep_basis_points,
        chunk_tokens=message.chunk_tokens,
        tail_tokens=message.tail_tokens,
        pool_tokens=message.pool_tokens,
        query_mode=query_mode_from(message.query_mode, field=f"{field}.query_mode"),
        lookahead_tokens=message.lookahead_tokens,
        window_tokens=message.window_tokens,
        lookahead_temperature=message.lookahead_temperature,
        lookahead_seed=_optional(message, "lookahead_seed"),
    )


def query_mode_from(number: int, *, field: str) -> QueryMode:
    """The query mode of an enum number. Raises InvalidRequest for an unknown one."""
    mode = _MODES.get(number)
    if mode is None:
        known = ", ".join(f"{value} ({mode.name})" for value, mode in _MODES.items())
        raise InvalidRequest(f"{field} is {number}, it must be one of {known}", field=field)
    return mode


def query_mode_number(mode: QueryMode) -> int:
    return _MODE_NUMBERS[mode]


def fill_plan_settings(message: Any, settings: PlanSettings) -> None:
    """Overwrite message with settings."""
    message.Clear()
    message.keep_basis_points = settings.keep_basis_points
    message.chunk_tokens = settings.chunk_tokens
    message.tail_tokens = settings.tail_tokens
    message.pool_tokens = settings.pool_tokens
    message.query_mode = _MODE_NUMBERS[settings.query_mode]
    message.lookahead_tokens = settings.lookahead_tokens
    message.window_tokens = settings.window_tokens
    message.lookahead_temperature = settings.lookahead_temperature
    if settings.lookahead_seed is not None:
        message.lookahead_seed = settings.lookahead_seed


def plan_from(message: Any, *, field: str = "plan") -> KeepPlan:
    """KeepPlan out of its message; check_plan says whether it fits a prompt.

    The message's counts are a report for readers: here they follow from the runs.
    Raises InvalidRequest for an empty run or span and for an unknown query mode.
    """
    return KeepPlan(
        prompt_tokens=message.prompt_tokens,
        settings=plan_settings_from(message.settings, field=f"{field}.settings"),
        kept=_chunk_runs(message.kept, field=f"{field}.kept"),
        forced=_chunk_runs(message.forced, field=f"{field}.forced"),
        protected_head_tokens=message.protected_head_tokens,
        protected_spans=spans_from(
            message.protected_spans, message.prompt_tokens, field=f"{field}.protected_spans"
        ),
        settings_digest=message.settings_digest,
    )


def fill_plan(message: Any, plan: KeepPlan) -> None:
    """Overwrite message with plan and its counts."""
    message.Clear()
    message.prompt_tokens = plan.prompt_tokens
    fill_plan_settings(message.settings, plan.settings)
    _add_chunk_runs(message.kept, plan.kept)
    _add_chunk_runs(message.forced, plan.forced)
    message.protected_head_tokens = plan.protected_head_tokens
    add_spans(message.protected_spans, plan.protected_spans)
    message.selectable_chunks = plan.selectable_chunks
    message.kept_chunks = plan.kept_chunks
    message.ranked_chunks = plan.ranked_chunks
    message.kept_tokens = plan.kept_tokens
    message.settings_digest = plan.settings_digest


def spans_from(
    messages: Sequence[Any],
    prompt_tokens: int,
    *,
    spans_max: int = DEFAULT_LIMITS.protected_spans_max,
    field: str = "protected_spans",
) -> tuple[Run, ...]:
    """Spans of positions: ascending, not overlapping, not empty, inside the prompt.

    Raises InvalidRequest.
    """
    if len(messages) > spans_max:
        raise InvalidRequest(
            f"{field} has {len(messages)} spans, the limit is {spans_max}",
            field=field,
            metadata={"limit": str(spans_max), "got": str(len(messages))},
        )
    free_from = 0
    for index, span in enumerate(messages):
        what = f"{field}[{index}] ({span.start} to {span.end})"
        if span.start >= span.end:
            raise InvalidRequest(f"{what} is empty", field=field)
        if span.start < free_from:
            raise InvalidRequest(f"{what} overlaps the span before it, or precedes it", field=field)
        if span.end > prompt_tokens:
            raise InvalidRequest(
                f"{what} goes past the prompt's {prompt_tokens} tokens",
                field=field,
                metadata={"limit": str(prompt_tokens), "got": str(span.end)},
            )
        free_from = span.end
    return tuple(Run(span.start, span.end) for span in messages)


def add_spans(messages: Any, spans: Iterable[Run]) -> None:
    """Append spans of positions to a repeated field."""
    for span in spans:
        messages.add(start=span.start, end=span.end)


def sampling_from(message: Any, *, defaults: Sampling) -> Sampling:
    """Sampling out of its message; unset fields are the defaults'. check_sampling checks it."""
    given = {
        name: getattr(message, name)
        for name in ("temperature", "top_k", "top_p", "seed")
        if message.HasField(name)
    }
    return Sampling(
        temperature=given.get("temperature", defaults.temperature),
        top_k=given.get("top_k", defaults.top_k),
        top_p=given.get("top_p", defaults.top_p),
        seed=given.get("seed", defaults.seed),
    )


def fill_sampling(message: Any, sampling: Sampling) -> None:
    """Overwrite message with sampling."""
    message.Clear()
    message.temperature = sampling.temperature
    message.top_k = sampling.top_k
    message.top_p = sampling.top_p
    if sampling.seed is not None:
        message.seed = sampling.seed


def stops_from(
    message: Any,
    *,
    max_tokens_default: int,
    vocab: int,
    limits: RequestLimits = DEFAULT_LIMITS,
    field: str = "stop",
) -> Stops:
    """Stops out of its message. Raises InvalidRequest for stop ids; check_stops checks the rest."""
    max_tokens = _optional(message, "max_tokens")
    return Stops(
        max_tokens=max_tokens_default if max_tokens is None else max_tokens,
        stop_strings=tuple(message.stop_strings),
        stop_token_ids=stop_ids_from_bytes(
            message.stop_token_ids,
            field=f"{field}.stop_token_ids",
            vocab=vocab,
            ids_max=limits.stop_token_ids_max,
        ),
        ignore_end_tokens=message.ignore_end_tokens,
    )


def fill_stops(message: Any, stops: Stops) -> None:
    """Overwrite message with stops."""
    message.Clear()
    message.max_tokens = stops.max_tokens
    message.stop_strings.extend(stops.stop_strings)
    message.stop_token_ids = ids_to_bytes(sorted(stops.stop_token_ids))
    message.ignore_end_tokens = stops.ignore_end_tokens


def _ids_in(data: bytes, *, field: str) -> int:
    if len(data) % ID_BYTES:
        raise InvalidRequest(
            f"{field} has {len(data)} bytes, which is no multiple of {ID_BYTES}: "
            "token ids are little-endian uint32",
            field=field,
            metadata={"limit": f"a multiple of {ID_BYTES}", "got": str(len(data))},
        )
    return len(data) // ID_BYTES


def _ids_below(data: bytes, *, field: str, vocab: int) -> np.ndarray:
    ids = np.frombuffer(data, dtype=_ID_DTYPE).astype(np.uint32)
    bad = np.flatnonzero(ids >= vocab)
    if bad.size:
        index = int(bad[0])
        raise InvalidRequest(
            f"{field}[{index}] is {ids[index]}, token ids must be below {vocab}",
            field=field,
            metadata={"limit": str(vocab), "got": str(ids[index]), "index": str(index)},
        )
    return ids


def _chunk_runs(messages: Sequence[Any], *, field: str) -> tuple[Run, ...]:
    for index, run in enumerate(messages):
        if run.chunks == 0:
            raise InvalidRequest(f"{field}[{index}] is an empty run", field=field)
    return tuple(Run(run.first_chunk, run.first_chunk + run.chunks) for run in messages)


def _add_chunk_runs(messages: Any, runs: Iterable[Run]) -> None:
    for run in runs:
        messages.add(first_chunk=run.start, chunks=run.end - run.start)


def _optional(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None
