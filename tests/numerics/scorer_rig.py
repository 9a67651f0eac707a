"""A scorer on a tiny random draft, driven step by step without a thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.decoder import Decoder
from engine.handles import HandleStore
from engine.kv_cache import PagedKvCache
from scorer_service.scorer import Scorer
from scorer_service.scoring import Scored, ScoreJob, ScoreProgress
from serving.keep_plan import PlanSettings, QueryMode, Run

PAGE_TOKENS = 8


@dataclass
class Turns:
    """A job alone on its thread."""

    queue_s: float = 0.0
    others_waiting: bool = False


class ScorerRig:
    def __init__(
        self,
        decoder: Decoder,
        *,
        pages: int = 200,
        prefill_chunk_tokens: int = 32,
        end_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.cache = PagedKvCache(
            decoder.shape,
            pages=pages,
            page_tokens=PAGE_TOKENS,
            dtype=decoder.dtype,
            device=decoder.device,
        )
        self.handles = HandleStore(self.cache, clock=lambda: 0.0, handles_max=8, lease_s_max=3600.0)
        self.scorer = Scorer(
            decoder,
            self.cache,
            self.handles,
            end_token_ids=end_token_ids,
            prefill_chunk_tokens=prefill_chunk_tokens,
            prefill_chunk_tokens_shared=4,
        )

    def steps(self, job: ScoreJob) -> Iterator[ScoreProgress | Scored]:
        return self.scorer.steps(job, self.scorer.budget(job), Turns())

    def score(self, job: ScoreJob) -> Scored:
        *progress, scored = self.steps(job)
        assert all(isinstance(event, ScoreProgress) for event in progress)
        assert isinstance(scored, Scored)
        self.handles.check_invariants()
        assert self.cache.sequences == len(self.handles)
        return scored

    @property
    def pages_used(self) -> int:
        return self.cache.pages_total - self.cache.pages_free


def job_for(
    prompt_ids: np.ndarray,
    mode: QueryMode,
    *,
    base: tuple[str, int] | None = None,
    keep_handle: str | None = None,
    head: int = 0,
    spans: tuple[Run, ...] = (),
    **settings: Any,
) -> ScoreJob:
    """keep 30 % in chunks of 4 tokens, nothing forced, unless `settings` say otherwise."""
    chosen = {"keep_basis_points": 3000, "chunk_tokens": 4, "tail_tokens": 0, **settings}
    return ScoreJob(
        request_id="request",
        instance_id="gateway",
        prompt_ids=prompt_ids,
        settings=PlanSettings(query_mode=mode, **chosen),
        protected_head_tokens=head,
        protected_spans=spans,
        base=base,
        keep_handle=keep_handle,
        lease_s=60.0,
    )


def prompt(tokens: int, *, vocab: int, seed: int = 0) -> np.ndarray:
    ids = np.random.default_rng(seed).integers(3, vocab, tokens)
    return ids.astype(np.uint32)
