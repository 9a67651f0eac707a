"""Tables and pictures for people: stages, counts, which parts of a prompt were kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from client.results import (
    Chunk,
    Decision,
    Explanation,
    Finished,
    KeepPlan,
    Progress,
    Reply,
    Timings,
)

PICTURE_CELLS = 80
BAR_CELLS = 24
SHADES = "░▒▓█"
HEAD = "▀"
FORCED = "▄"
DROPPED = "·"
EIGHTHS = " ▏▎▍▌▋▊▉"

STAGE_NAMES = {
    "queue_s": "waiting in queues",
    "tokenise_s": "tokenise",
    "look_up_s": "look up",
    "plan_s": "plan",
    "score_restore_s": "score: restore draft",
    "score_prefill_s": "score: draft prefill",
    "score_queries_s": "score: lookahead",
    "score_k_pass_s": "score: pass over K",
    "score_select_s": "score: select",
    "target_restore_s": "target: restore",
    "protected_prefill_s": "target: protected head",
    "sparse_prefill_s": "target: kept tokens",
    "dense_prefill_s": "target: whole prompt",
    "kick_off_s": "target: kick-off",
    "rpc_s": "between services",
    "other_s": "other",
}


def stage_table(timings: Timings) -> Table:
    """Where the time to the first token went. Stages that took nothing are left out."""
    table = Table(title="Time to the first token", title_justify="left", box=None, pad_edge=False)
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    total = timings.time_to_first_token_s
    for name, seconds in timings.stages().items():
        if round(seconds, 3) > 0:
            share = seconds / total if total else 0.0
            label = STAGE_NAMES.get(name, name)
            table.add_row(label, f"{seconds:.3f}", f"{share:.0%}", bar(share))
    table.add_row("first token", f"{total:.3f}", "", "", style="bold", end_section=True)
    table.add_row("decode after it", f"{timings.decode_s:.3f}")
    return table


def summary(reply: Reply | Finished) -> RenderableType:
    """The stage table, the counts and, for a sparse prefill, the picture."""
    counts = reply.counts
    parts: list[RenderableType] = [Text(decision_line(reply.decision), style="bold")]
    if reply.plan is not None and reply.decision.path == "SPARSE":
        parts.append(Text(kept_line(reply.plan)))
        parts.append(PlanPicture(reply.plan))
    parts.append(
        Text(
            f"{counts.prompt_tokens:,} prompt tokens: target ran {counts.executed_tokens:,}, "
            f"draft {counts.draft_prefilled_tokens:,}; "
            f"{counts.completion_tokens:,} reply tokens, {reply.finish_reason}"
        )
    )
    parts += ["", stage_table(reply.timings)]
    return Group(*parts)


def progress_line(event: Progress) -> str:
    phase = event.phase.lower().replace("_", " ")
    return f"{phase} {event.done_tokens}/{event.total_tokens}" if event.total_tokens else phase


def decision_line(decision: Decision) -> str:
    return f"path {decision.path}, reason {decision.reason}"


def kept_line(plan: KeepPlan) -> str:
    kept = plan.protected_head_tokens + plan.kept_tokens
    return (
        f"kept {kept:,} of {plan.prompt_tokens:,} tokens ({kept / plan.prompt_tokens:.0%}): "
        f"head {plan.protected_head_tokens}, {plan.ranked_chunks} ranked and "
        f"{plan.kept_chunks - plan.ranked_chunks} forced chunks of {plan.selectable_chunks}"
    )


@dataclass(frozen=True, slots=True)
class PlanPicture:
    """One line for the prompt from first to last token, at most PICTURE_CELLS wide, and its key.

    Without colours it still says what is what: shades are ranked chunks (the darker, the more of
    the cell), half blocks were kept without ranking.
    """

    plan: KeepPlan

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield plan_cells(self.plan, min(PICTURE_CELLS, options.max_width))
        key = Text("", "dim")
        for glyph, style, meaning in (
            (HEAD, "blue", "protected head"),
            (FORCED, "yellow", "forced"),
            (SHADES, "green", "ranked by importance"),
            (DROPPED, "dim", "dropped"),
        ):
            key.append(glyph, style).append(f" {meaning}  ")
        yield key


def plan_cells(plan: KeepPlan, cells: int) -> Text:
    """The picture's cells; each stands for what fills most of the kept part of its positions."""
    cells = min(cells, plan.prompt_tokens)
    chunk, head = plan.settings.chunk_tokens, plan.protected_head_tokens
    kept = _positions(plan.kept, chunk, plan.prompt_tokens)
    forced = _positions(plan.forced, chunk, plan.prompt_tokens)
    picture = Text(no_wrap=True)
    for cell in range(cells):
        start = cell * plan.prompt_tokens // cells
        end = (cell + 1) * plan.prompt_tokens // cells
        in_head = max(min(head, end) - start, 0)
        own = _overlap(kept, max(start, head), end)
        full = in_head + own
        if not full:
            picture.append(DROPPED, "dim")
        elif in_head * 2 > full:
            picture.append(HEAD, "blue")
        elif _overlap(forced, max(start, head), end) * 2 > own:
            picture.append(FORCED, "yellow")
        else:
            shade = round(full / (end - start) * len(SHADES)) - 1
            picture.append(SHADES[max(shade, 0)], "green")
    return picture


def explanation_view(explanation: Explanation, *, most: int) -> RenderableType:
    """Decision, picture, and the most and the least important chunks."""
    parts: list[RenderableType] = [Text(decision_line(explanation.decision), style="bold")]
    if explanation.plan is not None:
        parts += [Text(kept_line(explanation.plan)), PlanPicture(explanation.plan)]
    ranked = sorted(explanation.chunks, key=lambda c: (-c.importance, c.chunk))
    if ranked:
        parts += ["", chunk_table("Most important chunks", ranked[:most])]
        parts += ["", chunk_table("Least important chunks", ranked[most:][-most:])]
    return Group(*parts)


def chunk_table(title: str, chunks: Sequence[Chunk]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, expand=True)
    table.add_column("chunk", justify="right")
    table.add_column("positions", justify="right")
    table.add_column("importance", justify="right")
    table.add_column("state")
    # What the others leave is the text's: without a ratio it would take their room.
    table.add_column("text", overflow="ellipsis", no_wrap=True, ratio=1)
    for chunk in chunks:
        text = Text(" ".join((chunk.text or "").split()))
        table.add_row(
            str(chunk.chunk),
            f"{chunk.start}-{chunk.end - 1}",
            f"{chunk.importance:.5f}",
            chunk.state.lower().replace("_", " "),
            text,
        )
    return table


def bar(share: float, cells: int = BAR_CELLS) -> str:
    """A bar of eighths of a cell; share 0..1."""
    eighths = round(max(0.0, min(share, 1.0)) * cells * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (EIGHTHS[rest] if rest else "")


def _positions(
    runs: Sequence[tuple[int, int]], chunk_tokens: int, prompt_tokens: int
) -> list[tuple[int, int]]:
    """Runs of chunks as runs of positions."""
    return [(a * chunk_tokens, min(b * chunk_tokens, prompt_tokens)) for a, b in runs]


def _overlap(runs: Sequence[tuple[int, int]], start: int, end: int) -> int:
    """Positions of [start, end) inside the runs."""
    return sum(max(min(b, end) - max(a, start), 0) for a, b in runs)
