"""The one table between our errors and gRPC statuses, and both directions through it.

A status carries google.rpc details: ErrorInfo (reason, domain, class, request id, limits),
BadRequest for a wrong field, RetryInfo where waiting helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from serving import errors
from serving.errors import ServiceError

DOMAIN = "specprefill"
DETAILS_KEY = "grpc-status-details-bin"
REQUEST_ID_KEY = "x-request-id"
# The transport refuses trailing metadata over 8 KiB, and the status with it. The message travels
# three times, once with three characters a byte; the rest as base64.
MESSAGE_BYTES_MAX = 512
NAME_BYTES_MAX = 64
VALUE_BYTES_MAX = 128
METADATA_ENTRIES_MAX = 8

# The nearest base class decides.
TABLE: Mapping[type[ServiceError], grpc.StatusCode] = {
    ServiceError: grpc.StatusCode.INTERNAL,
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.HandleNotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.WrongState: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Conflict: grpc.StatusCode.ABORTED,
    errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.NonFiniteImportance: grpc.StatusCode.INTERNAL,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}
STATUS_CODES: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def _tree(root: type[ServiceError]) -> Iterator[type[ServiceError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _tree(child)


CLASSES: Mapping[str, type[ServiceError]] = {cls.__name__: cls for cls in _tree(ServiceError)}


def code_of(error: ServiceError) -> grpc.StatusCode:
    """The gRPC code of an error's class, or of its nearest base in the table."""
    return next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)


def to_status(error: ServiceError, request_id: str | None) -> status_pb2.Status:
    """The google.rpc.Status of an error; long texts are cut, so that it fits trailing metadata."""
    message = _cut(error.message, MESSAGE_BYTES_MAX)
    status = status_pb2.Status(code=code_of(error).value[0], message=message)
    status.details.append(_packed(_error_info(error, request_id)))
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(error.field, VALUE_BYTES_MAX), description=message
        )
        status.details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.append(_packed(retry))
    return status


def trailing_metadata(
    status: status_pb2.Status, request_id: str | None
) -> tuple[tuple[str, str | bytes], ...]:
    """What travels beside code and message: the details, and the request id in plain text."""
    details = (DETAILS_KEY, status.SerializeToString())
    return (details,) if request_id is None else (details, (REQUEST_ID_KEY, request_id))


def raised(error: grpc.RpcError) -> ServiceError:
    """The error that the called service raised, as the same class; use as `raise raised(e) from e`.

    error: an AioRpcError, or the sync RpcError that is also a call. The result's metadata has the
    request_id, if the service sent one. Without our details UNAVAILABLE and CANCELLED are
    UpstreamUnavailable; DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED and UNAUTHENTICATED are what they
    say; all else is InternalError.
    """
    status = _details_of(error)
    if status is not None:
        info = _detail(status, error_details_pb2.ErrorInfo())
        if info is not None and info.domain == DOMAIN and _known_class(info) is not None:
            return _rebuilt(status, info)
    return _without_details(error)


def _error_info(error: ServiceError, request_id: str | None) -> error_details_pb2.ErrorInfo:
    entries = list(error.metadata.items())[:METADATA_ENTRIES_MAX]
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    for key, value in entries:
        info.metadata[_cut(key, NAME_BYTES_MAX)] = _cut(value, VALUE_BYTES_MAX)
    # A service's own subclass travels as the nearest class that every caller knows.
    info.metadata["class"] = next(
        cls.__name__ for cls in type(error).__mro__ if CLASSES.get(cls.__name__) is cls
    )
    if request_id is not None:
        info.metadata["request_id"] = request_id
    return info


def _cut(text: str, bytes_max: int) -> str:
    return text.encode("utf-8", errors="replace")[:bytes_max].decode("utf-8", errors="ignore")


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _details_of(error: grpc.RpcError) -> status_pb2.Status | None:
    metadata = error.trailing_metadata() if isinstance(error, grpc.Call) else _aio_metadata(error)
    for key, value in metadata or ():
        if key == DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def _aio_metadata(error: grpc.RpcError) -> Any:
    return error.trailing_metadata() if isinstance(error, grpc.aio.AioRpcError) else ()


def _detail(status: status_pb2.Status, empty: Any) -> Any:
    """The first detail of the type of `empty`, parsed into it; None without one."""
    for packed in status.details:
        if packed.Unpack(empty):
            return empty
    return None


def _known_class(info: error_details_pb2.ErrorInfo) -> type[ServiceError] | None:
    return CLASSES.get(info.metadata["class"])


def _rebuilt(status: status_pb2.Status, info: error_details_pb2.ErrorInfo) -> ServiceError:
    cls = CLASSES[info.metadata["class"]]
    bad = _detail(status, error_details_pb2.BadRequest())
    retry = _detail(status, error_details_pb2.RetryInfo())
    return cls(
        status.message,
        field=bad.field_violations[0].field if bad and bad.field_violations else None,
        metadata={key: value for key, value in info.metadata.items() if key != "class"},
        retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9 if retry else None,
    )


def _without_details(error: grpc.RpcError) -> ServiceError:
    """The transport's own text names addresses: it is left to __cause__, except for a limit."""
    code = error.code() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None
    if code is grpc.StatusCode.UNAVAILABLE:
        return errors.UpstreamUnavailable("the service cannot be reached")
    if code is grpc.StatusCode.CANCELLED:
        # Not by us, or there were no error to rebuild: a server that stops answers so for a moment.
        return errors.UpstreamUnavailable("the service ended the call")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded("the deadline expired")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.ResourceExhausted(error.details() or "a limit of the transport was reached")
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return errors.Unauthenticated("no or a wrong credential")
    name = "no status" if code is None else code.name
    return errors.InternalError(f"the service answered {name} without details")
