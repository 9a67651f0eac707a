from specprefill.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREFILL_MODE_UNSPECIFIED: _ClassVar[PrefillMode]
    PREFILL_MODE_AUTO: _ClassVar[PrefillMode]
    PREFILL_MODE_DENSE: _ClassVar[PrefillMode]
    PREFILL_MODE_SPARSE: _ClassVar[PrefillMode]

class Path(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PATH_UNSPECIFIED: _ClassVar[Path]
    PATH_DENSE: _ClassVar[Path]
    PATH_SPARSE: _ClassVar[Path]
    PATH_RESUMED: _ClassVar[Path]
    PATH_TOPPED_UP: _ClassVar[Path]
    PATH_RESELECTED: _ClassVar[Path]
    PATH_REPLAYED: _ClassVar[Path]

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_REQUESTED: _ClassVar[Reason]
    REASON_ELIGIBLE: _ClassVar[Reason]
    REASON_DISABLED: _ClassVar[Reason]
    REASON_BELOW_THRESHOLD: _ClassVar[Reason]
    REASON_TARGET_PREFIX_WARM: _ClassVar[Reason]
    REASON_COST_MODEL: _ClassVar[Reason]
    REASON_PROTECTED_EXCEEDS_BUDGET: _ClassVar[Reason]
    REASON_PROMPT_EXCEEDS_DRAFT: _ClassVar[Reason]
    REASON_SCORER_UNAVAILABLE: _ClassVar[Reason]
    REASON_SCORER_ERROR: _ClassVar[Reason]
    REASON_TOKENIZER_MISMATCH: _ClassVar[Reason]
    REASON_UNSUPPORTED_MODEL: _ClassVar[Reason]

class ChunkState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHUNK_STATE_UNSPECIFIED: _ClassVar[ChunkState]
    CHUNK_STATE_PROTECTED_HEAD: _ClassVar[ChunkState]
    CHUNK_STATE_FORCED: _ClassVar[ChunkState]
    CHUNK_STATE_RANKED: _ClassVar[ChunkState]
    CHUNK_STATE_DROPPED: _ClassVar[ChunkState]
PREFILL_MODE_UNSPECIFIED: PrefillMode
PREFILL_MODE_AUTO: PrefillMode
PREFILL_MODE_DENSE: PrefillMode
PREFILL_MODE_SPARSE: PrefillMode
PATH_UNSPECIFIED: Path
PATH_DENSE: Path
PATH_SPARSE: Path
PATH_RESUMED: Path
PATH_TOPPED_UP: Path
PATH_RESELECTED: Path
PATH_REPLAYED: Path
REASON_UNSPECIFIED: Reason
REASON_REQUESTED: Reason
REASON_ELIGIBLE: Reason
REASON_DISABLED: Reason
REASON_BELOW_THRESHOLD: Reason
REASON_TARGET_PREFIX_WARM: Reason
REASON_COST_MODEL: Reason
REASON_PROTECTED_EXCEEDS_BUDGET: Reason
REASON_PROMPT_EXCEEDS_DRAFT: Reason
REASON_SCORER_UNAVAILABLE: Reason
REASON_SCORER_ERROR: Reason
REASON_TOKENIZER_MISMATCH: Reason
REASON_UNSUPPORTED_MODEL: Reason
CHUNK_STATE_UNSPECIFIED: ChunkState
CHUNK_STATE_PROTECTED_HEAD: ChunkState
CHUNK_STATE_FORCED: ChunkState
CHUNK_STATE_RANKED: ChunkState
CHUNK_STATE_DROPPED: ChunkState

class Message(_message.Message):
    __slots__ = ("role", "content", "name", "tool_call_id", "tool_calls_json")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_JSON_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    tool_call_id: str
    tool_calls_json: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., tool_call_id: _Optional[str] = ..., tool_calls_json: _Optional[str] = ...) -> None: ...

class Conversation(_message.Message):
    __slots__ = ("messages", "tools_json")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    tools_json: str
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., tools_json: _Optional[str] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("conversation", "text", "token_ids")
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    conversation: Conversation
    text: str
    token_ids: bytes
    def __init__(self, conversation: _Optional[_Union[Conversation, _Mapping]] = ..., text: _Optional[str] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class PrefillOptions(_message.Message):
    __slots__ = ("mode", "keep_basis_points", "chunk_tokens", "tail_tokens", "query_mode", "lookahead_tokens", "window_tokens", "lookahead_temperature", "lookahead_seed", "protected_spans")
    MODE_FIELD_NUMBER: _ClassVar[int]
    KEEP_BASIS_POINTS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TAIL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUERY_MODE_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_SEED_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_SPANS_FIELD_NUMBER: _ClassVar[int]
    mode: PrefillMode
    keep_basis_points: int
    chunk_tokens: int
    tail_tokens: int
    query_mode: _types_pb2.QueryMode
    lookahead_tokens: int
    window_tokens: int
    lookahead_temperature: float
    lookahead_seed: int
    protected_spans: _containers.RepeatedCompositeFieldContainer[_types_pb2.PositionSpan]
    def __init__(self, mode: _Optional[_Union[PrefillMode, str]] = ..., keep_basis_points: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., tail_tokens: _Optional[int] = ..., query_mode: _Optional[_Union[_types_pb2.QueryMode, str]] = ..., lookahead_tokens: _Optional[int] = ..., window_tokens: _Optional[int] = ..., lookahead_temperature: _Optional[float] = ..., lookahead_seed: _Optional[int] = ..., protected_spans: _Optional[_Iterable[_Union[_types_pb2.PositionSpan, _Mapping]]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt", "sampling", "stop", "prefill")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: Prompt
    sampling: _types_pb2.SamplingParams
    stop: _types_pb2.StopConditions
    prefill: PrefillOptions
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[_types_pb2.StopConditions, _Mapping]] = ..., prefill: _Optional[_Union[PrefillOptions, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "progress", "delta", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    progress: _types_pb2.Progress
    delta: Delta
    finished: Finished
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., progress: _Optional[_Union[_types_pb2.Progress, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "prompt_tokens", "protected_head_tokens", "settings")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_HEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_tokens: int
    protected_head_tokens: int
    settings: EffectiveSettings
    def __init__(self, request_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., protected_head_tokens: _Optional[int] = ..., settings: _Optional[_Union[EffectiveSettings, _Mapping]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("text", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: bytes
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("request_id", "finish_reason", "matched_stop_string", "matched_stop_token_id", "decision", "counts", "timings", "settings", "plan")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    finish_reason: _types_pb2.FinishReason
    matched_stop_string: str
    matched_stop_token_id: int
    decision: Decision
    counts: TokenCounts
    timings: Timings
    settings: EffectiveSettings
    plan: _types_pb2.KeepPlan
    def __init__(self, request_id: _Optional[str] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., matched_stop_string: _Optional[str] = ..., matched_stop_token_id: _Optional[int] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ..., counts: _Optional[_Union[TokenCounts, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., settings: _Optional[_Union[EffectiveSettings, _Mapping]] = ..., plan: _Optional[_Union[_types_pb2.KeepPlan, _Mapping]] = ...) -> None: ...

class CompleteRequest(_message.Message):
    __slots__ = ("request_id", "prompt", "sampling", "stop", "prefill")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: Prompt
    sampling: _types_pb2.SamplingParams
    stop: _types_pb2.StopConditions
    prefill: PrefillOptions
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[_types_pb2.StopConditions, _Mapping]] = ..., prefill: _Optional[_Union[PrefillOptions, _Mapping]] = ...) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ("text", "token_ids", "started", "finished")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: bytes
    started: Started
    finished: Finished
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("path", "reason")
    PATH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    path: Path
    reason: Reason
    def __init__(self, path: _Optional[_Union[Path, str]] = ..., reason: _Optional[_Union[Reason, str]] = ...) -> None: ...

class EffectiveSettings(_message.Message):
    __slots__ = ("mode", "plan", "threshold_tokens", "temperature", "top_k", "top_p", "seed", "max_tokens", "settings_digest")
    MODE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    mode: PrefillMode
    plan: _types_pb2.PlanSettings
    threshold_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    max_tokens: int
    settings_digest: bytes
    def __init__(self, mode: _Optional[_Union[PrefillMode, str]] = ..., plan: _Optional[_Union[_types_pb2.PlanSettings, _Mapping]] = ..., threshold_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., settings_digest: _Optional[bytes] = ...) -> None: ...

class TokenCounts(_message.Message):
    __slots__ = ("prompt_tokens", "protected_head_tokens", "target_dense_restored_tokens", "target_sparse_restored_tokens", "draft_restored_tokens", "draft_prefilled_tokens", "scored_tokens", "selected_tokens", "executed_tokens", "completion_tokens", "queries")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_HEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_DENSE_RESTORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_SPARSE_RESTORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_RESTORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SELECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXECUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
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
    def __init__(self, prompt_tokens: _Optional[int] = ..., protected_head_tokens: _Optional[int] = ..., target_dense_restored_tokens: _Optional[int] = ..., target_sparse_restored_tokens: _Optional[int] = ..., draft_restored_tokens: _Optional[int] = ..., draft_prefilled_tokens: _Optional[int] = ..., scored_tokens: _Optional[int] = ..., selected_tokens: _Optional[int] = ..., executed_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., queries: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_s", "tokenise_s", "look_up_s", "plan_s", "score_restore_s", "score_prefill_s", "score_queries_s", "score_k_pass_s", "score_select_s", "target_restore_s", "protected_prefill_s", "sparse_prefill_s", "dense_prefill_s", "kick_off_s", "rpc_s", "other_s", "time_to_first_token_s", "decode_s", "total_s", "overlapped_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    TOKENISE_S_FIELD_NUMBER: _ClassVar[int]
    LOOK_UP_S_FIELD_NUMBER: _ClassVar[int]
    PLAN_S_FIELD_NUMBER: _ClassVar[int]
    SCORE_RESTORE_S_FIELD_NUMBER: _ClassVar[int]
    SCORE_PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    SCORE_QUERIES_S_FIELD_NUMBER: _ClassVar[int]
    SCORE_K_PASS_S_FIELD_NUMBER: _ClassVar[int]
    SCORE_SELECT_S_FIELD_NUMBER: _ClassVar[int]
    TARGET_RESTORE_S_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    SPARSE_PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DENSE_PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    KICK_OFF_S_FIELD_NUMBER: _ClassVar[int]
    RPC_S_FIELD_NUMBER: _ClassVar[int]
    OTHER_S_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    OVERLAPPED_S_FIELD_NUMBER: _ClassVar[int]
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
    def __init__(self, queue_s: _Optional[float] = ..., tokenise_s: _Optional[float] = ..., look_up_s: _Optional[float] = ..., plan_s: _Optional[float] = ..., score_restore_s: _Optional[float] = ..., score_prefill_s: _Optional[float] = ..., score_queries_s: _Optional[float] = ..., score_k_pass_s: _Optional[float] = ..., score_select_s: _Optional[float] = ..., target_restore_s: _Optional[float] = ..., protected_prefill_s: _Optional[float] = ..., sparse_prefill_s: _Optional[float] = ..., dense_prefill_s: _Optional[float] = ..., kick_off_s: _Optional[float] = ..., rpc_s: _Optional[float] = ..., other_s: _Optional[float] = ..., time_to_first_token_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., total_s: _Optional[float] = ..., overlapped_s: _Optional[float] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id", "prompt", "prefill", "include_text")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_TEXT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: Prompt
    prefill: PrefillOptions
    include_text: bool
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., prefill: _Optional[_Union[PrefillOptions, _Mapping]] = ..., include_text: _Optional[bool] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("request_id", "decision", "plan", "chunks", "settings", "counts", "timings")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    decision: Decision
    plan: _types_pb2.KeepPlan
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkExplanation]
    settings: EffectiveSettings
    counts: TokenCounts
    timings: Timings
    def __init__(self, request_id: _Optional[str] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ..., plan: _Optional[_Union[_types_pb2.KeepPlan, _Mapping]] = ..., chunks: _Optional[_Iterable[_Union[ChunkExplanation, _Mapping]]] = ..., settings: _Optional[_Union[EffectiveSettings, _Mapping]] = ..., counts: _Optional[_Union[TokenCounts, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ...) -> None: ...

class ChunkExplanation(_message.Message):
    __slots__ = ("chunk", "positions", "importance", "state", "text")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    IMPORTANCE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    positions: _types_pb2.PositionSpan
    importance: float
    state: ChunkState
    text: str
    def __init__(self, chunk: _Optional[int] = ..., positions: _Optional[_Union[_types_pb2.PositionSpan, _Mapping]] = ..., importance: _Optional[float] = ..., state: _Optional[_Union[ChunkState, str]] = ..., text: _Optional[str] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "instance_id", "boot_id", "target", "draft", "defaults", "target_kv", "draft_kv", "tokenizers_match", "prompt_tokens_max", "completion_tokens_max")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    TARGET_KV_FIELD_NUMBER: _ClassVar[int]
    DRAFT_KV_FIELD_NUMBER: _ClassVar[int]
    TOKENIZERS_MATCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    version: str
    instance_id: str
    boot_id: str
    target: _types_pb2.ModelInfo
    draft: _types_pb2.ModelInfo
    defaults: EffectiveSettings
    target_kv: _types_pb2.KvUsage
    draft_kv: _types_pb2.KvUsage
    tokenizers_match: bool
    prompt_tokens_max: int
    completion_tokens_max: int
    def __init__(self, version: _Optional[str] = ..., instance_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., target: _Optional[_Union[_types_pb2.ModelInfo, _Mapping]] = ..., draft: _Optional[_Union[_types_pb2.ModelInfo, _Mapping]] = ..., defaults: _Optional[_Union[EffectiveSettings, _Mapping]] = ..., target_kv: _Optional[_Union[_types_pb2.KvUsage, _Mapping]] = ..., draft_kv: _Optional[_Union[_types_pb2.KvUsage, _Mapping]] = ..., tokenizers_match: _Optional[bool] = ..., prompt_tokens_max: _Optional[int] = ..., completion_tokens_max: _Optional[int] = ...) -> None: ...
