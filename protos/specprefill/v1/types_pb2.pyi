from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class QueryMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUERY_MODE_UNSPECIFIED: _ClassVar[QueryMode]
    QUERY_MODE_LOOKAHEAD: _ClassVar[QueryMode]
    QUERY_MODE_TAIL_WINDOW: _ClassVar[QueryMode]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_END_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_STOP_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_STOP_STRING: _ClassVar[FinishReason]
    FINISH_REASON_MAX_TOKENS: _ClassVar[FinishReason]
    FINISH_REASON_CONTEXT_END: _ClassVar[FinishReason]

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_QUEUED: _ClassVar[Phase]
    PHASE_SCORE_PREFILL: _ClassVar[Phase]
    PHASE_SCORE_QUERIES: _ClassVar[Phase]
    PHASE_SCORE_K_PASS: _ClassVar[Phase]
    PHASE_SCORE_SELECT: _ClassVar[Phase]
    PHASE_PROTECTED_PREFILL: _ClassVar[Phase]
    PHASE_SPARSE_PREFILL: _ClassVar[Phase]
    PHASE_DENSE_PREFILL: _ClassVar[Phase]
    PHASE_DECODE: _ClassVar[Phase]
QUERY_MODE_UNSPECIFIED: QueryMode
QUERY_MODE_LOOKAHEAD: QueryMode
QUERY_MODE_TAIL_WINDOW: QueryMode
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_END_TOKEN: FinishReason
FINISH_REASON_STOP_TOKEN: FinishReason
FINISH_REASON_STOP_STRING: FinishReason
FINISH_REASON_MAX_TOKENS: FinishReason
FINISH_REASON_CONTEXT_END: FinishReason
PHASE_UNSPECIFIED: Phase
PHASE_QUEUED: Phase
PHASE_SCORE_PREFILL: Phase
PHASE_SCORE_QUERIES: Phase
PHASE_SCORE_K_PASS: Phase
PHASE_SCORE_SELECT: Phase
PHASE_PROTECTED_PREFILL: Phase
PHASE_SPARSE_PREFILL: Phase
PHASE_DENSE_PREFILL: Phase
PHASE_DECODE: Phase

class PositionSpan(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class ChunkRun(_message.Message):
    __slots__ = ("first_chunk", "chunks")
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    first_chunk: int
    chunks: int
    def __init__(self, first_chunk: _Optional[int] = ..., chunks: _Optional[int] = ...) -> None: ...

class PlanSettings(_message.Message):
    __slots__ = ("keep_basis_points", "chunk_tokens", "tail_tokens", "pool_tokens", "query_mode", "lookahead_tokens", "window_tokens", "lookahead_temperature", "lookahead_seed")
    KEEP_BASIS_POINTS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TAIL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUERY_MODE_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_SEED_FIELD_NUMBER: _ClassVar[int]
    keep_basis_points: int
    chunk_tokens: int
    tail_tokens: int
    pool_tokens: int
    query_mode: QueryMode
    lookahead_tokens: int
    window_tokens: int
    lookahead_temperature: float
    lookahead_seed: int
    def __init__(self, keep_basis_points: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., tail_tokens: _Optional[int] = ..., pool_tokens: _Optional[int] = ..., query_mode: _Optional[_Union[QueryMode, str]] = ..., lookahead_tokens: _Optional[int] = ..., window_tokens: _Optional[int] = ..., lookahead_temperature: _Optional[float] = ..., lookahead_seed: _Optional[int] = ...) -> None: ...

class KeepPlan(_message.Message):
    __slots__ = ("prompt_tokens", "settings", "kept", "forced", "protected_head_tokens", "protected_spans", "selectable_chunks", "kept_chunks", "ranked_chunks", "kept_tokens", "settings_digest")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_HEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_SPANS_FIELD_NUMBER: _ClassVar[int]
    SELECTABLE_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    KEPT_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    RANKED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    settings: PlanSettings
    kept: _containers.RepeatedCompositeFieldContainer[ChunkRun]
    forced: _containers.RepeatedCompositeFieldContainer[ChunkRun]
    protected_head_tokens: int
    protected_spans: _containers.RepeatedCompositeFieldContainer[PositionSpan]
    selectable_chunks: int
    kept_chunks: int
    ranked_chunks: int
    kept_tokens: int
    settings_digest: bytes
    def __init__(self, prompt_tokens: _Optional[int] = ..., settings: _Optional[_Union[PlanSettings, _Mapping]] = ..., kept: _Optional[_Iterable[_Union[ChunkRun, _Mapping]]] = ..., forced: _Optional[_Iterable[_Union[ChunkRun, _Mapping]]] = ..., protected_head_tokens: _Optional[int] = ..., protected_spans: _Optional[_Iterable[_Union[PositionSpan, _Mapping]]] = ..., selectable_chunks: _Optional[int] = ..., kept_chunks: _Optional[int] = ..., ranked_chunks: _Optional[int] = ..., kept_tokens: _Optional[int] = ..., settings_digest: _Optional[bytes] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "seed")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...

class StopConditions(_message.Message):
    __slots__ = ("max_tokens", "stop_strings", "stop_token_ids", "ignore_end_tokens")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_END_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    stop_strings: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: bytes
    ignore_end_tokens: bool
    def __init__(self, max_tokens: _Optional[int] = ..., stop_strings: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[bytes] = ..., ignore_end_tokens: _Optional[bool] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("phase", "done_tokens", "total_tokens")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DONE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    phase: Phase
    done_tokens: int
    total_tokens: int
    def __init__(self, phase: _Optional[_Union[Phase, str]] = ..., done_tokens: _Optional[int] = ..., total_tokens: _Optional[int] = ...) -> None: ...

class Base(_message.Message):
    __slots__ = ("handle", "tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: str
    tokens: int
    def __init__(self, handle: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "architecture", "revision", "tokenizer_digest", "layers", "layers_used", "vocab_tokens", "positions_max", "dtype", "device")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_USED_FIELD_NUMBER: _ClassVar[int]
    VOCAB_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_MAX_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
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
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., revision: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., layers: _Optional[int] = ..., layers_used: _Optional[int] = ..., vocab_tokens: _Optional[int] = ..., positions_max: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ...) -> None: ...

class KvUsage(_message.Message):
    __slots__ = ("pages_total", "pages_free", "page_tokens", "page_bytes", "handles")
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    pages_total: int
    pages_free: int
    page_tokens: int
    page_bytes: int
    handles: int
    def __init__(self, pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., page_tokens: _Optional[int] = ..., page_bytes: _Optional[int] = ..., handles: _Optional[int] = ...) -> None: ...
