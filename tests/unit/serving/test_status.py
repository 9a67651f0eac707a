"""Errors to gRPC statuses and back, without a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import StatusCode as Code

from serving import errors, status
from serving.errors import ServiceError

ROOT = Path(__file__).resolve().parents[3]
# Written out by hand: the table is the promise.
EXPECTED = {
    "ServiceError": Code.INTERNAL,
    "InvalidRequest": Code.INVALID_ARGUMENT,
    "MalformedRequest": Code.INVALID_ARGUMENT,
    "ContextLengthExceeded": Code.INVALID_ARGUMENT,
    "HandleNotFound": Code.NOT_FOUND,
    "KvEvicted": Code.NOT_FOUND,
    "AlreadyExists": Code.ALREADY_EXISTS,
    "WrongState": Code.FAILED_PRECONDITION,
    "BaseMismatch": Code.FAILED_PRECONDITION,
    "PlanRejected": Code.FAILED_PRECONDITION,
    "TokenizerMismatch": Code.FAILED_PRECONDITION,
    "ProtectedExceedsBudget": Code.FAILED_PRECONDITION,
    "PromptExceedsDraft": Code.FAILED_PRECONDITION,
    "Conflict": Code.ABORTED,
    "ResourceExhausted": Code.RESOURCE_EXHAUSTED,
    "QueueFull": Code.RESOURCE_EXHAUSTED,
    "KvCacheFull": Code.RESOURCE_EXHAUSTED,
    "SlowConsumer": Code.RESOURCE_EXHAUSTED,
    "Unauthenticated": Code.UNAUTHENTICATED,
    "Unavailable": Code.UNAVAILABLE,
    "UpstreamUnavailable": Code.UNAVAILABLE,
    "StreamInterrupted": Code.UNAVAILABLE,
    "DeadlineExceeded": Code.DEADLINE_EXCEEDED,
    "NonFiniteImportance": Code.INTERNAL,
    "InternalError": Code.INTERNAL,
}


def as_call_error(
    code: grpc.StatusCode, details: str = "", trailing: tuple[tuple[str, object], ...] = ()
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details
    )


def sent(error: ServiceError, request_id: str | None = "r-1") -> grpc.aio.AioRpcError:
    """What a caller sees of an error."""
    told = status.to_status(error, request_id)
    trailing = status.trailing_metadata(told, request_id)
    return as_call_error(status.code_of(error), told.message, trailing)


def error_info(told: object) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo()
    assert told.details[0].Unpack(info)  # type: ignore[attr-defined]
    return info


def test_every_error_class_is_in_the_expected_table() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, ServiceError)
    }
    assert defined == set(EXPECTED) == set(status.CLASSES)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_error_class_has_its_code_and_comes_back_as_itself(name: str) -> None:
    cls = status.CLASSES[name]
    error = cls("too much", field="a.b", metadata={"limit": "7"}, retry_after_s=1.25)
    assert status.code_of(error) is EXPECTED[name]
    back = status.raised(sent(error))
    assert type(back) is cls
    assert back.message == str(back) == "too much"
    assert back.field == "a.b"
    assert back.retry_after_s == 1.25
    assert back.metadata == {"limit": "7", "request_id": "r-1"}


def test_what_an_error_does_not_have_is_not_sent() -> None:
    told = status.to_status(errors.InvalidRequest("no"), None)
    assert len(told.details) == 1
    back = status.raised(sent(errors.InvalidRequest("no"), None))
    assert (back.field, back.retry_after_s, back.metadata) == (None, None, {})


def test_a_status_carries_reason_domain_field_and_delay_for_other_clients() -> None:
    error = errors.QueueFull("wait", field="prompt", retry_after_s=0.5)
    told = status.to_status(error, "r-9")
    assert told.code == Code.RESOURCE_EXHAUSTED.value[0]
    info = error_info(told)
    assert (info.reason, info.domain) == ("QUEUE_FULL", "specprefill")
    assert dict(info.metadata) == {"class": "QueueFull", "request_id": "r-9"}
    bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    assert told.details[1].Unpack(bad)
    assert told.details[2].Unpack(retry)
    assert (bad.field_violations[0].field, bad.field_violations[0].description) == (
        "prompt",
        "wait",
    )
    assert retry.retry_delay.ToMilliseconds() == 500


def test_a_service_s_own_subclass_travels_as_the_nearest_class_that_callers_know() -> None:
    class DraftTooShort(errors.PromptExceedsDraft):
        pass

    back = status.raised(sent(DraftTooShort("no")))
    assert type(back) is errors.PromptExceedsDraft


def test_a_sender_cannot_fake_the_class_through_metadata() -> None:
    error = errors.Conflict("no", metadata={"class": "KvEvicted", "request_id": "other"})
    back = status.raised(sent(error))
    assert type(back) is errors.Conflict
    assert back.metadata["request_id"] == "r-1"


def test_long_texts_are_cut_at_whole_characters() -> None:
    error = errors.InvalidRequest(
        "€" * 5000, field="f" * 5000, metadata={f"k{i}" * 100: "ü" * 5000 for i in range(50)}
    )
    told = status.to_status(error, "r" * 128)
    assert set(told.message) == {"€"}
    assert len(told.SerializeToString()) < 4096


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (Code.UNAVAILABLE, errors.UpstreamUnavailable),
        (Code.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (Code.RESOURCE_EXHAUSTED, errors.ResourceExhausted),
        (Code.UNAUTHENTICATED, errors.Unauthenticated),
        (Code.UNKNOWN, errors.InternalError),
        (Code.INVALID_ARGUMENT, errors.InternalError),
        (Code.UNIMPLEMENTED, errors.InternalError),
        (Code.CANCELLED, errors.UpstreamUnavailable),
    ],
)
def test_a_status_without_details_becomes_the_class_of_its_code(
    code: grpc.StatusCode, cls: type[ServiceError]
) -> None:
    assert type(status.raised(as_call_error(code, "text of the transport"))) is cls


def test_the_address_in_a_transport_error_is_not_repeated() -> None:
    back = status.raised(as_call_error(Code.UNAVAILABLE, "connect failed: ipv4:10.1.2.3:50051"))
    assert "10.1.2.3" not in back.message


def test_an_error_without_a_call_is_an_internal_error() -> None:
    assert type(status.raised(grpc.RpcError())) is errors.InternalError


def test_a_client_that_rebuilds_errors_needs_only_grpc() -> None:
    program = "import sys, serving.status, serving.channel; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in result.stdout.split()}
    assert "grpc" in loaded
    extra = {"pydantic", "pydantic_settings", "structlog", "prometheus_client", "numpy", "torch"}
    assert not loaded & extra


def test_broken_or_foreign_details_are_treated_as_none() -> None:
    broken = as_call_error(Code.UNAVAILABLE, "x", ((status.DETAILS_KEY, b"\xff\xff\xff"),))
    assert type(status.raised(broken)) is errors.UpstreamUnavailable
    told = status.to_status(errors.KvEvicted("x"), None)
    foreign = error_info(told)
    for change in ({"domain": "example.com"}, {"metadata": {"class": "FromTheFuture"}}):
        info = error_details_pb2.ErrorInfo()
        info.CopyFrom(foreign)
        info.MergeFrom(error_details_pb2.ErrorInfo(**change))
        told.details[0].Pack(info)
        trailing = ((status.DETAILS_KEY, told.SerializeToString()),)
        back = status.raised(as_call_error(Code.NOT_FOUND, "x", trailing))
        assert type(back) is errors.InternalError
