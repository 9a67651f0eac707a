"""The shipped text and its questions belong together."""

from __future__ import annotations

import json
from importlib import resources

TEXT = resources.files("demo").joinpath("handbook.txt").read_text(encoding="utf-8")
QUESTIONS = json.loads(resources.files("demo").joinpath("questions.json").read_text("utf-8"))


def test_there_are_five_questions_with_different_facts() -> None:
    assert len(QUESTIONS) == 5
    assert len({item["expect"] for item in QUESTIONS}) == 5


def test_every_fact_is_stated_exactly_once_in_the_text() -> None:
    assert {item["expect"]: TEXT.count(item["expect"]) for item in QUESTIONS} == {
        item["expect"]: 1 for item in QUESTIONS
    }


def test_no_question_contains_its_answer() -> None:
    assert not [q for q in QUESTIONS if q["expect"].lower() in q["ask"].lower()]
