"""Tables and pictures, checked as the text they print."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from client import render
from client.results import Chunk, KeepPlan, Timings, finished_from, plan_from
from tests.unit.client.fake_gateway import FINISHED, PLAN


def _printed(what: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.fixture
def plan() -> KeepPlan:
    return plan_from(PLAN)


def test_the_picture_shows_head_gaps_and_kept_chunks(plan: KeepPlan) -> None:
    # 320 tokens in 10 cells of one chunk: head, two ranked, five dropped, two forced.
    picture = render.plan_cells(plan, cells=10)
    assert picture.plain == "▀██·····▄▄"
    styles = [str(span.style) for span in picture.spans]
    assert styles == ["blue", "green", "green", *["dim"] * 5, "yellow", "yellow"]


def test_a_cell_that_is_partly_kept_is_lighter(plan: KeepPlan) -> None:
    # Cells of two chunks: head and ranked, ranked and dropped, dropped, dropped, forced.
    assert render.plan_cells(plan, cells=5).plain == "█▒··▄"


def test_a_prompt_shorter_than_the_picture_has_a_cell_a_token(plan: KeepPlan) -> None:
    tiny = replace(plan, prompt_tokens=3, kept=((0, 1),), forced=((0, 1),), protected_head_tokens=0)
    assert render.plan_cells(tiny, cells=80).plain == "▄▄▄"


def test_the_picture_is_one_line_at_any_width_and_has_a_key(plan: KeepPlan) -> None:
    for width, cells in ((40, 40), (200, 80)):
        picture, key, *rest = _printed(render.PlanPicture(plan), width=width).splitlines()
        assert len(picture) == cells
        assert "protected head" in key
        assert len(rest) == (width == 40)


def test_the_stage_table_leaves_out_what_took_nothing_and_fits_80_columns() -> None:
    timings = finished_from(FINISHED).timings
    text = _printed(render.stage_table(timings), width=80)
    assert "score: draft prefill" in text
    assert "50%" in text
    assert "score: select" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_every_stage_has_a_name_for_people() -> None:
    timings: Timings = finished_from(FINISHED).timings
    assert timings.stages().keys() == render.STAGE_NAMES.keys()


def test_the_summary_says_path_reason_and_counts() -> None:
    text = _printed(render.summary(finished_from(FINISHED)))
    assert "path SPARSE, reason ELIGIBLE" in text
    assert "kept 160 of 320 tokens (50%): head 32, 2 ranked and 2 forced chunks of 9" in text
    assert "320 prompt tokens: target ran 160" in text


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, ""), (1.0, "████"), (0.5, "██"), (0.125, "▌"), (7.0, "████")]
)
def test_a_bar_is_drawn_in_eighths(share: float, expected: str) -> None:
    assert render.bar(share, cells=4) == expected


def test_the_chunk_table_shows_every_column_in_80_columns() -> None:
    chunk = Chunk(
        chunk=42, start=1344, end=1376, importance=0.0125, state="RANKED", text="so many words " * 9
    )
    text = _printed(render.chunk_table("Most important chunks", [chunk]), width=80)
    for part in ("42", "1344-1375", "0.01250", "ranked", "so many words"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 80
