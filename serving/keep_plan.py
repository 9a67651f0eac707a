"""The keep plan and the settings it was made under, as values. Pure; knows neither models nor gRPC.

A chunk is a run of `chunk_tokens` adjacent prompt tokens; chunk c covers positions
[c * chunk_tokens, min((c + 1) * chunk_tokens, M)). The scorer makes plans, the target executes
them, the gateway carries and reports them.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from serving.errors import PlanRejected


class QueryMode(enum.Enum):
    LOOKAHEAD = "lookahead"
    TAIL_WINDOW = "tail_window"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Everything about a request that shapes its keep plan; 2000 basis points are 20 %."""

    keep_basis_points: int = 2000
    chunk_tokens: int = 32
    tail_tokens: int = 512
    pool_tokens: int = 13
    query_mode: QueryMode = QueryMode.LOOKAHEAD
    lookahead_tokens: int = 8
    window_tokens: int = 16
    lookahead_temperature: float = 0.0
    lookahead_seed: int | None = None

    def __post_init__(self) -> None:
        # Float32 is what the wire carries: both of its ends must digest the same number. The sum
        # turns -0.0 into 0.0.
        with np.errstate(over="ignore"):
            temperature = float(np.float32(self.lookahead_temperature)) + 0.0
        object.__setattr__(self, "lookahead_temperature", temperature)

    @property
    def is_deterministic(self) -> bool:
        """False where the lookahead draws without a seed: never replay such a plan unasked."""
        greedy = self.lookahead_temperature == 0.0 or self.query_mode is QueryMode.TAIL_WINDOW
        return greedy or self.lookahead_seed is not None


@dataclass(frozen=True, slots=True)
class Run:
    """Half-open run [start, end) of chunks or positions; the user says which."""

    start: int
    end: int

    def __post_init__(self) -> None:
        assert 0 <= self.start < self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepPlan:
    """Kept chunks of one prompt, ascending, and how they came to be kept."""

    prompt_tokens: int
    settings: PlanSettings
    kept: tuple[Run, ...]  # of chunks
    forced: tuple[Run, ...]  # of chunks, a subset of kept
    protected_head_tokens: int
    protected_spans: tuple[Run, ...]  # of positions
    settings_digest: bytes

    @property
    def chunks_total(self) -> int:
        return chunk_count(self.prompt_tokens, self.settings.chunk_tokens)

    @property
    def selectable_chunks(self) -> int:
        return self.chunks_total - self.protected_head_tokens // self.settings.chunk_tokens

    @property
    def kept_chunks(self) -> int:
        return run_length(self.kept)

    @property
    def ranked_chunks(self) -> int:
        return self.kept_chunks - run_length(self.forced)

    @property
    def kept_tokens(self) -> int:
        """Kept prompt tokens, the protected head not counted."""
        return int(kept_positions(self).size)


def chunk_count(prompt_tokens: int, chunk_tokens: int) -> int:
    """ceil(prompt_tokens / chunk_tokens): the last chunk may be short."""
    return -(-prompt_tokens // chunk_tokens)


def chunks_kept_at(selectable_chunks: int, keep_basis_points: int) -> int:
    """k = ceil(n * keep) in integers: a float keep rate is one too many for some n."""
    return (selectable_chunks * keep_basis_points + 9999) // 10000


def tail_chunks(prompt_tokens: int, chunk_tokens: int, tail_tokens: int, kept_chunks: int) -> int:
    """Last chunks that are kept without ranking: they cover tail_tokens, at most max(2, k // 4).

    kept_chunks: k, the chunks kept in all. 0 tail_tokens force nothing.
    """
    if tail_tokens == 0:
        return 0
    total = chunk_count(prompt_tokens, chunk_tokens)
    covering = total - max(prompt_tokens - tail_tokens, 0) // chunk_tokens
    return min(covering, max(2, kept_chunks // 4))


def span_chunks(spans: Iterable[Run], chunk_tokens: int) -> set[int]:
    """Chunks that a span of positions touches."""
    return {
        chunk
        for span in spans
        for chunk in range(span.start // chunk_tokens, (span.end - 1) // chunk_tokens + 1)
    }


def runs_of(ascending: Iterable[int]) -> tuple[Run, ...]:
    """Strictly ascending indices as runs of Python integers, as few as possible."""
    runs: list[Run] = []
    for index in map(int, ascending):
        if runs and runs[-1].end == index:
            runs[-1] = Run(runs[-1].start, index + 1)
        else:
            assert not runs or runs[-1].end < index
            runs.append(Run(index, index + 1))
    return tuple(runs)


def run_length(runs: Sequence[Run]) -> int:
    return sum(run.end - run.start for run in runs)


def run_members(runs: Sequence[Run]) -> list[int]:
    return [index for run in runs for index in range(run.start, run.end)]


def kept_positions(plan: KeepPlan) -> np.ndarray:
    """Positions of all kept chunks at or after the protected head, ascending, int64 [kept]."""
    chunk_tokens, head = plan.settings.chunk_tokens, plan.protected_head_tokens
    parts = [
        np.arange(
            max(run.start * chunk_tokens, head),
            min(run.end * chunk_tokens, plan.prompt_tokens),
            dtype=np.int64,
        )
        for run in plan.kept
    ]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def settings_digest(
    settings: PlanSettings, *, head_set: str, draft_layers: int, protected_spans: Sequence[Run]
) -> bytes:
    """sha256 over all that shapes a plan besides the prompt, the models and the protected head."""
    fields = asdict(settings) | {"query_mode": settings.query_mode.value}
    if settings.query_mode is QueryMode.TAIL_WINDOW:
        for unused in ("lookahead_tokens", "lookahead_temperature", "lookahead_seed"):
            del fields[unused]
    else:
        del fields["window_tokens"]
    fields |= {
        "head_set": head_set,
        "draft_layers": draft_layers,
        "protected_spans": [[span.start, span.end] for span in protected_spans],
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()


def check_plan(
    plan: KeepPlan,
    *,
    prompt_tokens: int,
    protected_head_tokens: int,
    protected_spans: Sequence[Run],
) -> None:
    """Raise PlanRejected unless the plan fits this prompt and keeps what must be kept.

    Never repairs. The plan is not trusted in anything: it came over the wire.
    """
    _check_made_for(plan, prompt_tokens, protected_head_tokens, protected_spans)
    chunk_tokens = plan.settings.chunk_tokens
    first, total = protected_head_tokens // chunk_tokens, plan.chunks_total
    _check_runs(plan.kept, first=first, total=total)
    kept = np.zeros(total, dtype=bool)
    for run in plan.kept:
        kept[run.start : run.end] = True
    if not kept[-1]:
        raise PlanRejected("the keep plan drops the last prompt token")
    tail = tail_chunks(
        prompt_tokens, chunk_tokens, plan.settings.tail_tokens, int(np.count_nonzero(kept))
    )
    if not kept[max(total - tail, first) :].all():
        raise PlanRejected(f"the keep plan drops one of the last {tail} chunks")
    for span in protected_spans:
        if not kept[
            max(span.start // chunk_tokens, first) : chunk_count(span.end, chunk_tokens)
        ].all():
            raise PlanRejected(
                f"the keep plan drops some of the protected span {span.start} to {span.end}"
            )
    _check_forced(plan.forced, kept, first=first)


def _check_made_for(
    plan: KeepPlan,
    prompt_tokens: int,
    protected_head_tokens: int,
    protected_spans: Sequence[Run],
) -> None:
    if plan.settings.chunk_tokens < 1:
        raise PlanRejected("the keep plan has chunks of 0 tokens")
    if plan.prompt_tokens != prompt_tokens:
        raise PlanRejected(
            f"the keep plan is for {plan.prompt_tokens} tokens, the prompt has {prompt_tokens}"
        )
    if plan.protected_head_tokens != protected_head_tokens:
        raise PlanRejected(
            f"the keep plan assumes a protected head of {plan.protected_head_tokens} tokens, "
            f"the request says {protected_head_tokens}"
        )
    if protected_head_tokens >= prompt_tokens:
        raise PlanRejected("the protected head leaves no token for the keep plan")
    if tuple(plan.protected_spans) != tuple(protected_spans):
        raise PlanRejected("the keep plan was made for other protected spans")
    if any(span.end > prompt_tokens for span in protected_spans):
        raise PlanRejected("a protected span goes past the prompt")


def _check_runs(runs: Sequence[Run], *, first: int, total: int) -> None:
    if not runs:
        raise PlanRejected("the keep plan keeps nothing")
    free_from = first
    for run in runs:
        if run.start < free_from:
            raise PlanRejected("the keep plan's chunks are not ascending, or lie in the head")
        if run.end > total:
            raise PlanRejected(f"the keep plan goes past the last chunk, {total - 1}")
        free_from = run.end


def _check_forced(forced: Sequence[Run], kept: np.ndarray, *, first: int) -> None:
    if forced:
        _check_runs(forced, first=first, total=kept.size)
    if not all(kept[run.start : run.end].all() for run in forced):
        raise PlanRejected("the keep plan forces a chunk that it does not keep")
