from specprefill.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TargetGenerateRequest(_message.Message):
    __slots__ = ("request_id", "instance_id", "handle", "prompt_token_ids", "base", "plan", "protected_head_tokens", "protected_spans", "sampling", "stop", "retain", "lease_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_HEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_SPANS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    RETAIN_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    instance_id: str
    handle: str
    prompt_token_ids: bytes
    base: _types_pb2.Base
    plan: _types_pb2.KeepPlan
    protected_head_tokens: int
    protected_spans: _containers.RepeatedCompositeFieldContainer[_types_pb2.PositionSpan]
    sampling: _types_pb2.SamplingParams
    stop: _types_pb2.StopConditions
    retain: bool
    lease_s: float
    def __init__(self, request_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., handle: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., base: _Optional[_Union[_types_pb2.Base, _Mapping]] = ..., plan: _Optional[_Union[_types_pb2.KeepPlan, _Mapping]] = ..., protected_head_tokens: _Optional[int] = ..., protected_spans: _Optional[_Iterable[_Union[_types_pb2.PositionSpan, _Mapping]]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[_types_pb2.StopConditions, _Mapping]] = ..., retain: _Optional[bool] = ..., lease_s: _Optional[float] = ...) -> None: ...

class TargetGenerateResponse(_message.Message):
    __slots__ = ("started", "progress", "tokens", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: TargetStarted
    progress: _types_pb2.Progress
    tokens: TargetTokens
    finished: TargetFinished
    def __init__(self, started: _Optional[_Union[TargetStarted, _Mapping]] = ..., progress: _Optional[_Union[_types_pb2.Progress, _Mapping]] = ..., tokens: _Optional[_Union[TargetTokens, _Mapping]] = ..., finished: _Optional[_Union[TargetFinished, _Mapping]] = ...) -> None: ...

class TargetStarted(_message.Message):
    __slots__ = ("boot_id", "restored_tokens")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    RESTORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    restored_tokens: int
    def __init__(self, boot_id: _Optional[str] = ..., restored_tokens: _Optional[int] = ...) -> None: ...

class TargetTokens(_message.Message):
    __slots__ = ("token_ids", "first_token_timings")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_TIMINGS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    first_token_timings: TargetTimings
    def __init__(self, token_ids: _Optional[bytes] = ..., first_token_timings: _Optional[_Union[TargetTimings, _Mapping]] = ...) -> None: ...

class TargetFinished(_message.Message):
    __slots__ = ("finish_reason", "matched_stop_string", "matched_stop_token_id", "counts", "timings", "boot_id", "positions", "slots", "sparse")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _types_pb2.FinishReason
    matched_stop_string: str
    matched_stop_token_id: int
    counts: TargetCounts
    timings: TargetTimings
    boot_id: str
    positions: int
    slots: int
    sparse: bool
    def __init__(self, finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., matched_stop_string: _Optional[str] = ..., matched_stop_token_id: _Optional[int] = ..., counts: _Optional[_Union[TargetCounts, _Mapping]] = ..., timings: _Optional[_Union[TargetTimings, _Mapping]] = ..., boot_id: _Optional[str] = ..., positions: _Optional[int] = ..., slots: _Optional[int] = ..., sparse: _Optional[bool] = ...) -> None: ...

class TargetCounts(_message.Message):
    __slots__ = ("prompt_tokens", "dense_restored_tokens", "sparse_restored_tokens", "executed_tokens", "protected_executed_tokens", "completion_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DENSE_RESTORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPARSE_RESTORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXECUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_EXECUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    dense_restored_tokens: int
    sparse_restored_tokens: int
    executed_tokens: int
    protected_executed_tokens: int
    completion_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., dense_restored_tokens: _Optional[int] = ..., sparse_restored_tokens: _Optional[int] = ..., executed_tokens: _Optional[int] = ..., protected_executed_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class TargetTimings(_message.Message):
    __slots__ = ("queue_s", "restore_s", "protected_prefill_s", "sparse_prefill_s", "dense_prefill_s", "kick_off_s", "first_token_s", "decode_s", "total_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    RESTORE_S_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    SPARSE_PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DENSE_PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    KICK_OFF_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    restore_s: float
    protected_prefill_s: float
    sparse_prefill_s: float
    dense_prefill_s: float
    kick_off_s: float
    first_token_s: float
    decode_s: float
    total_s: float
    def __init__(self, queue_s: _Optional[float] = ..., restore_s: _Optional[float] = ..., protected_prefill_s: _Optional[float] = ..., sparse_prefill_s: _Optional[float] = ..., dense_prefill_s: _Optional[float] = ..., kick_off_s: _Optional[float] = ..., first_token_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., total_s: _Optional[float] = ...) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("instance_id", "base", "position", "handle", "lease_s")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    base: _types_pb2.Base
    position: int
    handle: str
    lease_s: float
    def __init__(self, instance_id: _Optional[str] = ..., base: _Optional[_Union[_types_pb2.Base, _Mapping]] = ..., position: _Optional[int] = ..., handle: _Optional[str] = ..., lease_s: _Optional[float] = ...) -> None: ...

class ForkResponse(_message.Message):
    __slots__ = ("positions", "slots", "boot_id")
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    positions: int
    slots: int
    boot_id: str
    def __init__(self, positions: _Optional[int] = ..., slots: _Optional[int] = ..., boot_id: _Optional[str] = ...) -> None: ...

class TargetReleaseRequest(_message.Message):
    __slots__ = ("instance_id", "handles")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    handles: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, instance_id: _Optional[str] = ..., handles: _Optional[_Iterable[str]] = ...) -> None: ...

class TargetReleaseResponse(_message.Message):
    __slots__ = ("released", "freed_bytes", "boot_id")
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    released: int
    freed_bytes: int
    boot_id: str
    def __init__(self, released: _Optional[int] = ..., freed_bytes: _Optional[int] = ..., boot_id: _Optional[str] = ...) -> None: ...

class TargetGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TargetGetInfoResponse(_message.Message):
    __slots__ = ("version", "boot_id", "model", "kv", "prefill_chunk_tokens")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    version: str
    boot_id: str
    model: _types_pb2.ModelInfo
    kv: _types_pb2.KvUsage
    prefill_chunk_tokens: int
    def __init__(self, version: _Optional[str] = ..., boot_id: _Optional[str] = ..., model: _Optional[_Union[_types_pb2.ModelInfo, _Mapping]] = ..., kv: _Optional[_Union[_types_pb2.KvUsage, _Mapping]] = ..., prefill_chunk_tokens: _Optional[int] = ...) -> None: ...
