"""Errors a caller can cause or must react to. Imports nothing; serving/status.py knows gRPC.

ServiceError
  InvalidRequest            the request itself is wrong: fix it, do not retry
    MalformedRequest        the bytes are no message of this type, or no UTF-8
    ContextLengthExceeded   the prompt (and its reply) do not fit the model's positions
  HandleNotFound            no such handle
    KvEvicted               the handle was valid once; its state is gone: prefill again
  AlreadyExists             the handle or request id is taken
  WrongState                the state does not allow this: fix the state first
    BaseMismatch            the declared base is not what the service holds
    PlanRejected            the keep plan does not fit the request
    TokenizerMismatch       draft and target do not share a tokenizer
    ProtectedExceedsBudget  what must be kept leaves nothing to rank at this keep rate
    PromptExceedsDraft      the draft has not enough positions for this prompt
  Conflict                  somebody else is at it: retry the whole operation
  ResourceExhausted         a bound was reached: retry later
    QueueFull               too many requests wait
    KvCacheFull             no page is free
    SlowConsumer            the reader does not keep up with its own stream
  Unauthenticated           no or a wrong credential
  Unavailable               not now: loading, draining or a peer is gone; retry with backoff
    UpstreamUnavailable     a service behind this one is gone
    StreamInterrupted       a service went away after the first token
  DeadlineExceeded          the caller's time is over
  NonFiniteImportance       the draft produced NaN or infinity
  InternalError             a bug; the text is an incident id
"""

from __future__ import annotations

from collections.abc import Mapping


class ServiceError(Exception):
    """Base of everything below. `message` goes to the caller: no path, prompt or stack in it.

    reason: stable upper-case word for programs. field: the request field that is wrong, if one is.
    metadata: limits and values, as text. retry_after_s: how long to wait, where waiting helps.
    """

    reason = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s


class InvalidRequest(ServiceError):
    reason = "INVALID_FIELD"


class MalformedRequest(InvalidRequest):
    reason = "MALFORMED_REQUEST"


class ContextLengthExceeded(InvalidRequest):
    reason = "CONTEXT_LENGTH_EXCEEDED"


class HandleNotFound(ServiceError):
    reason = "HANDLE_NOT_FOUND"


class KvEvicted(HandleNotFound):
    reason = "KV_EVICTED"


class AlreadyExists(ServiceError):
    reason = "ALREADY_EXISTS"


class WrongState(ServiceError):
    reason = "WRONG_STATE"


class BaseMismatch(WrongState):
    reason = "BASE_MISMATCH"


class PlanRejected(WrongState):
    reason = "PLAN_REJECTED"


class TokenizerMismatch(WrongState):
    reason = "TOKENIZER_MISMATCH"


class ProtectedExceedsBudget(WrongState):
    reason = "PROTECTED_EXCEEDS_BUDGET"


class PromptExceedsDraft(WrongState):
    reason = "PROMPT_EXCEEDS_DRAFT"


class Conflict(ServiceError):
    reason = "CONFLICT"


class ResourceExhausted(ServiceError):
    reason = "RESOURCE_EXHAUSTED"


class QueueFull(ResourceExhausted):
    reason = "QUEUE_FULL"


class KvCacheFull(ResourceExhausted):
    reason = "KV_CACHE_FULL"


class SlowConsumer(ResourceExhausted):
    reason = "SLOW_CONSUMER"


class Unauthenticated(ServiceError):
    reason = "UNAUTHENTICATED"


class Unavailable(ServiceError):
    reason = "UNAVAILABLE"


class UpstreamUnavailable(Unavailable):
    reason = "UPSTREAM_UNAVAILABLE"


class StreamInterrupted(Unavailable):
    reason = "STREAM_INTERRUPTED"


class DeadlineExceeded(ServiceError):
    reason = "DEADLINE_EXCEEDED"


class NonFiniteImportance(ServiceError):
    reason = "NON_FINITE_IMPORTANCE"


class InternalError(ServiceError):
    reason = "INTERNAL"
