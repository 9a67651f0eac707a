from specprefill.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScoreRequest(_message.Message):
    __slots__ = ("request_id", "instance_id", "prompt_token_ids", "settings", "protected_head_tokens", "protected_spans", "base", "keep_handle", "lease_s", "include_importance")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_HEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_SPANS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    KEEP_HANDLE_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_IMPORTANCE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    instance_id: str
    prompt_token_ids: bytes
    settings: _types_pb2.PlanSettings
    protected_head_tokens: int
    protected_spans: _containers.RepeatedCompositeFieldContainer[_types_pb2.PositionSpan]
    base: _types_pb2.Base
    keep_handle: str
    lease_s: float
    include_importance: bool
    def __init__(self, request_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., settings: _Optional[_Union[_types_pb2.PlanSettings, _Mapping]] = ..., protected_head_tokens: _Optional[int] = ..., protected_spans: _Optional[_Iterable[_Union[_types_pb2.PositionSpan, _Mapping]]] = ..., base: _Optional[_Union[_types_pb2.Base, _Mapping]] = ..., keep_handle: _Optional[str] = ..., lease_s: _Optional[float] = ..., include_importance: _Optional[bool] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("progress", "result")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    progress: _types_pb2.Progress
    result: ScoreResult
    def __init__(self, progress: _Optional[_Union[_types_pb2.Progress, _Mapping]] = ..., result: _Optional[_Union[ScoreResult, _Mapping]] = ...) -> None: ...

class ScoreResult(_message.Message):
    __slots__ = ("plan", "chunk_importance", "counts", "timings", "boot_id", "kept")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_IMPORTANCE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    plan: _types_pb2.KeepPlan
    chunk_importance: bytes
    counts: ScoreCounts
    timings: ScoreTimings
    boot_id: str
    kept: _types_pb2.Base
    def __init__(self, plan: _Optional[_Union[_types_pb2.KeepPlan, _Mapping]] = ..., chunk_importance: _Optional[bytes] = ..., counts: _Optional[_Union[ScoreCounts, _Mapping]] = ..., timings: _Optional[_Union[ScoreTimings, _Mapping]] = ..., boot_id: _Optional[str] = ..., kept: _Optional[_Union[_types_pb2.Base, _Mapping]] = ...) -> None: ...

class ScoreCounts(_message.Message):
    __slots__ = ("prompt_tokens", "restored_tokens", "prefilled_tokens", "queries")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    restored_tokens: int
    prefilled_tokens: int
    queries: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., restored_tokens: _Optional[int] = ..., prefilled_tokens: _Optional[int] = ..., queries: _Optional[int] = ...) -> None: ...

class ScoreTimings(_message.Message):
    __slots__ = ("queue_s", "restore_s", "prefill_s", "queries_s", "k_pass_s", "select_s", "total_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    RESTORE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    QUERIES_S_FIELD_NUMBER: _ClassVar[int]
    K_PASS_S_FIELD_NUMBER: _ClassVar[int]
    SELECT_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    restore_s: float
    prefill_s: float
    queries_s: float
    k_pass_s: float
    select_s: float
    total_s: float
    def __init__(self, queue_s: _Optional[float] = ..., restore_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., queries_s: _Optional[float] = ..., k_pass_s: _Optional[float] = ..., select_s: _Optional[float] = ..., total_s: _Optional[float] = ...) -> None: ...

class ScorerReleaseRequest(_message.Message):
    __slots__ = ("instance_id", "handles")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    handles: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, instance_id: _Optional[str] = ..., handles: _Optional[_Iterable[str]] = ...) -> None: ...

class ScorerReleaseResponse(_message.Message):
    __slots__ = ("released", "freed_bytes", "boot_id")
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    released: int
    freed_bytes: int
    boot_id: str
    def __init__(self, released: _Optional[int] = ..., freed_bytes: _Optional[int] = ..., boot_id: _Optional[str] = ...) -> None: ...

class ScorerGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScorerGetInfoResponse(_message.Message):
    __slots__ = ("version", "boot_id", "model", "kv", "default_query_mode", "lookahead_tokens_max", "window_tokens_max", "head_set")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_QUERY_MODE_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    HEAD_SET_FIELD_NUMBER: _ClassVar[int]
    version: str
    boot_id: str
    model: _types_pb2.ModelInfo
    kv: _types_pb2.KvUsage
    default_query_mode: _types_pb2.QueryMode
    lookahead_tokens_max: int
    window_tokens_max: int
    head_set: str
    def __init__(self, version: _Optional[str] = ..., boot_id: _Optional[str] = ..., model: _Optional[_Union[_types_pb2.ModelInfo, _Mapping]] = ..., kv: _Optional[_Union[_types_pb2.KvUsage, _Mapping]] = ..., default_query_mode: _Optional[_Union[_types_pb2.QueryMode, str]] = ..., lookahead_tokens_max: _Optional[int] = ..., window_tokens_max: _Optional[int] = ..., head_set: _Optional[str] = ...) -> None: ...
