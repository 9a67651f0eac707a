"""Every value a request may not have, and its neighbours that it may."""

import dataclasses
import math

import pytest

from serving.errors import InvalidRequest
from serving.keep_plan import PlanSettings
from serving.limits import (
    RequestLimits,
    check_identifier,
    check_plan_settings,
    check_range,
    check_sampling,
    check_stops,
)
from serving.sampling_settings import Sampling, Stops

NAN, INFINITE = math.nan, math.inf


def check_plan(**changes: object) -> None:
    settings = PlanSettings(**changes)
    check_plan_settings(settings, lookahead_max=64, window_max=256, field="prefill")


def check_reply(**changes: object) -> None:
    stops = Stops(**{"max_tokens": 1, **changes})
    check_stops(stops, completion_tokens_max=100, vocab=10)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keep_basis_points", 0),
        ("keep_basis_points", 10_001),
        ("chunk_tokens", 0),
        ("chunk_tokens", 4097),
        ("tail_tokens", 65_537),
        ("pool_tokens", 0),
        ("pool_tokens", 12),
        ("pool_tokens", 129),
        ("lookahead_tokens", 0),
        ("lookahead_tokens", 65),
        ("window_tokens", 0),
        ("window_tokens", 257),
        ("lookahead_temperature", -0.1),
        ("lookahead_temperature", NAN),
        ("lookahead_temperature", INFINITE),
        ("lookahead_temperature", 1e39),  # infinite in float32
    ],
)
def test_a_plan_setting_out_of_bounds_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_plan(**{name: value})
    assert refused.value.field == f"prefill.{name}"
    assert f"prefill.{name} is " in refused.value.message
    assert refused.value.metadata["limit"] in refused.value.message
    assert set(refused.value.metadata) == {"limit", "got"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keep_basis_points", 1),
        ("keep_basis_points", 10_000),
        ("chunk_tokens", 1),
        ("chunk_tokens", 4096),
        ("tail_tokens", 0),
        ("tail_tokens", 65_536),
        ("pool_tokens", 1),
        ("pool_tokens", 127),
        ("lookahead_tokens", 1),
        ("lookahead_tokens", 64),
        ("window_tokens", 1),
        ("window_tokens", 256),
        ("lookahead_temperature", 0.0),
        ("lookahead_temperature", 0.6),
    ],
)
def test_a_plan_setting_on_its_bound_passes(name: str, value: float) -> None:
    check_plan(**{name: value})


def test_the_message_names_the_value_and_the_limit() -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_plan(keep_basis_points=10_001)
    assert refused.value.message == "prefill.keep_basis_points is 10001, it must be 1 to 10000"
    assert refused.value.metadata == {"limit": "1 to 10000", "got": "10001"}


def test_a_service_sets_its_own_limits() -> None:
    tight = RequestLimits(chunk_tokens_max=64)
    settings = PlanSettings(chunk_tokens=65)
    check_plan_settings(settings, lookahead_max=8, window_max=16)
    with pytest.raises(InvalidRequest, match=r"settings\.chunk_tokens is 65, it must be 1 to 64"):
        check_plan_settings(settings, lookahead_max=8, window_max=16, limits=tight)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", NAN),
        ("temperature", INFINITE),
        ("temperature", -INFINITE),
        ("temperature", -1e-9),
        ("top_p", NAN),
        ("top_p", 0.0),
        ("top_p", -0.5),
        ("top_p", 1.0000001),
        ("top_p", INFINITE),
        ("top_k", 4097),
        ("top_k", 2**32 - 1),
    ],
)
def test_sampling_that_is_no_distribution_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_sampling(dataclasses.replace(Sampling(), **{name: value}))
    assert refused.value.field == f"sampling.{name}"
    assert refused.value.metadata["got"] == str(value)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=-0.0),
        Sampling(temperature=2.5, top_k=4096, top_p=1e-6, seed=2**64 - 1),
    ],
)
def test_sampling_within_bounds_passes(sampling: Sampling) -> None:
    check_sampling(sampling)


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"max_tokens": 0}, "stop.max_tokens", "stop.max_tokens is 0, it must be 1 to 100"),
        ({"max_tokens": 101}, "stop.max_tokens", "stop.max_tokens is 101, it must be 1 to 100"),
        (
            {"stop_strings": ("a",) * 17},
            "stop.stop_strings",
            "the number of stop.stop_strings is 17, it must be at most 16",
        ),
        (
            {"stop_strings": ("a", "")},
            "stop.stop_strings",
            "the length of stop.stop_strings[1] is 0, it must be 1 to 256",
        ),
        (
            {"stop_strings": ("a" * 257,)},
            "stop.stop_strings",
            "the length of stop.stop_strings[0] is 257, it must be 1 to 256",
        ),
        (
            {"stop_token_ids": frozenset(range(257))},
            "stop.stop_token_ids",
            "the number of stop.stop_token_ids is 257, it must be at most 256",
        ),
        (
            {"stop_token_ids": frozenset({3, 10})},
            "stop.stop_token_ids",
            "stop.stop_token_ids is 10, it must be 0 to 9",
        ),
    ],
)
def test_stops_out_of_bounds_are_refused(
    changes: dict[str, object], field: str, message: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_reply(**changes)
    assert refused.value.message == message
    assert refused.value.field == field


def test_stops_on_their_bounds_pass() -> None:
    check_reply(max_tokens=100, stop_strings=("a" * 256,) * 16, stop_token_ids=frozenset(range(10)))


def test_no_stop_string_of_a_caller_is_repeated_in_a_refusal() -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_reply(stop_strings=("secret" * 50,))
    assert "secret" not in refused.value.message


@pytest.mark.parametrize("value", ["", "a" * 129, "tab\there", "naïve", "new\nline", "two words"])
def test_an_identifier_that_metadata_cannot_carry_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_identifier(value, field="request_id")
    assert refused.value.field == "request_id"


@pytest.mark.parametrize("value", ["a", "a" * 128, "7f0c-11:turn/2.b_c"])
def test_a_plain_identifier_passes(value: str) -> None:
    check_identifier(value, field="request_id")


def test_nan_is_in_no_range() -> None:
    with pytest.raises(InvalidRequest, match="lease_s is nan, it must be 0 to 60"):
        check_range(NAN, low=0, high=60, field="lease_s")
