from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from gateway.ports import ScoreTimes, TargetTimes
from gateway.timings import STAGES, Walls, assemble

seconds = st.floats(min_value=0, max_value=100, allow_nan=False)


def _score_times() -> st.SearchStrategy[ScoreTimes]:
    names = list(ScoreTimes.__dataclass_fields__)
    return st.builds(ScoreTimes, **dict.fromkeys(names, seconds))


def _target_times() -> st.SearchStrategy[TargetTimes]:
    names = list(TargetTimes.__dataclass_fields__)
    return st.builds(TargetTimes, **dict.fromkeys(names, seconds))


def _walls() -> st.SearchStrategy[Walls]:
    names = list(Walls.__dataclass_fields__)
    return st.builds(Walls, **dict.fromkeys(names, seconds))


@given(
    walls=_walls(),
    score=st.none() | _score_times(),
    target=st.none() | _target_times(),
)
def test_the_stages_add_up_to_the_first_token(
    walls: Walls, score: ScoreTimes | None, target: TargetTimes | None
) -> None:
    timings = assemble(walls, score, target)
    assert set(timings.stages()) == set(STAGES)
    total = math.fsum(timings.stages().values())
    assert math.isclose(total, timings.time_to_first_token_s, abs_tol=1e-9)
    assert all(s >= 0 for name, s in timings.stages().items() if name != "other")
    whole = timings.time_to_first_token_s + timings.decode_s
    assert math.isclose(whole, timings.total_s, abs_tol=1e-9)


def test_calls_cost_what_the_services_do_not_account_for() -> None:
    walls = Walls(
        queue_s=1, tokenise_s=2, plan_s=0.5, score_s=10, target_s=20, first_token_s=34, total_s=40
    )
    score = ScoreTimes(queue_s=1, prefill_s=5, k_pass_s=2, total_s=8)
    target = TargetTimes(
        queue_s=2, protected_prefill_s=3, sparse_prefill_s=10, kick_off_s=2, first_token_s=17
    )
    timings = assemble(walls, score, target)
    assert timings.queue_s == 4
    assert timings.rpc_s == (10 - 8) + (20 - 17)
    assert timings.other_s == 34 - (4 + 2 + 0.5 + 5 + 2 + 3 + 10 + 2 + 5)
    assert timings.decode_s == 6


def test_a_failed_score_is_time_spent_on_calls() -> None:
    walls = Walls(score_s=3, target_s=1, first_token_s=4, total_s=4)
    timings = assemble(walls, None, TargetTimes(dense_prefill_s=1, first_token_s=1))
    assert timings.rpc_s == 3
    assert timings.other_s == 0


def test_a_service_whose_clock_runs_ahead_makes_no_negative_call() -> None:
    walls = Walls(target_s=1, first_token_s=1, total_s=1)
    timings = assemble(walls, None, TargetTimes(dense_prefill_s=1.5, first_token_s=1.5))
    assert timings.rpc_s == 0
    assert timings.other_s == -0.5
