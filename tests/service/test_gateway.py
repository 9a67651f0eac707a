"""A real gateway server over fake services: paths, fallbacks, replies, explanations."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.ports import Phase, Progress, ScoreCall, Tokens
from serving import errors
from serving.finish import FinishReason
from serving.keep_plan import Run
from specprefill.v1 import gateway_pb2, types_pb2
from tests.service.fake_ports import FIRST_TIMES, KV, generated, keep_all, reply, scored
from tests.service.gateway_rig import (
    INSTANCE_ID,
    Rig,
    complete_request,
    gateway_rig,
    generate_request,
    long_prompt,
    short_prompt,
)
from tests.unit.gateway.prompts import open_tokenizer
from tests.unit.gateway.tokenizer_dirs import CHATML, write_byte_level

DENSE, SPARSE = gateway_pb2.PATH_DENSE, gateway_pb2.PATH_SPARSE
STAGES = {name for name in gateway_pb2.Timings.DESCRIPTOR.fields_by_name if name.endswith("_s")} - {
    "time_to_first_token_s",
    "decode_s",
    "total_s",
    "overlapped_s",
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def rig(model_dir: Path) -> AsyncIterator[Rig]:
    async with gateway_rig(model_dir) as opened:
        yield opened


async def _decided(rig: Rig, **fields: Any) -> tuple[int, int]:
    """Path and reason of one request."""
    response = await rig.stub.Complete(complete_request(**fields))
    return response.finished.decision.path, response.finished.decision.reason


async def test_a_long_prompt_goes_sparse_with_the_scorers_plan(rig: Rig) -> None:
    request = generate_request(request_id="r-7")
    events = [event async for event in rig.stub.Generate(request)]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", "progress", "progress", "delta", "delta", "finished"]
    finished = events[-1].finished
    assert finished.decision.path == SPARSE
    assert finished.decision.reason == gateway_pb2.REASON_ELIGIBLE
    (score,), (generate,) = rig.scorer.calls, rig.target.calls
    assert generate.plan == keep_all(score)
    assert generate.request_id == score.request_id == "r-7"
    assert finished.plan.kept_chunks == keep_all(score).kept_chunks
    assert finished.settings.settings_digest == b"d" * 32
    assert events[1].progress.phase == types_pb2.PHASE_SCORE_PREFILL
    assert rig.scorer.open == rig.target.open == 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.ProtectedExceedsBudget("x"), gateway_pb2.REASON_PROTECTED_EXCEEDS_BUDGET),
        (errors.PromptExceedsDraft("x"), gateway_pb2.REASON_PROMPT_EXCEEDS_DRAFT),
        (errors.UpstreamUnavailable("x"), gateway_pb2.REASON_SCORER_UNAVAILABLE),
        (errors.Unavailable("x"), gateway_pb2.REASON_SCORER_UNAVAILABLE),
        (errors.QueueFull("x"), gateway_pb2.REASON_SCORER_ERROR),
        (errors.InternalError("x"), gateway_pb2.REASON_SCORER_ERROR),
        (errors.NonFiniteImportance("x"), gateway_pb2.REASON_SCORER_ERROR),
        (errors.DeadlineExceeded("x"), gateway_pb2.REASON_SCORER_ERROR),
    ],
)
async def test_a_scorer_that_fails_midway_makes_the_turn_dense(
    rig: Rig, error: errors.ServiceError, reason: int
) -> None:
    rig.scorer.steps = lambda call: (Progress(Phase.SCORE_PREFILL, 1, 9), error)
    response = await rig.stub.Complete(complete_request())
    assert (response.finished.decision.path, response.finished.decision.reason) == (DENSE, reason)
    assert response.text
    assert rig.target.calls[0].plan is None
    assert not response.finished.HasField("plan")
    assert response.finished.counts.scored_tokens == 0
    label = gateway_pb2.Reason.Name(reason).removeprefix("REASON_").lower()
    assert rig.sample("gateway_scorer_fallbacks_total", reason=label) == 1


async def test_every_other_reason_is_reported_without_asking_the_scorer(rig: Rig) -> None:
    facts = rig.scorer.facts
    assert facts is not None
    assert await _decided(rig, prompt=short_prompt()) == (
        DENSE,
        gateway_pb2.REASON_BELOW_THRESHOLD,
    )
    dense = {"mode": gateway_pb2.PREFILL_MODE_DENSE}
    assert await _decided(rig, prefill=dense) == (DENSE, gateway_pb2.REASON_DISABLED)
    rig.scorer.facts = None
    assert await _decided(rig) == (DENSE, gateway_pb2.REASON_SCORER_UNAVAILABLE)
    rig.scorer.facts = replace(facts, model=replace(facts.model, positions_max=10))
    assert await _decided(rig) == (DENSE, gateway_pb2.REASON_PROMPT_EXCEEDS_DRAFT)
    rig.scorer.facts = replace(facts, model=replace(facts.model, tokenizer_digest="another"))
    assert await _decided(rig) == (DENSE, gateway_pb2.REASON_TOKENIZER_MISMATCH)
    assert rig.scorer.calls == []
    rig.scorer.facts = facts
    sparse = {"mode": gateway_pb2.PREFILL_MODE_SPARSE}
    assert await _decided(rig, prompt=short_prompt(), prefill=sparse) == (
        SPARSE,
        gateway_pb2.REASON_REQUESTED,
    )


@pytest.mark.parametrize("fault", ["other prompt", "last token dropped", "other settings", "none"])
async def test_a_plan_that_does_not_fit_is_never_sent_to_the_target(rig: Rig, fault: str) -> None:
    def steps(call: ScoreCall) -> tuple[Any, ...]:
        plan = keep_all(call)
        if fault == "none":
            return ()
        if fault == "other prompt":
            plan = replace(plan, prompt_tokens=plan.prompt_tokens + 1)
        if fault == "last token dropped":
            plan = replace(plan, kept=(Run(0, 1),), forced=())
        if fault == "other settings":
            plan = replace(plan, settings=replace(plan.settings, keep_basis_points=1))
        return (scored(call, plan),)

    rig.scorer.steps = steps
    assert await _decided(rig) == (DENSE, gateway_pb2.REASON_SCORER_ERROR)
    assert rig.target.calls[0].plan is None


async def test_timings_of_a_turn_add_up_and_come_in_the_metrics(rig: Rig) -> None:
    response = await rig.stub.Complete(complete_request())
    timings = response.finished.timings
    total = math.fsum(getattr(timings, stage) for stage in STAGES)
    assert math.isclose(total, timings.time_to_first_token_s, abs_tol=1e-9)
    assert timings.score_prefill_s == pytest.approx(2e-4)
    assert timings.dense_prefill_s == pytest.approx(2e-4)
    assert timings.tokenise_s > 0
    assert timings.total_s >= timings.time_to_first_token_s
    assert abs(timings.other_s) <= max(0.05 * timings.time_to_first_token_s, 0.01)
    assert rig.sample("gateway_time_to_first_token_seconds_count") == 1
    assert rig.sample("gateway_inter_token_latency_seconds_count") == 1
    assert rig.sample("gateway_request_seconds_count") == 1
    assert rig.sample("gateway_turns_total", path="sparse", reason="eligible") == 1
    assert rig.sample("gateway_requests_finished_total", finish_reason="max_tokens") == 1
    assert rig.sample("gateway_generated_tokens_total") == 2
    assert rig.sample("gateway_turns_running") == 0
    ran = {stage for stage in STAGES if getattr(timings, stage) > 0}
    for stage in STAGES:
        count = rig.sample("gateway_stage_seconds_count", stage=stage.removesuffix("_s"))
        assert count == (stage in ran)


async def test_counts_say_what_was_done_with_the_prompt(rig: Rig) -> None:
    counts = (await rig.stub.Complete(complete_request())).finished.counts
    tokens = rig.target.calls[0].prompt_ids.size
    assert counts.prompt_tokens == counts.scored_tokens == counts.draft_prefilled_tokens == tokens
    assert counts.selected_tokens == counts.executed_tokens == tokens
    assert counts.completion_tokens == 2
    assert counts.queries == 16
    assert counts.protected_head_tokens == 0


async def test_a_conversations_head_is_protected_in_both_services(rig: Rig) -> None:
    messages = [
        gateway_pb2.Message(role="system", content="the harbour"),
        gateway_pb2.Message(role="user", content="the quick brown fox " * 30),
    ]
    prompt = gateway_pb2.Prompt(conversation=gateway_pb2.Conversation(messages=messages))
    response = await rig.stub.Complete(complete_request(prompt))
    head = response.started.protected_head_tokens
    assert 0 < head < response.started.prompt_tokens
    assert rig.scorer.calls[0].protected_head_tokens == head
    assert rig.target.calls[0].protected_head_tokens == head
    assert response.finished.counts.protected_head_tokens == head


async def test_a_character_is_never_split_between_deltas(rig: Rig, model_dir: Path) -> None:
    ids = open_tokenizer(model_dir).plain.encode("né 🚢!").ids
    rig.target.steps = lambda call: reply(call, ids)
    deltas = [
        event.delta
        async for event in rig.stub.Generate(generate_request())
        if event.HasField("delta")
    ]
    assert "".join(delta.text for delta in deltas) == "né 🚢!"
    assert not any("\ufffd" in delta.text for delta in deltas)
    assert len(deltas) == len(ids), "every token is told at once, text or not"


async def test_text_ends_before_the_stop_string(rig: Rig, model_dir: Path) -> None:
    ids = open_tokenizer(model_dir).plain.encode("the fox stops here").ids
    rig.target.steps = lambda call: reply(call, ids)
    response = await rig.stub.Complete(complete_request(stop={"stop_strings": [" stops"]}))
    assert response.text == "the fox"


async def test_what_ended_the_reply_is_no_text_of_it(rig: Rig, model_dir: Path) -> None:
    the, end = open_tokenizer(model_dir).plain.encode("the.").ids
    rig.target.steps = lambda call: reply(call, [the, end])
    stop = {"stop_token_ids": end.to_bytes(4, "little")}
    response = await rig.stub.Complete(complete_request(stop=stop))
    assert response.text == "the"
    assert response.token_ids == the.to_bytes(4, "little") + end.to_bytes(4, "little")


async def test_text_that_is_held_back_comes_with_the_end(rig: Rig, model_dir: Path) -> None:
    ids = open_tokenizer(model_dir).plain.encode("the sto").ids
    rig.target.steps = lambda call: reply(call, ids)
    response = await rig.stub.Complete(complete_request(stop={"stop_strings": ["stop"]}))
    assert response.text == "the sto"


async def test_tokens_that_come_together_are_one_delta(rig: Rig) -> None:
    rig.target.steps = lambda call: (
        Tokens((72,), FIRST_TIMES),
        Tokens((73, 74, 75)),
        generated(call, 4, FinishReason.END_TOKEN),
    )
    events = [event async for event in rig.stub.Generate(generate_request())]
    sizes = [len(e.delta.token_ids) // 4 for e in events if e.HasField("delta")]
    assert sizes == [1, 3]
    assert events[-1].finished.finish_reason == types_pb2.FINISH_REASON_END_TOKEN
    assert rig.sample("gateway_inter_token_latency_seconds_count") == 3


async def test_the_request_id_is_everywhere(rig: Rig) -> None:
    call = rig.stub.Complete(complete_request(request_id="mine"))
    response = await call
    assert response.started.request_id == response.finished.request_id == "mine"
    assert ("x-request-id", "mine") in tuple(await call.trailing_metadata())
    call = rig.stub.Complete(complete_request())
    response = await call
    made = response.finished.request_id
    assert made == rig.target.calls[-1].request_id
    assert made not in ("", "mine")
    assert ("x-request-id", made) in tuple(await call.trailing_metadata())


async def test_explain_scores_and_generates_nothing(rig: Rig) -> None:
    request = gateway_pb2.ExplainRequest(prompt=long_prompt(), include_text=True, request_id="e")
    response = await rig.stub.Explain(request)
    assert rig.target.calls == []
    assert rig.scorer.calls[0].include_importance
    assert response.request_id == "e"
    assert response.decision.path == SPARSE
    assert "".join(chunk.text for chunk in response.chunks) == long_prompt().text
    assert [chunk.chunk for chunk in response.chunks] == list(range(len(response.chunks)))
    assert [chunk.importance for chunk in response.chunks] == list(range(len(response.chunks)))
    states = [chunk.state for chunk in response.chunks]
    assert states[-1] == gateway_pb2.CHUNK_STATE_FORCED
    assert set(states[:-1]) == {gateway_pb2.CHUNK_STATE_RANKED}
    assert response.plan.kept_chunks == len(response.chunks)
    without_text = gateway_pb2.ExplainRequest(prompt=long_prompt())
    assert not (await rig.stub.Explain(without_text)).chunks[0].HasField("text")


async def test_explain_reports_a_decision_that_came_before_scoring(rig: Rig) -> None:
    response = await rig.stub.Explain(gateway_pb2.ExplainRequest(prompt=short_prompt()))
    assert response.decision.reason == gateway_pb2.REASON_BELOW_THRESHOLD
    assert not response.HasField("plan")
    assert not response.chunks
    assert rig.scorer.calls == []


async def test_server_info_shows_both_models_and_the_defaults(rig: Rig) -> None:
    info = await rig.stub.GetServerInfo(gateway_pb2.GetServerInfoRequest())
    assert info.target.name == "tiny"
    assert (info.draft.name, info.draft.layers_used) == ("draft", 2)
    assert info.tokenizers_match
    assert info.instance_id == INSTANCE_ID
    assert info.defaults.mode == gateway_pb2.PREFILL_MODE_AUTO
    assert info.defaults.threshold_tokens == 40
    assert info.defaults.plan.query_mode == types_pb2.QUERY_MODE_TAIL_WINDOW
    assert info.target_kv.pages_free == KV.pages_free
    assert info.prompt_tokens_max == 4096
    facts = rig.scorer.facts
    assert facts is not None
    rig.scorer.facts = replace(facts, model=replace(facts.model, tokenizer_digest="another"))
    info = await rig.stub.GetServerInfo(gateway_pb2.GetServerInfoRequest())
    assert not info.tokenizers_match
    rig.scorer.facts = None
    info = await rig.stub.GetServerInfo(gateway_pb2.GetServerInfoRequest())
    assert not info.HasField("draft")
    assert not info.tokenizers_match


async def test_tools_are_refused_where_the_template_leaves_them_out(tmp_path: Path) -> None:
    conversation = gateway_pb2.Conversation(
        messages=[gateway_pb2.Message(role="user", content="a")], tools_json='[{"name": "f"}]'
    )
    prompt = gateway_pb2.Prompt(conversation=conversation)
    async with gateway_rig(write_byte_level(tmp_path, CHATML)) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rig.stub.Complete(complete_request(prompt))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "does not render tools" in (refused.value.details() or "")
