"""Values survive the wire, and messages that say nonsense are refused precisely."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from serving.errors import ContextLengthExceeded, InternalError, InvalidRequest
from serving.keep_plan import KeepPlan, PlanSettings, QueryMode, Run, runs_of
from serving.sampling_settings import Sampling, Stops
from serving.wire import (
    add_spans,
    fill_plan,
    fill_plan_settings,
    fill_sampling,
    fill_stops,
    ids_from_bytes,
    ids_to_bytes,
    importance_from_bytes,
    importance_to_bytes,
    plan_from,
    plan_settings_from,
    query_mode_from,
    query_mode_number,
    sampling_from,
    spans_from,
    stop_ids_from_bytes,
    stops_from,
)
from specprefill.v1 import types_pb2

UINT32_MAX = 2**32 - 1


def ids_of(data: bytes, *, vocab: int = 100, tokens_max: int = 4) -> np.ndarray:
    return ids_from_bytes(data, field="prompt_token_ids", vocab=vocab, tokens_max=tokens_max)


def test_token_ids_are_little_endian_uint32() -> None:
    assert ids_to_bytes([1, 256]) == b"\x01\0\0\0\0\x01\0\0"
    assert ids_of(b"\x01\0\0\0\0\x01\0\0", vocab=257).tolist() == [1, 256]


def test_no_token_ids_are_no_bytes() -> None:
    assert ids_to_bytes([]) == b""


@given(ids=st.lists(st.integers(0, UINT32_MAX), min_size=1, max_size=20))
def test_token_ids_come_back_as_they_were(ids: list[int]) -> None:
    back = ids_from_bytes(ids_to_bytes(ids), field="f", vocab=2**32, tokens_max=20)
    assert back.tolist() == ids
    assert back.dtype == np.uint32
    assert ids_to_bytes(back) == ids_to_bytes(ids)
    assert ids_to_bytes(np.array(ids, dtype=np.int64)) == ids_to_bytes(ids)


def test_token_ids_read_from_a_message_can_be_written_to() -> None:
    ids = ids_of(ids_to_bytes([1, 2]))
    ids[0] = 9
    assert ids.tolist() == [9, 2]


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.5]])
def test_what_is_no_token_id_is_our_bug(ids: list[int]) -> None:
    with pytest.raises(AssertionError):
        ids_to_bytes(np.array(ids))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt_token_ids is empty") as refused:
        ids_of(b"")
    assert refused.value.field == "prompt_token_ids"


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7])
def test_bytes_that_are_no_whole_ids_are_refused(length: int) -> None:
    with pytest.raises(InvalidRequest, match=f"has {length} bytes, which is no multiple of 4"):
        ids_of(b"\0" * length)


def test_a_prompt_past_the_models_positions_is_refused_with_both_numbers() -> None:
    assert ids_of(ids_to_bytes([0] * 4)).size == 4
    with pytest.raises(ContextLengthExceeded, match="has 5 tokens, the limit is 4") as refused:
        ids_of(ids_to_bytes([0] * 5))
    assert refused.value.metadata == {"limit": "4", "got": "5"}
    assert refused.value.field == "prompt_token_ids"


@pytest.mark.parametrize("bad", [100, 101, 2**31, UINT32_MAX])
def test_the_first_id_outside_the_vocabulary_is_named(bad: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ids_of(ids_to_bytes([99, bad, bad]))
    assert refused.value.message == (f"prompt_token_ids[1] is {bad}, token ids must be below 100")
    assert refused.value.metadata == {"limit": "100", "got": str(bad), "index": "1"}


def test_stop_ids_may_be_none_but_not_too_many_and_not_unknown() -> None:
    def stop_ids(ids: list[int]) -> frozenset[int]:
        return stop_ids_from_bytes(ids_to_bytes(ids), field="stop", vocab=10, ids_max=2)

    assert stop_ids([]) == frozenset()
    assert stop_ids([9, 9]) == {9}
    with pytest.raises(InvalidRequest, match="stop has 3 ids, the limit is 2"):
        stop_ids([1, 1, 1])
    with pytest.raises(InvalidRequest, match=r"stop\[1\] is 10, token ids must be below 10"):
        stop_ids([1, 10])


def test_importance_comes_back_as_it_was_and_a_wrong_length_is_the_senders_bug() -> None:
    importance = np.array([0.5, 1e-9, 3.0], dtype=np.float32)
    data = importance_to_bytes(importance)
    assert data == struct.pack("<3f", 0.5, 1e-9, 3.0)
    assert np.array_equal(importance_from_bytes(data, chunks=3), importance)
    with pytest.raises(InternalError):
        importance_from_bytes(data, chunks=4)


@st.composite
def plan_settings(draw: st.DrawFn) -> PlanSettings:
    uint32 = st.integers(0, UINT32_MAX)
    return PlanSettings(
        keep_basis_points=draw(uint32),
        chunk_tokens=draw(st.integers(1, 64)),
        tail_tokens=draw(uint32),
        pool_tokens=draw(uint32),
        query_mode=draw(st.sampled_from(QueryMode)),
        lookahead_tokens=draw(uint32),
        window_tokens=draw(uint32),
        # Any double: settings round it to what the wire can carry.
        lookahead_temperature=draw(st.floats(allow_nan=False)),
        lookahead_seed=draw(st.none() | st.integers(0, 2**64 - 1)),
    )


@st.composite
def runs_within(draw: st.DrawFn, end: int) -> tuple[Run, ...]:
    return runs_of(sorted(draw(st.sets(st.integers(0, end - 1), max_size=20))))


@st.composite
def plans(draw: st.DrawFn) -> KeepPlan:
    settings = draw(plan_settings())
    prompt_tokens = draw(st.integers(1, 2000))
    chunks = st.integers(0, -(-prompt_tokens // settings.chunk_tokens) - 1)
    kept = draw(st.sets(chunks, min_size=1, max_size=20))
    forced = draw(st.sets(st.sampled_from(sorted(kept))))
    return KeepPlan(
        prompt_tokens=prompt_tokens,
        settings=settings,
        kept=runs_of(sorted(kept)),
        forced=runs_of(sorted(forced)),
        protected_head_tokens=draw(st.integers(0, prompt_tokens)),
        protected_spans=draw(runs_within(prompt_tokens)),
        settings_digest=draw(st.binary(max_size=32)),
    )


@given(settings=plan_settings())
def test_plan_settings_survive_the_wire(settings: PlanSettings) -> None:
    message = types_pb2.PlanSettings()
    fill_plan_settings(message, settings)
    sent = types_pb2.PlanSettings.FromString(message.SerializeToString())
    assert plan_settings_from(sent) == settings


@given(plan=plans())
@examples(deadline=None)
def test_a_keep_plan_survives_the_wire(plan: KeepPlan) -> None:
    message = types_pb2.KeepPlan()
    fill_plan(message, plan)
    sent = types_pb2.KeepPlan.FromString(message.SerializeToString())
    assert plan_from(sent) == plan
    assert sent.kept_tokens == plan.kept_tokens
    assert sent.kept_chunks == plan.kept_chunks
    assert sent.ranked_chunks == plan.ranked_chunks
    assert sent.selectable_chunks == plan.selectable_chunks


def a_plan() -> KeepPlan:
    return KeepPlan(
        prompt_tokens=100,
        settings=PlanSettings(),
        kept=(Run(0, 1), Run(3, 4)),
        forced=(Run(3, 4),),
        protected_head_tokens=5,
        protected_spans=(Run(96, 98),),
        settings_digest=b"digest",
    )


def test_the_message_carries_the_counts_of_the_plan() -> None:
    message = types_pb2.KeepPlan()
    fill_plan(message, a_plan())
    # Chunks of 32: positions 5 to 31, and the last chunk has 4 tokens.
    assert message.kept_tokens == 27 + 4
    assert message.kept_chunks == 2
    assert message.ranked_chunks == 1
    assert message.selectable_chunks == 4


def test_filling_a_message_leaves_nothing_of_what_was_in_it() -> None:
    message = types_pb2.KeepPlan()
    fill_plan(message, a_plan())
    message.settings.lookahead_seed = 7
    fill_plan(message, a_plan())
    assert plan_from(message) == a_plan()


def test_an_empty_run_is_refused_not_asserted() -> None:
    message = types_pb2.KeepPlan()
    fill_plan(message, a_plan())
    message.kept.add(first_chunk=9, chunks=0)
    with pytest.raises(InvalidRequest, match=r"plan.kept\[2\] is an empty run") as refused:
        plan_from(message)
    assert refused.value.field == "plan.kept"


@pytest.mark.parametrize("number", [0, 3, 77])
def test_an_unknown_query_mode_is_refused_by_number(number: int) -> None:
    message = types_pb2.PlanSettings(query_mode=number)
    with pytest.raises(InvalidRequest, match=f"settings.query_mode is {number}, it must be one"):
        plan_settings_from(message)


def test_the_numbers_of_query_modes_are_those_of_the_proto() -> None:
    assert query_mode_number(QueryMode.LOOKAHEAD) == types_pb2.QUERY_MODE_LOOKAHEAD
    assert query_mode_number(QueryMode.TAIL_WINDOW) == types_pb2.QUERY_MODE_TAIL_WINDOW
    for mode in QueryMode:
        assert query_mode_from(query_mode_number(mode), field="f") is mode


def spans(*bounds: tuple[int, int]) -> list[types_pb2.PositionSpan]:
    return [types_pb2.PositionSpan(start=start, end=end) for start, end in bounds]


def test_spans_that_touch_and_end_with_the_prompt_pass() -> None:
    assert spans_from(spans((0, 2), (2, 3), (8, 10)), 10) == (Run(0, 2), Run(2, 3), Run(8, 10))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (spans((3, 3)), r"\[0\] \(3 to 3\) is empty"),
        (spans((4, 3)), r"\[0\] \(4 to 3\) is empty"),
        (spans((0, 3), (2, 4)), r"\[1\] \(2 to 4\) overlaps"),
        (spans((5, 6), (0, 1)), r"\[1\] \(0 to 1\) overlaps the span before it, or precedes it"),
        (spans((0, 1), (9, 11)), r"\[1\] \(9 to 11\) goes past the prompt's 10 tokens"),
        (spans((UINT32_MAX - 1, UINT32_MAX)), "goes past the prompt"),
    ],
)
def test_spans_out_of_order_or_range_are_refused(
    wrong: list[types_pb2.PositionSpan], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        spans_from(wrong, 10)
    assert refused.value.field == "protected_spans"


def test_too_many_spans_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="has 3 spans, the limit is 2"):
        spans_from(spans((0, 1), (2, 3), (4, 5)), 10, spans_max=2)


@given(runs=runs_within(300))
def test_spans_survive_the_wire(runs: tuple[Run, ...]) -> None:
    message = types_pb2.KeepPlan()
    add_spans(message.protected_spans, runs)
    assert spans_from(message.protected_spans, 300) == runs


def test_unset_sampling_takes_the_defaults_and_zero_is_not_unset() -> None:
    defaults = Sampling(temperature=0.5, top_k=7, top_p=0.25, seed=3)
    assert sampling_from(types_pb2.SamplingParams(), defaults=defaults) == defaults
    zeros = types_pb2.SamplingParams(temperature=0.0, top_k=0, top_p=0.0, seed=0)
    assert sampling_from(zeros, defaults=defaults) == Sampling(
        temperature=0.0, top_k=0, top_p=0.0, seed=0
    )


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.5, top_k=9, top_p=0.75, seed=2**64 - 1)]
)
def test_sampling_survives_the_wire(sampling: Sampling) -> None:
    message = types_pb2.SamplingParams(seed=1)
    fill_sampling(message, sampling)
    defaults = Sampling(temperature=9.0, top_k=99, top_p=0.1)
    assert sampling_from(message, defaults=defaults) == sampling


def test_stops_survive_the_wire() -> None:
    stops = Stops(
        max_tokens=5,
        stop_strings=("end", "\n\n"),
        stop_token_ids=frozenset({4, 2}),
        ignore_end_tokens=True,
    )
    message = types_pb2.StopConditions()
    fill_stops(message, stops)
    assert stops_from(message, max_tokens_default=1, vocab=5) == stops


def test_unset_max_tokens_take_the_default_and_zero_is_left_to_be_refused() -> None:
    unset, zero = types_pb2.StopConditions(), types_pb2.StopConditions(max_tokens=0)
    assert stops_from(unset, max_tokens_default=9, vocab=5) == Stops(max_tokens=9)
    assert stops_from(zero, max_tokens_default=9, vocab=5) == Stops(max_tokens=0)


def test_a_stop_id_outside_the_vocabulary_is_refused() -> None:
    message = types_pb2.StopConditions(stop_token_ids=ids_to_bytes([1, 5]))
    with pytest.raises(InvalidRequest, match=r"stop.stop_token_ids\[1\] is 5") as refused:
        stops_from(message, max_tokens_default=9, vocab=5)
    assert refused.value.field == "stop.stop_token_ids"
