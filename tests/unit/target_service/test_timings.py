"""Every moment up to the first token belongs to exactly one stage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from target_service.timings import RequestClock, Stage


class HandClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_stage_gets_the_time_from_its_begin_to_the_next() -> None:
    time_s = HandClock()
    clock = RequestClock(time_s=time_s, started_at=0.0)
    for stage, seconds in (
        (Stage.RESTORE, 1.0),
        (Stage.PROTECTED_PREFILL, 2.0),
        (Stage.SPARSE_PREFILL, 4.0),
        (Stage.KICK_OFF, 8.0),
    ):
        time_s.now += seconds
        clock.enter(stage)
    time_s.now += 16.0
    timings = clock.first_token()
    assert timings.queue_s == 1.0
    assert timings.restore_s == 2.0
    assert timings.protected_prefill_s == 4.0
    assert timings.sparse_prefill_s == 8.0
    assert timings.dense_prefill_s == 0.0
    assert timings.kick_off_s == 16.0
    assert timings.first_token_s == timings.total_s == 31.0


def test_waiting_for_a_turn_is_queueing_in_any_stage() -> None:
    time_s = HandClock()
    clock = RequestClock(time_s=time_s, started_at=0.0)
    clock.enter(Stage.DENSE_PREFILL)
    time_s.now = 1.0
    with clock.queued():
        time_s.now = 11.0
    time_s.now = 13.0
    timings = clock.first_token()
    assert (timings.queue_s, timings.dense_prefill_s) == (10.0, 3.0)


def test_what_comes_after_the_first_token_is_decoding() -> None:
    time_s = HandClock()
    clock = RequestClock(time_s=time_s, started_at=0.0)
    time_s.now = 1.0
    clock.first_token()
    with clock.queued():
        time_s.now = 4.0
    timings = clock.total()
    assert (timings.queue_s, timings.first_token_s, timings.decode_s) == (1.0, 1.0, 3.0)
    assert timings.total_s == 4.0


@given(st.lists(st.tuples(st.sampled_from(Stage), st.floats(0, 10), st.floats(0, 10)), max_size=20))
def test_the_stages_always_add_up(steps: list[tuple[Stage, float, float]]) -> None:
    time_s = HandClock()
    clock = RequestClock(time_s=time_s, started_at=0.0)
    for stage, work_s, wait_s in steps:
        clock.enter(stage)
        time_s.now += work_s
        with clock.queued():
            time_s.now += wait_s
    timings = clock.first_token()
    stages = sum(getattr(timings, f"{stage.value}_s") for stage in Stage)
    assert stages == pytest.approx(time_s.now)
    assert timings.first_token_s == time_s.now
