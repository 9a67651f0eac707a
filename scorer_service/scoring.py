"""The steps of one scoring over a draft sequence of its own: prefill, queries, K pass, select."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from engine.attention import RUNS_MAX
from engine.decoder import Decoder
from engine.forward import fill_chunk, settle
from engine.kv_cache import PagedKvCache
from engine.stage_clock import StageClock
from scorer_service.importance import RunningImportance
from scorer_service.keep import Budget, mean_per_chunk, select
from scorer_service.lookahead import Lookahead, QueryTap
from scorer_service.timings import Stage
from serving.keep_plan import KeepPlan, PlanSettings, QueryMode, Run, settings_digest

HEAD_SET = "all"
# Layers times tokens that one step of the K pass reads: a fraction of a second on a CPU.
K_PASS_STEP_TOKENS = 2**18


class Phase(enum.Enum):
    PREFILL = "prefill"
    QUERIES = "queries"
    K_PASS = "k_pass"
    SELECT = "select"


@dataclass(frozen=True, slots=True)
class ScoreProgress:
    phase: Phase
    done_tokens: int
    total_tokens: int


@dataclass(slots=True, kw_only=True)
class ScoreJob:
    """A validated request. prompt_ids: uint32 [tokens]; base: a stored handle and its length.

    is_kept turns true when the draft sequence was stored under keep_handle.
    """

    request_id: str
    instance_id: str
    prompt_ids: np.ndarray
    settings: PlanSettings
    protected_head_tokens: int = 0
    protected_spans: tuple[Run, ...] = ()
    base: tuple[str, int] | None = None
    keep_handle: str | None = None
    lease_s: float
    is_kept: bool = field(default=False, init=False)

    @property
    def prompt_tokens(self) -> int:
        return int(self.prompt_ids.size)

    @property
    def query_tokens(self) -> int:
        """Last prompt tokens that must be run, because their queries score the prompt."""
        if self.settings.query_mode is QueryMode.LOOKAHEAD:
            return 1
        return min(self.settings.window_tokens, self.prompt_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """importance: float32 [tokens]; chunk_importance: float32 [chunks]; stages_s: what ran."""

    plan: KeepPlan
    importance: np.ndarray
    chunk_importance: np.ndarray
    prompt_tokens: int
    restored_tokens: int
    prefilled_tokens: int
    queries: int
    stages_s: Mapping[Stage, float]


class Scoring:
    """The state of one scoring between its steps."""

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedKvCache,
        sequence: int,
        *,
        job: ScoreJob,
        budget: Budget,
        end_token_ids: frozenset[int],
    ) -> None:
        """sequence: the scoring's own, with the restored tokens in it."""
        self.sequence = sequence
        self._decoder = decoder
        self._cache = cache
        self._end_token_ids = end_token_ids
        self._job = job
        self._budget = budget
        self._restored_tokens = cache.length(sequence)
        self._prefilled_tokens = 0
        self._tap = QueryTap(self._decoder.shape.layers)
        self._queries = job.query_tokens
        self._importance = np.empty(0, dtype=np.float32)

    @property
    def slots_to_append(self) -> int:
        """Slots that the sequence grows by until it is at its longest."""
        decoded = self._job.settings.lookahead_tokens - 1 if self._is_lookahead else 0
        return self._job.prompt_tokens + decoded - self._restored_tokens

    def steps(
        self, clock: StageClock[Stage], chunk_tokens: Callable[[], int]
    ) -> Iterator[ScoreProgress]:
        """Everything up to the importance, one bounded step at a time."""
        clock.enter(Stage.PREFILL)
        prompt_tokens = self._job.prompt_tokens
        yield from self._prefill(prompt_tokens - int(self._is_lookahead), chunk_tokens)
        if self._is_lookahead:
            clock.enter(Stage.LOOKAHEAD)
            yield from self._lookahead()
        assert self._cache.length(self.sequence) == prompt_tokens
        assert self._prefilled_tokens == prompt_tokens - self._restored_tokens
        clock.enter(Stage.K_PASS)
        yield from self._k_pass()
        clock.enter(Stage.SELECT)
        yield ScoreProgress(Phase.SELECT, prompt_tokens, prompt_tokens)

    def scored(self, clock: StageClock[Stage]) -> Scored:
        """The plan, after the steps."""
        job = self._job
        by_chunk = mean_per_chunk(self._importance, job.settings.chunk_tokens)
        digest = settings_digest(
            job.settings,
            head_set=HEAD_SET,
            draft_layers=self._decoder.shape.layers,
            protected_spans=job.protected_spans,
        )
        return Scored(
            plan=select(self._budget, by_chunk, settings_digest=digest),
            importance=self._importance,
            chunk_importance=by_chunk,
            prompt_tokens=job.prompt_tokens,
            restored_tokens=self._restored_tokens,
            prefilled_tokens=self._prefilled_tokens,
            queries=self._queries,
            stages_s=clock.seconds(),
        )

    @property
    def _is_lookahead(self) -> bool:
        return self._job.settings.query_mode is QueryMode.LOOKAHEAD

    def _prefill(self, end: int, chunk_tokens: Callable[[], int]) -> Iterator[ScoreProgress]:
        """Fill positions up to `end`; the tail window's queries are tapped on the way."""
        total = self._job.prompt_tokens - self._restored_tokens
        yield ScoreProgress(Phase.PREFILL, 0, total)
        start = self._restored_tokens
        while start < end:
            chunk_end = min(start + chunk_tokens(), end)
            self._fill(start, chunk_end)
            self._prefilled_tokens += chunk_end - start
            start = chunk_end
            yield ScoreProgress(Phase.PREFILL, self._prefilled_tokens, total)

    def _fill(self, start: int, end: int) -> None:
        positions = np.arange(start, end, dtype=np.int64)
        window = self._job.prompt_tokens - self._job.query_tokens
        is_tapped = end > window and not self._is_lookahead
        tap = self._tap.from_row(max(window - start, 0)) if is_tapped else None
        fill_chunk(
            self._decoder,
            self._cache,
            self.sequence,
            token_ids=self._job.prompt_ids[start:end],
            positions=positions,
            tap=tap,
        )

    def _lookahead(self) -> Iterator[ScoreProgress]:
        settings = self._job.settings
        lookahead = Lookahead(
            self._decoder,
            self._cache,
            self.sequence,
            last_token_id=int(self._job.prompt_ids[-1]),
            settings=settings,
        )
        for done in lookahead.steps():
            settle(self._decoder)
            yield ScoreProgress(Phase.QUERIES, done, settings.lookahead_tokens)
        self._prefilled_tokens += 1
        self._tap = lookahead.tap
        self._queries = lookahead.queries(self._end_token_ids)

    def _k_pass(self) -> Iterator[ScoreProgress]:
        tokens, layers = self._job.prompt_tokens, self._decoder.shape.layers
        running = RunningImportance(
            self._decoder.shape,
            visible_tokens=self._visible_tokens(),
            prompt_tokens=tokens,
            pool_tokens=self._job.settings.pool_tokens,
            dtype=self._decoder.dtype,
            device=self._decoder.device,
        )
        layers_per_step = max(K_PASS_STEP_TOKENS // tokens, 1)
        for first in range(0, layers, layers_per_step):
            end = min(first + layers_per_step, layers)
            for layer in range(first, end):
                queries = self._tap.layer(layer)[: self._queries]
                running.add_layer(queries, self._keys(layer))
            settle(self._decoder)
            yield ScoreProgress(Phase.K_PASS, tokens * end // layers, tokens)
        self._importance = running.finish()

    def _visible_tokens(self) -> list[int]:
        """Prompt tokens that each query sees: all of them, or in a window those up to itself."""
        tokens = self._job.prompt_tokens
        if self._is_lookahead:
            return [tokens] * self._queries
        return list(range(tokens - self._queries + 1, tokens + 1))

    def _keys(self, layer: int) -> list[Tensor]:
        runs = self._cache.runs(self.sequence)
        if len(runs) > RUNS_MAX:
            return [self._cache.gather(layer, self.sequence)[0]]
        return [self._cache.run(layer, first, slots)[0] for first, slots in runs]
