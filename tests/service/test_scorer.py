"""The scorer behind real gRPC: what it refuses, keeps, streams and leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from serving import errors, status, wire
from specprefill.v1 import scorer_pb2, types_pb2
from tests.service.scorer_rig import (
    BOOT_ID,
    CHUNK_TOKENS,
    TIMEOUT_S,
    RunningScorer,
    base,
    eventually,
    prompt,
    request_for,
    running_scorer,
)
from tests.tiny_models import write_tiny_model

POSITIONS_MAX = 512
LOOKAHEAD = {"query_mode": types_pb2.QUERY_MODE_LOOKAHEAD}
TAIL_WINDOW = {"query_mode": types_pb2.QUERY_MODE_TAIL_WINDOW}
MODES = pytest.mark.parametrize("mode", [LOOKAHEAD, TAIL_WINDOW], ids=["lookahead", "window"])
NAN, INFINITE = float("nan"), float("inf")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    return write_tiny_model(directory, layers=3, positions_max=POSITIONS_MAX)


@pytest.fixture
async def scorer(model_dir: Path) -> AsyncIterator[RunningScorer]:
    async with running_scorer(model_dir) as scorer:
        yield scorer


async def refusal(scorer: RunningScorer, request: Any) -> errors.ServiceError:
    """The error a Score request ends in; nothing was run and nothing is held."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await scorer.score(request)
    assert scorer.decoder.forwards == 0
    assert await scorer.usage() == (0, 0)
    return status.raised(caught.value)


# What is wrong, and what the refusal must name.
BAD_SETTINGS = [
    ({"keep_basis_points": 0}, "settings.keep_basis_points", "1 to 10000"),
    ({"keep_basis_points": 10_001}, "settings.keep_basis_points", "1 to 10000"),
    ({"chunk_tokens": 0}, "settings.chunk_tokens", "1 to 4096"),
    ({"chunk_tokens": 2**32 - 1}, "settings.chunk_tokens", "1 to 4096"),
    ({"tail_tokens": 2**32 - 1}, "settings.tail_tokens", "0 to 65536"),
    ({"pool_tokens": 0}, "settings.pool_tokens", "1 to 127"),
    ({"pool_tokens": 12}, "settings.pool_tokens", "an odd number"),
    ({"query_mode": types_pb2.QUERY_MODE_UNSPECIFIED}, "settings.query_mode", "TAIL_WINDOW"),
    ({"query_mode": 9}, "settings.query_mode", "TAIL_WINDOW"),
    ({"lookahead_tokens": 0}, "settings.lookahead_tokens", "1 to 64"),
    ({"lookahead_tokens": 65}, "settings.lookahead_tokens", "1 to 64"),
    ({"window_tokens": 0}, "settings.window_tokens", "1 to 256"),
    ({"window_tokens": 257}, "settings.window_tokens", "1 to 256"),
    ({"lookahead_temperature": NAN}, "settings.lookahead_temperature", "finite"),
    ({"lookahead_temperature": INFINITE}, "settings.lookahead_temperature", "finite"),
    ({"lookahead_temperature": -0.5}, "settings.lookahead_temperature", "at least 0"),
]
BAD_FIELDS = [
    ({"prompt_token_ids": b""}, "prompt_token_ids", "empty"),
    ({"prompt_token_ids": b"\1\0\0"}, "prompt_token_ids", "multiple of 4"),
    ({"prompt_token_ids": wire.ids_to_bytes([5, 9999, 7])}, "prompt_token_ids", "[1] is 9999"),
    ({"protected_head_tokens": 100}, "protected_head_tokens", "0 to 99"),
    ({"protected_spans": [types_pb2.PositionSpan(start=5, end=5)]}, "protected_spans", "empty"),
    ({"protected_spans": [types_pb2.PositionSpan(start=99, end=101)]}, "protected_spans", "100"),
    ({"instance_id": "", "keep_handle": "a"}, "instance_id", "1 to 128"),
    ({"keep_handle": ""}, "keep_handle", "1 to 128"),
    ({"keep_handle": "x" * 129}, "keep_handle", "1 to 128"),
    ({"base": base("", 4)}, "base.handle", "1 to 128"),
    ({"base": base("a", 0)}, "base.tokens", "1 to"),
    ({"lease_s": NAN}, "lease_s", "above 0"),
    ({"lease_s": 0.0}, "lease_s", "above 0"),
    ({"lease_s": 1e9}, "lease_s", "at most 3600"),
]


async def test_every_bad_plan_setting_is_refused_by_name_before_any_model_work(
    scorer: RunningScorer,
) -> None:
    for settings, field, words in BAD_SETTINGS:
        error = await refusal(scorer, request_for(prompt(100), settings=settings))
        assert type(error) is errors.InvalidRequest, settings
        assert error.field == field
        assert words in error.message


async def test_every_bad_field_is_refused_by_name_before_any_model_work(
    scorer: RunningScorer,
) -> None:
    for fields, field, words in BAD_FIELDS:
        error = await refusal(scorer, request_for(prompt(100), **fields))
        assert type(error) is errors.InvalidRequest, fields
        assert error.field == field
        assert words in error.message
    refused = scorer.sample("scorer_requests_total", query_mode="tail_window", outcome="refused")
    assert refused == len(BAD_FIELDS)


async def test_a_request_without_settings_is_refused(scorer: RunningScorer) -> None:
    request = request_for(prompt(100))
    request.ClearField("settings")
    error = await refusal(scorer, request)
    assert (error.field, error.message) == ("settings", "settings are missing")


async def test_a_prompt_past_the_drafts_positions_is_refused(scorer: RunningScorer) -> None:
    error = await refusal(scorer, request_for(prompt(POSITIONS_MAX + 1)))
    assert type(error) is errors.PromptExceedsDraft
    error = await refusal(scorer, request_for(prompt(POSITIONS_MAX - 6), settings=LOOKAHEAD))
    assert type(error) is errors.PromptExceedsDraft
    assert error.metadata["positions_max"] == str(POSITIONS_MAX)


async def test_forced_chunks_that_leave_nothing_to_rank_are_refused(
    scorer: RunningScorer,
) -> None:
    error = await refusal(scorer, request_for(prompt(30)))
    assert type(error) is errors.ProtectedExceedsBudget


async def test_bytes_that_are_no_message_are_refused(scorer: RunningScorer) -> None:
    for data in (b"\xff\xff\xff\xff", b"\x0a\x02\xff\xfe"):
        method = scorer.channel.unary_stream("/specprefill.v1.Scorer/Score")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(data, timeout=TIMEOUT_S).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@MODES
async def test_a_scoring_streams_its_progress_and_then_its_result(
    scorer: RunningScorer, mode: dict[str, Any]
) -> None:
    request = request_for(prompt(100), settings=mode, include_importance=True)
    *progress, last = [event async for event in scorer.stub.Score(request, timeout=TIMEOUT_S)]
    phases = [event.progress.phase for event in progress]
    queries = [types_pb2.PHASE_SCORE_QUERIES] if mode is LOOKAHEAD else []
    assert list(dict.fromkeys(phases)) == [
        types_pb2.PHASE_QUEUED,
        types_pb2.PHASE_SCORE_PREFILL,
        *queries,
        types_pb2.PHASE_SCORE_K_PASS,
        types_pb2.PHASE_SCORE_SELECT,
    ]
    assert phases.count(types_pb2.PHASE_SCORE_PREFILL) == 1 + -(-100 // CHUNK_TOKENS)
    result = last.result
    assert result.boot_id == BOOT_ID
    assert not result.HasField("kept")
    assert result.counts.prompt_tokens == result.counts.prefilled_tokens == 100
    assert result.counts.queries == (8 if mode is LOOKAHEAD else 16)
    assert wire.importance_from_bytes(result.chunk_importance, chunks=25).min() > 0
    plan = wire.plan_from(result.plan)
    assert plan.settings == wire.plan_settings_from(request.settings)
    assert result.plan.kept_chunks == 8  # 30 % of 25
    assert result.plan.ranked_chunks == 5  # but the first and the last two
    assert len(plan.settings_digest) == 32
    await scorer.settles_at(pages=0, handles=0)


@MODES
async def test_stage_times_add_up_and_every_stage_that_ran_is_in_the_metrics(
    scorer: RunningScorer, mode: dict[str, Any]
) -> None:
    result = await scorer.score(request_for(prompt(400), settings=mode))
    times = result.timings
    stages = (
        times.queue_s + times.restore_s + times.prefill_s + times.queries_s
        + times.k_pass_s + times.select_s
    )  # fmt: skip
    assert 0 < stages <= times.total_s
    assert times.total_s - stages <= max(0.05 * times.total_s, 0.010)
    assert (times.queries_s > 0) is (mode is LOOKAHEAD)
    for stage in ("queue", "restore", "prefill", "k_pass", "select", "score"):
        assert scorer.sample(f"scorer_{stage}_seconds_count") == 1
    assert scorer.sample("scorer_lookahead_seconds_count") == (mode is LOOKAHEAD)
    assert scorer.sample("scorer_scored_tokens_total") == 400
    assert scorer.sample("scorer_prefilled_tokens_total") == 400
    name = "lookahead" if mode is LOOKAHEAD else "tail_window"
    assert scorer.sample("scorer_requests_total", query_mode=name, outcome="ok") == 1


async def test_importance_is_sent_only_if_asked_for(scorer: RunningScorer) -> None:
    assert (await scorer.score(request_for(prompt(100)))).chunk_importance == b""


@MODES
async def test_a_kept_sequence_is_reused_for_a_longer_prompt(
    scorer: RunningScorer, mode: dict[str, Any]
) -> None:
    ids = prompt(150)
    first = await scorer.score(request_for(ids[:90], settings=mode, keep_handle="a"))
    assert (first.kept.handle, first.kept.tokens) == ("a", 90)
    await scorer.settles_at(pages=12, handles=1)
    longer = request_for(
        ids, settings=mode, base=base("a", 90), keep_handle="b", include_importance=True
    )
    warm = await scorer.score(longer)
    assert warm.counts.restored_tokens == 90
    assert warm.counts.prefilled_tokens == 60
    cold = await scorer.score(request_for(ids, settings=mode, include_importance=True))
    assert cold.counts.restored_tokens == 0
    assert warm.plan == cold.plan
    assert warm.chunk_importance == cold.chunk_importance
    assert scorer.sample("scorer_restored_tokens_total") == 90
    # 11 pages are shared, the twelfth was copied before it grew: 12 and 8 more.
    await scorer.settles_at(pages=20, handles=2)


async def test_a_base_the_scorer_does_not_hold_as_declared_is_refused(
    scorer: RunningScorer,
) -> None:
    ids = prompt(150)
    await scorer.score(request_for(ids[:90], keep_handle="a"))
    forwards = scorer.decoder.forwards
    for wrong, expected in (
        (request_for(ids, base=base("unknown", 90)), errors.KvEvicted),
        (request_for(ids, base=base("a", 89)), errors.BaseMismatch),
        (request_for(ids, base=base("a", 91)), errors.BaseMismatch),
        (request_for(ids[:80], base=base("a", 90)), errors.BaseMismatch),
        (request_for(prompt(150, seed=1), base=base("a", 90)), errors.BaseMismatch),
        (request_for(ids, keep_handle="a"), errors.AlreadyExists),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await scorer.score(wrong)
        assert type(status.raised(caught.value)) is expected
    assert scorer.decoder.forwards == forwards
    await scorer.settles_at(pages=12, handles=1)


async def test_release_frees_handles_and_a_repeat_is_harmless(scorer: RunningScorer) -> None:
    await scorer.score(request_for(prompt(90), keep_handle="a"))
    release = scorer_pb2.ScorerReleaseRequest(instance_id="gateway", handles=["a", "unknown"])
    freed = await scorer.stub.Release(release, timeout=TIMEOUT_S)
    assert (freed.released, freed.boot_id) == (1, BOOT_ID)
    assert freed.freed_bytes == 12 * scorer.scorer.cache.page_bytes
    again = await scorer.stub.Release(release, timeout=TIMEOUT_S)
    assert (again.released, again.freed_bytes) == (0, 0)
    await scorer.settles_at(pages=0, handles=0)


async def test_a_new_gateway_instance_frees_what_the_old_one_kept(scorer: RunningScorer) -> None:
    await scorer.score(request_for(prompt(90), keep_handle="a"))
    await scorer.score(request_for(prompt(90), instance_id="restarted-gateway"))
    await scorer.settles_at(pages=0, handles=0)


async def cancelled_at_forward(
    scorer: RunningScorer, request: scorer_pb2.ScoreRequest, forward: int
) -> None:
    """Cancel while the GPU thread is inside the forward of this number."""
    scorer.decoder.stop_before = forward
    call = scorer.stub.Score(request, timeout=TIMEOUT_S)
    await call.read()
    await eventually(scorer.decoder.reached.is_set)
    call.cancel()
    await scorer.learns_of_the_cancel()
    scorer.decoder.gate.set()


@pytest.mark.parametrize("forward", [0, 3, 7, 10, 14], ids=lambda n: f"forward {n}")
async def test_a_cancel_in_prefill_or_lookahead_leaves_no_page_in_use(
    scorer: RunningScorer, forward: int
) -> None:
    # 100 tokens: forwards 0 to 6 are prefill chunks, 7 to 14 the lookahead.
    request = request_for(prompt(100), settings=LOOKAHEAD, keep_handle="a")
    await cancelled_at_forward(scorer, request, forward)
    await scorer.settles_at(pages=0, handles=0)
    assert scorer.decoder.forwards == forward + 1
    assert scorer.sample("scorer_requests_total", query_mode="lookahead", outcome="cancelled") == 1
    scorer.decoder.stop_before = None
    assert (await scorer.score(request)).kept.tokens == 100


@pytest.mark.parametrize("phase", ["QUEUED", "SCORE_K_PASS", "SCORE_SELECT"])
async def test_a_cancel_at_any_progress_leaves_no_page_in_use(
    scorer: RunningScorer, phase: str
) -> None:
    call = scorer.stub.Score(request_for(prompt(400), keep_handle="a"), timeout=TIMEOUT_S)
    while (await call.read()).progress.phase != types_pb2.Phase.Value(f"PHASE_{phase}"):
        pass
    call.cancel()
    name, labels = "scorer_requests_total", {"query_mode": "tail_window"}
    await eventually(
        lambda: (
            scorer.sample(name, outcome="cancelled", **labels)
            + scorer.sample(name, outcome="ok", **labels)
            == 1
        )
    )
    # A result that was already on its way is its caller's to release.
    is_delivered = scorer.sample(name, outcome="ok", **labels) == 1
    await scorer.settles_at(pages=50 * is_delivered, handles=int(is_delivered))


async def test_a_sequence_kept_for_a_caller_who_never_learns_of_it_is_freed(
    scorer: RunningScorer,
) -> None:
    events = scorer.servicer.Score(request_for(prompt(100), keep_handle="a"), None)
    await anext(events)
    await eventually(lambda: "a" in scorer.scorer.handles)
    await eventually(lambda: scorer.gpu.jobs_running == 0)
    await events.aclose()
    await scorer.settles_at(pages=0, handles=0)


async def test_a_deadline_that_expires_ends_the_scoring(scorer: RunningScorer) -> None:
    scorer.decoder.stop_before = 2
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in scorer.stub.Score(request_for(prompt(100), keep_handle="a"), timeout=1.5):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await scorer.learns_of_the_cancel()
    scorer.decoder.gate.set()
    await scorer.settles_at(pages=0, handles=0)
    assert scorer.decoder.forwards == 3


async def test_scorings_take_turns_and_do_not_change_each_other(scorer: RunningScorer) -> None:
    requests = [
        request_for(prompt(100 + 30 * n, seed=n), settings=mode, include_importance=True)
        for n, mode in enumerate((LOOKAHEAD, TAIL_WINDOW, LOOKAHEAD))
    ]
    alone = [await scorer.score(request) for request in requests]
    together = await asyncio.gather(*map(scorer.score, requests))
    for one, other in zip(alone, together, strict=True):
        assert one.plan == other.plan
        np.testing.assert_allclose(
            wire.importance_from_bytes(one.chunk_importance, chunks=one.plan.selectable_chunks),
            wire.importance_from_bytes(other.chunk_importance, chunks=one.plan.selectable_chunks),
            rtol=1e-6,
        )
    await scorer.settles_at(pages=0, handles=0)


async def test_more_scorings_than_the_queue_takes_are_refused(model_dir: Path) -> None:
    async with running_scorer(model_dir, jobs_max=1) as scorer:
        scorer.decoder.stop_before = 1
        first = asyncio.create_task(scorer.score(request_for(prompt(100))))
        await eventually(scorer.decoder.reached.is_set)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await scorer.score(request_for(prompt(100)))
        assert type(status.raised(caught.value)) is errors.QueueFull
        scorer.decoder.gate.set()
        assert (await first).counts.prefilled_tokens == 100


async def test_info_names_the_draft_and_its_default_mode(
    scorer: RunningScorer, model_dir: Path
) -> None:
    info = await scorer.stub.GetInfo(scorer_pb2.ScorerGetInfoRequest(), timeout=TIMEOUT_S)
    assert (info.model.name, info.model.architecture) == ("tiny-llama", "llama")
    assert (info.model.layers, info.model.layers_used) == (3, 3)
    assert info.model.positions_max == POSITIONS_MAX
    assert (info.model.dtype, info.model.device) == ("float64", "cpu")
    assert len(info.model.revision) == len(info.model.tokenizer_digest) == 64
    assert info.default_query_mode == types_pb2.QUERY_MODE_LOOKAHEAD
    assert (info.lookahead_tokens_max, info.window_tokens_max) == (64, 256)
    assert (info.head_set, info.boot_id) == ("all", BOOT_ID)
    assert info.kv.pages_total == 4096 // 8
    async with running_scorer(model_dir, draft_layers=2) as short:
        info = await short.stub.GetInfo(scorer_pb2.ScorerGetInfoRequest(), timeout=TIMEOUT_S)
        assert (info.model.layers, info.model.layers_used) == (3, 2)
        assert info.default_query_mode == types_pb2.QUERY_MODE_TAIL_WINDOW
