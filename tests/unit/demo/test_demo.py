"""What the demo concludes from its answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from client.results import Decision, Finished, finished_from
from demo.__main__ import RANKED_CHUNKS_MIN, Answer, _problems, _questions, _verdict
from tests.unit.client.fake_gateway import FINISHED


def _answer(path: str, *, is_right: bool | None = True, ranked_chunks: int = 20) -> Answer:
    finished: Finished = finished_from(FINISHED)
    assert finished.plan is not None
    finished = replace(
        finished,
        decision=Decision(path, "ELIGIBLE"),
        plan=replace(finished.plan, ranked_chunks=ranked_chunks),
        timings=replace(finished.timings, time_to_first_token_s=2.0 if path == "SPARSE" else 5.0),
    )
    return Answer(mode=path.lower(), text="it says so", is_right=is_right, finished=finished)


def test_a_sparse_turn_with_two_right_answers_has_no_problem() -> None:
    assert _problems((_answer("SPARSE"), _answer("DENSE"))) == []


@pytest.mark.parametrize(
    ("sparse", "dense", "word"),
    [
        (_answer("DENSE"), _answer("DENSE"), "did not go sparse"),
        (_answer("SPARSE", ranked_chunks=RANKED_CHUNKS_MIN - 1), _answer("DENSE"), "fewer than"),
        (_answer("SPARSE", is_right=False), _answer("DENSE"), "sparse answer lacks"),
        (_answer("SPARSE"), _answer("DENSE", is_right=False), "dense answer lacks"),
    ],
)
def test_each_thing_that_must_hold_is_a_problem_if_it_does_not(
    sparse: Answer, dense: Answer, word: str
) -> None:
    (problem,) = _problems((sparse, dense))
    assert word in problem


def test_a_text_of_ones_own_has_no_right_answer() -> None:
    unknown = (_answer("SPARSE", is_right=None), _answer("DENSE", is_right=None))
    assert _problems(unknown) == []
    assert "right answers" not in _verdict([unknown])


def test_the_verdict_counts_right_answers_and_compares_first_tokens() -> None:
    pairs = [
        (_answer("SPARSE"), _answer("DENSE")),
        (_answer("SPARSE", is_right=False), _answer("DENSE")),
    ]
    assert "sparse 2.00 s, dense 5.00 s; sparse is 2.50 times as fast" in _verdict(pairs)
    assert "right answers: sparse 1/2, dense 2/2" in _verdict(pairs)


def test_without_a_question_the_five_shipped_ones_are_asked() -> None:
    assert len(_questions(is_shipped=True, ask=None)) == 5
    assert [q.expect for q in _questions(is_shipped=False, ask="Why?")] == [None]
