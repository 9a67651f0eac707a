"""What the client returns: frozen values in plain Python, built from messages field by field."""

from __future__ import annotations

import array
import sys
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from specprefill.v1 import gateway_pb2, types_pb2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Decision:
    """path: DENSE, SPARSE, ...; reason: REQUESTED, ELIGIBLE, BELOW_THRESHOLD, ..."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class TokenCounts:
    prompt_tokens: int
    protected_head_tokens: int
    target_dense_restored_tokens: int
    target_sparse_restored_tokens: int
    draft_restored_tokens: int
    draft_prefilled_tokens: int
    scored_tokens: int
    selected_tokens: int
    executed_tokens: int
    completion_tokens: int
    queries: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. The stages, rpc_s and other_s add up to time_to_first_token_s."""

    queue_s: float
    tokenise_s: float
    look_up_s: float
    plan_s: float
    score_restore_s: float
    score_prefill_s: float
    score_queries_s: float
    score_k_pass_s: float
    score_select_s: float
    target_restore_s: float
    protected_prefill_s: float
    sparse_prefill_s: float
    dense_prefill_s: float
    kick_off_s: float
    rpc_s: float
    other_s: float
    time_to_first_token_s: float
    decode_s: float
    total_s: float
    overlapped_s: float

    def stages(self) -> dict[str, float]:
        """The parts of the time to the first token, in order, remainder included."""
        after = ("time_to_first_token_s", "decode_s", "total_s", "overlapped_s")
        return {name: value for name, value in asdict(self).items() if name not in after}


@dataclass(frozen=True, slots=True)
class PlanSettings:
    keep_basis_points: int
    chunk_tokens: int
    tail_tokens: int
    pool_tokens: int
    query_mode: str
    lookahead_tokens: int
    window_tokens: int
    lookahead_temperature: float
    lookahead_seed: int | None


@dataclass(frozen=True, slots=True)
class KeepPlan:
    """kept, forced: half-open runs of chunks. protected_spans: half-open runs of positions."""

    prompt_tokens: int
    settings: PlanSettings
    kept: tuple[tuple[int, int], ...]
    forced: tuple[tuple[int, int], ...]
    protected_head_tokens: int
    protected_spans: tuple[tuple[int, int], ...]
    selectable_chunks: int
    kept_chunks: int
    ranked_chunks: int
    kept_tokens: int
    settings_digest: str


@dataclass(frozen=True, slots=True)
class EffectiveSettings:
    mode: str
    plan: PlanSettings
    threshold_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    max_tokens: int
    settings_digest: str


@dataclass(frozen=True, slots=True)
class Started:
    request_id: str
    prompt_tokens: int
    protected_head_tokens: int
    settings: EffectiveSettings


@dataclass(frozen=True, slots=True)
class Progress:
    """phase: QUEUED, SCORE_PREFILL, SPARSE_PREFILL, DECODE, ..."""

    phase: str
    done_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    request_id: str
    finish_reason: str
    matched_stop_string: str | None
    matched_stop_token_id: int | None
    decision: Decision
    counts: TokenCounts
    timings: Timings
    settings: EffectiveSettings
    plan: KeepPlan | None


Event = Started | Progress | Delta | Finished


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole turn: the text and everything its last message said."""

    text: str
    token_ids: tuple[int, ...]
    request_id: str
    finish_reason: str
    matched_stop_string: str | None
    matched_stop_token_id: int | None
    decision: Decision
    counts: TokenCounts
    timings: Timings
    settings: EffectiveSettings
    plan: KeepPlan | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """state: PROTECTED_HEAD, FORCED, RANKED or DROPPED; positions: [start, end)."""

    chunk: int
    start: int
    end: int
    importance: float
    state: str
    text: str | None


@dataclass(frozen=True, slots=True)
class Explanation:
    request_id: str
    decision: Decision
    plan: KeepPlan | None
    chunks: tuple[Chunk, ...]
    settings: EffectiveSettings
    counts: TokenCounts
    timings: Timings


@dataclass(frozen=True, slots=True)
class ModelInfo:
    name: str
    architecture: str
    revision: str
    tokenizer_digest: str
    layers: int
    layers_used: int
    vocab_tokens: int
    positions_max: int
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class KvUsage:
    pages_total: int
    pages_free: int
    page_tokens: int
    page_bytes: int
    handles: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    version: str
    instance_id: str
    boot_id: str
    target: ModelInfo | None
    draft: ModelInfo | None
    defaults: EffectiveSettings
    target_kv: KvUsage | None
    draft_kv: KvUsage | None
    tokenizers_match: bool
    prompt_tokens_max: int
    completion_tokens_max: int


def event_from(message: gateway_pb2.GenerateResponse) -> Event | None:
    """The event of one streamed message; None for a kind this client does not know."""
    match message.WhichOneof("event"):
        case "started":
            return started_from(message.started)
        case "progress":
            phase = enum_name(types_pb2.Phase, message.progress.phase)
            return Progress(phase, message.progress.done_tokens, message.progress.total_tokens)
        case "delta":
            return Delta(message.delta.text, ids_from(message.delta.token_ids))
        case "finished":
            return finished_from(message.finished)
        case _:
            return None


def reply_from(message: gateway_pb2.CompleteResponse) -> Reply:
    finished = finished_from(message.finished)
    values = {f.name: getattr(finished, f.name) for f in fields(Finished)}
    return Reply(text=message.text, token_ids=ids_from(message.token_ids), **values)


def started_from(message: gateway_pb2.Started) -> Started:
    settings = settings_from(message.settings)
    return _copy(Started, message, settings=settings)


def finished_from(message: gateway_pb2.Finished) -> Finished:
    return _copy(
        Finished,
        message,
        finish_reason=enum_name(types_pb2.FinishReason, message.finish_reason),
        decision=decision_from(message.decision),
        counts=_copy(TokenCounts, message.counts),
        timings=_copy(Timings, message.timings),
        settings=settings_from(message.settings),
        plan=plan_from(message.plan) if message.HasField("plan") else None,
    )


def explanation_from(message: gateway_pb2.ExplainResponse) -> Explanation:
    return _copy(
        Explanation,
        message,
        decision=decision_from(message.decision),
        plan=plan_from(message.plan) if message.HasField("plan") else None,
        chunks=tuple(_chunk_from(chunk) for chunk in message.chunks),
        settings=settings_from(message.settings),
        counts=_copy(TokenCounts, message.counts),
        timings=_copy(Timings, message.timings),
    )


def info_from(message: gateway_pb2.GetServerInfoResponse) -> ServerInfo:
    def part(cls: type[T], name: str) -> T | None:
        return _copy(cls, getattr(message, name)) if message.HasField(name) else None

    return _copy(
        ServerInfo,
        message,
        target=part(ModelInfo, "target"),
        draft=part(ModelInfo, "draft"),
        defaults=settings_from(message.defaults),
        target_kv=part(KvUsage, "target_kv"),
        draft_kv=part(KvUsage, "draft_kv"),
    )


def decision_from(message: gateway_pb2.Decision) -> Decision:
    return Decision(
        enum_name(gateway_pb2.Path, message.path), enum_name(gateway_pb2.Reason, message.reason)
    )


def settings_from(message: gateway_pb2.EffectiveSettings) -> EffectiveSettings:
    return _copy(
        EffectiveSettings,
        message,
        mode=enum_name(gateway_pb2.PrefillMode, message.mode),
        plan=_plan_settings_from(message.plan),
        settings_digest=message.settings_digest.hex(),
    )


def plan_from(message: types_pb2.KeepPlan) -> KeepPlan:
    return _copy(
        KeepPlan,
        message,
        settings=_plan_settings_from(message.settings),
        kept=_chunk_runs(message.kept),
        forced=_chunk_runs(message.forced),
        protected_spans=tuple((span.start, span.end) for span in message.protected_spans),
        settings_digest=message.settings_digest.hex(),
    )


def ids_from(data: bytes) -> tuple[int, ...]:
    """Token ids from little-endian uint32."""
    ids = array.array("I")
    assert ids.itemsize == 4
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return tuple(ids)


def ids_to(token_ids: list[int]) -> bytes:
    """Little-endian uint32. Raises OverflowError for what is no uint32."""
    ids = array.array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def enum_name(enum: Any, number: int) -> str:
    """The value's name without the enum's prefix; the number if this client is too old."""
    if number not in enum.values():
        return str(number)
    names = enum.keys()
    prefix = names[0].removesuffix("UNSPECIFIED")
    return str(enum.Name(number)).removeprefix(prefix)


def _plan_settings_from(message: types_pb2.PlanSettings) -> PlanSettings:
    mode = enum_name(types_pb2.QueryMode, message.query_mode)
    return _copy(PlanSettings, message, query_mode=mode)


def _chunk_from(message: gateway_pb2.ChunkExplanation) -> Chunk:
    return Chunk(
        chunk=message.chunk,
        start=message.positions.start,
        end=message.positions.end,
        importance=message.importance,
        state=enum_name(gateway_pb2.ChunkState, message.state),
        text=message.text if message.HasField("text") else None,
    )


def _chunk_runs(runs: Any) -> tuple[tuple[int, int], ...]:
    return tuple((run.first_chunk, run.first_chunk + run.chunks) for run in runs)


def _copy(cls: type[T], message: Any, **given: Any) -> T:
    """A dataclass from the message's fields of the same names; unset optional ones are None."""
    values = {
        f.name: given[f.name] if f.name in given else _value(message, f.name)
        for f in fields(cls)  # type: ignore[arg-type]
    }
    return cls(**values)


def _value(message: Any, name: str) -> Any:
    field = message.DESCRIPTOR.fields_by_name[name]
    return getattr(message, name) if not field.has_presence or message.HasField(name) else None
