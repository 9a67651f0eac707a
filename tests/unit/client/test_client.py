"""The Python clients against a scripted gateway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing

import pytest

from client import AsyncClient, Client, Delta, Finished, Progress, Started
from serving.errors import InvalidRequest, UpstreamUnavailable
from specprefill.v1 import gateway_pb2, types_pb2
from tests.unit.client.fake_gateway import FakeGateway, fake_gateway

MESSAGES = [{"role": "user", "content": "hi"}]
WAIT_S = 10


@pytest.fixture
def gateway() -> Iterator[tuple[str, FakeGateway]]:
    with fake_gateway() as running:
        yield running


def test_a_stream_is_started_progress_deltas_finished(gateway: tuple[str, FakeGateway]) -> None:
    with Client(gateway[0]) as client:
        events = list(client.generate(MESSAGES))
    assert [type(event) for event in events] == [Started, Progress, Delta, Delta, Finished]
    assert events[1] == Progress("SCORE_PREFILL", 100, 320)
    assert events[2] == Delta("Héllo", (5,))
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.decision.path, finished.decision.reason) == ("SPARSE", "ELIGIBLE")
    assert finished.finish_reason == "END_TOKEN"
    assert finished.matched_stop_string is None
    assert finished.plan is not None
    assert finished.plan.kept == ((1, 3), (8, 10))
    assert finished.plan.settings.query_mode == "TAIL_WINDOW"
    assert finished.settings.seed is None


def test_a_reply_holds_the_text_and_what_the_last_message_said(
    gateway: tuple[str, FakeGateway],
) -> None:
    with Client(gateway[0]) as client:
        reply = client.complete(MESSAGES)
    assert (reply.text, reply.token_ids) == ("Héllo wörld", (5, 6))
    assert reply.counts.executed_tokens == 160
    assert sum(reply.timings.stages().values()) == reply.timings.time_to_first_token_s


async def test_the_async_client_gives_the_same(gateway: tuple[str, FakeGateway]) -> None:
    with Client(gateway[0]) as client:
        expected = list(client.generate(MESSAGES)), client.complete(MESSAGES), client.explain("a")
    async with AsyncClient(gateway[0]) as client:
        events = [event async for event in client.generate(MESSAGES)]
        assert (events, await client.complete(MESSAGES), await client.explain("a")) == expected
        assert (await client.server_info()).version == "1.2.3"
        assert await client.health() == "SERVING"


def test_every_option_reaches_the_request(gateway: tuple[str, FakeGateway]) -> None:
    with Client(gateway[0]) as client:
        client.complete(
            [7, 8],
            mode="sparse",
            keep_basis_points=1500,
            chunk_tokens=16,
            tail_tokens=0,
            query_mode="lookahead",
            lookahead_tokens=4,
            window_tokens=9,
            lookahead_temperature=0.5,
            lookahead_seed=3,
            protected_spans=[(1, 4)],
            request_id="mine",
            max_tokens=9,
            temperature=0.25,
            top_k=2,
            top_p=0.75,
            seed=0,
            stop=["x"],
            stop_token_ids=[1],
            ignore_end_tokens=True,
        )
    request = gateway[1].requests[-1]
    expected = gateway_pb2.CompleteRequest(
        request_id="mine",
        prompt=gateway_pb2.Prompt(token_ids=b"\x07\0\0\0\x08\0\0\0"),
        sampling=types_pb2.SamplingParams(temperature=0.25, top_k=2, top_p=0.75, seed=0),
        stop=types_pb2.StopConditions(
            max_tokens=9, stop_strings=["x"], stop_token_ids=b"\x01\0\0\0", ignore_end_tokens=True
        ),
        prefill=gateway_pb2.PrefillOptions(
            mode=gateway_pb2.PREFILL_MODE_SPARSE,
            keep_basis_points=1500,
            chunk_tokens=16,
            tail_tokens=0,
            query_mode=types_pb2.QUERY_MODE_LOOKAHEAD,
            lookahead_tokens=4,
            window_tokens=9,
            lookahead_temperature=0.5,
            lookahead_seed=3,
            protected_spans=[types_pb2.PositionSpan(start=1, end=4)],
        ),
    )
    assert request == expected


def test_what_is_not_given_is_not_sent(gateway: tuple[str, FakeGateway]) -> None:
    with Client(gateway[0]) as client:
        client.complete("plain text")
    request = gateway[1].requests[-1]
    assert isinstance(request, gateway_pb2.CompleteRequest)
    assert request.prompt.text == "plain text"
    assert not request.prefill.ListFields()
    assert not request.sampling.ListFields()


def test_messages_carry_tools_and_their_results(gateway: tuple[str, FakeGateway]) -> None:
    with Client(gateway[0]) as client:
        client.complete(
            [
                {"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}]},
                {"role": "tool", "content": "42", "tool_call_id": "c1", "name": "add"},
            ],
            tools=[{"name": "add"}],
        )
    request = gateway[1].requests[-1]
    assert isinstance(request, gateway_pb2.CompleteRequest)
    conversation = request.prompt.conversation
    assert conversation.tools_json == '[{"name": "add"}]'
    assert conversation.messages[0].tool_calls_json == '[{"id": "c1"}]'
    assert conversation.messages[1].tool_call_id == "c1"


def test_a_misspelt_message_field_is_an_error_here(gateway: tuple[str, FakeGateway]) -> None:
    with Client(gateway[0]) as client, pytest.raises(TypeError, match="contents"):
        client.complete([{"role": "user", "content": "x", "contents": "y"}])


@pytest.mark.parametrize("option", [{"mode": "fast"}, {"query_mode": "tail"}])
def test_an_unknown_mode_names_the_allowed_ones(
    gateway: tuple[str, FakeGateway], option: dict[str, str]
) -> None:
    with Client(gateway[0]) as client, pytest.raises(ValueError, match="is one of"):
        client.complete(MESSAGES, **option)  # type: ignore[misc]


def test_a_refusal_is_the_class_the_gateway_raised(gateway: tuple[str, FakeGateway]) -> None:
    with Client(gateway[0]) as client:
        with pytest.raises(InvalidRequest, match="keep rate above 10000"):
            client.complete(MESSAGES, keep_basis_points=10001)
        with pytest.raises(InvalidRequest):
            list(client.generate(MESSAGES, keep_basis_points=10001))


def test_a_gateway_that_is_not_there_is_unavailable() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(UpstreamUnavailable):
        client.complete(MESSAGES, timeout_s=5)


def test_leaving_the_loop_cancels_the_turn(gateway: tuple[str, FakeGateway]) -> None:
    gateway[1].is_endless = True
    with Client(gateway[0]) as client:
        events = client.generate(MESSAGES)
        next(event for event in events if isinstance(event, Delta))
        events.close()  # type: ignore[attr-defined]
        assert gateway[1].cancelled.wait(WAIT_S)


async def test_closing_the_async_iterator_cancels_the_turn(
    gateway: tuple[str, FakeGateway],
) -> None:
    gateway[1].is_endless = True
    async with AsyncClient(gateway[0]) as client:
        async with aclosing(client.generate(MESSAGES)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Delta):
                    break
        assert gateway[1].cancelled.wait(WAIT_S)
