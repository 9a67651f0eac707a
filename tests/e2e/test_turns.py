"""A prompt through three real processes: what a client sees, and what is left afterwards."""

from __future__ import annotations

import json

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from typer.testing import CliRunner

from client import Client, Delta, Finished, Progress, Started
from client.cli import app
from demo.launcher import LocalServices
from tests.e2e.conftest import (
    conversation,
    eventually,
    long_text,
    pages_in_use,
    scrape,
)

pytestmark = pytest.mark.e2e

# A word that no part of the system would say by itself.
CANARY = "zyzzyvaquux"


def test_a_long_prompt_goes_sparse_and_says_what_it_kept(client: Client) -> None:
    events = list(client.generate(conversation(), max_tokens=8, ignore_end_tokens=True))
    started, finished = events[0], events[-1]
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    assert finished.request_id == started.request_id != ""
    assert (finished.decision.path, finished.decision.reason) == ("SPARSE", "ELIGIBLE")
    assert finished.plan is not None
    assert finished.plan.ranked_chunks >= 8
    counts = finished.counts
    assert counts.protected_head_tokens == finished.plan.protected_head_tokens > 0
    assert counts.selected_tokens == finished.plan.kept_tokens
    assert counts.executed_tokens == counts.protected_head_tokens + counts.selected_tokens
    assert counts.draft_prefilled_tokens == counts.prompt_tokens == started.prompt_tokens
    assert counts.completion_tokens == 8
    assert sum(len(e.token_ids) for e in events if isinstance(e, Delta)) == 8
    phases = {e.phase for e in events if isinstance(e, Progress)}
    assert {"SCORE_PREFILL", "SPARSE_PREFILL"} <= phases


def test_the_stages_add_up_to_the_time_to_the_first_token(client: Client) -> None:
    for mode in ("sparse", "dense"):
        timings = client.complete(conversation(), mode=mode, max_tokens=4).timings
        total = timings.time_to_first_token_s
        assert sum(timings.stages().values()) == pytest.approx(total, abs=1e-6)
        assert timings.other_s <= max(0.05 * total, 0.010)
        assert timings.total_s >= total


def test_unary_and_streaming_give_the_same_turn(client: Client) -> None:
    whole = client.complete(conversation(), max_tokens=12, ignore_end_tokens=True)
    deltas = [
        event
        for event in client.generate(conversation(), max_tokens=12, ignore_end_tokens=True)
        if isinstance(event, Delta)
    ]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert sum((delta.token_ids for delta in deltas), ()) == whole.token_ids


def test_keeping_everything_gives_the_dense_answer(client: Client) -> None:
    options = {"max_tokens": 16, "ignore_end_tokens": True}
    dense = client.complete(conversation(), mode="dense", **options)
    kept = client.complete(conversation(), mode="sparse", keep_basis_points=10000, **options)
    assert kept.decision.path == "SPARSE"
    assert dense.decision.path == "DENSE"
    assert kept.token_ids == dense.token_ids


def test_a_short_prompt_goes_dense_and_says_why(client: Client) -> None:
    reply = client.complete([{"role": "user", "content": "hello"}], max_tokens=2)
    assert (reply.decision.path, reply.decision.reason) == ("DENSE", "BELOW_THRESHOLD")
    assert reply.plan is None


@pytest.mark.parametrize("query_mode", ["lookahead", "tail_window"])
def test_explain_shows_the_plan_that_generate_uses(client: Client, query_mode: str) -> None:
    explained = client.explain(conversation(), query_mode=query_mode, include_text=True)
    finished = client.complete(conversation(), query_mode=query_mode, max_tokens=1)
    assert explained.plan == finished.plan
    assert explained.plan is not None
    kept = {chunk.chunk for chunk in explained.chunks if chunk.state in ("FORCED", "RANKED")}
    assert kept == {c for first, end in explained.plan.kept for c in range(first, end)}
    assert "harbour number 7" in "".join(chunk.text or "" for chunk in explained.chunks)


def test_every_page_is_free_after_the_turns(client: Client, services: LocalServices) -> None:
    client.complete(conversation(), max_tokens=2)
    eventually(lambda: set(pages_in_use(services).values()) == {0}, "no page in use")


def test_no_log_line_and_no_metric_holds_what_was_said(
    client: Client, services: LocalServices
) -> None:
    messages = [{"role": "user", "content": f"{long_text(500)} {CANARY}"}]
    client.complete(messages, max_tokens=2)
    with pytest.raises(Exception, match="keep"):
        client.complete(messages, keep_basis_points=10001)
    for service in services.services.values():
        assert CANARY not in service.log_path.read_text(encoding="utf-8")
        assert CANARY not in scrape(service)


def test_the_command_line_speaks_json(services: LocalServices) -> None:
    runner = CliRunner()
    for command in (
        ["generate", "--ask", long_text(300), "--mode", "sparse", "--max-tokens", "3"],
        ["explain", "--ask", long_text(300), "--keep", "30%"],
        ["health"],
        ["info"],
    ):
        result = runner.invoke(app, [*command, "--address", services.address, "--json"])
        assert result.exit_code == 0, result.output
        assert isinstance(json.loads(result.stdout), dict)


def test_a_tool_that_knows_no_proto_can_call_by_reflection(services: LocalServices) -> None:
    with grpc.insecure_channel(services.address) as channel:
        pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName("specprefill.v1.Gateway").FindMethodByName("GetServerInfo")
        request, reply = (
            message_factory.GetMessageClass(kind)
            for kind in (method.input_type, method.output_type)
        )
        call = channel.unary_unary(
            "/specprefill.v1.Gateway/GetServerInfo", request.SerializeToString, reply.FromString
        )
        answer = call(request(), timeout=10)
    assert answer.target.layers == 4
    assert answer.draft.layers_used == 2
