"""Scorings as jobs for the GPU thread: what they restore, keep and leave behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from engine.decoder import Decoder
from engine.handles import HandleStore, HeldState
from engine.kv_cache import PagedKvCache
from engine.page_promises import PagePromises
from engine.stage_clock import StageClock
from scorer_service.keep import Budget, budget_of, check_draft_positions
from scorer_service.scoring import Scored, ScoreJob, ScoreProgress, Scoring
from scorer_service.timings import Stage


class Turns(Protocol):
    """What a job knows of the others: engine.gpu_thread.JobContext."""

    queue_s: float

    @property
    def others_waiting(self) -> bool: ...


class Scorer:
    """Scores prompts with one draft model. All but `budget` runs on the GPU thread."""

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedKvCache,
        handles: HandleStore,
        *,
        end_token_ids: frozenset[int],
        prefill_chunk_tokens: int,
        prefill_chunk_tokens_shared: int,
        time_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """prefill_chunk_tokens_shared: the prefill chunk while other jobs wait for their turn."""
        self.decoder = decoder
        self.cache = cache
        self.handles = handles
        self.end_token_ids = end_token_ids
        self.time_s = time_s
        self._chunk_tokens = prefill_chunk_tokens
        self._chunk_tokens_shared = prefill_chunk_tokens_shared
        self._promises = PagePromises(cache)

    def budget(self, job: ScoreJob) -> Budget:
        """What is known of the plan before any model runs.

        Raises PromptExceedsDraft or ProtectedExceedsBudget.
        """
        check_draft_positions(
            job.settings,
            prompt_tokens=job.prompt_tokens,
            positions_max=self.decoder.shape.positions_max,
        )
        return budget_of(
            job.settings,
            prompt_tokens=job.prompt_tokens,
            protected_head_tokens=job.protected_head_tokens,
            protected_spans=job.protected_spans,
        )

    def steps(
        self, job: ScoreJob, budget: Budget, turns: Turns
    ) -> Iterator[ScoreProgress | Scored]:
        """Progress, then one Scored. Raises KvEvicted, BaseMismatch, AlreadyExists, KvCacheFull,
        ResourceExhausted or NonFiniteImportance; whatever ends it, only a kept sequence is left.
        """
        clock = StageClock(
            time_s=self.time_s,
            waiting=Stage.QUEUE,
            started_at=self.time_s() - turns.queue_s,
        )
        clock.enter(Stage.RESTORE)
        if job.instance_id:
            self.handles.claim(job.instance_id)
        self.handles.expire()
        if job.keep_handle is not None:
            self.handles.check_free(job.keep_handle)
        sequence = self._restored(job)
        try:
            scoring = Scoring(
                self.decoder,
                self.cache,
                sequence,
                job=job,
                budget=budget,
                end_token_ids=self.end_token_ids,
            )
            self._promises.promise(sequence, scoring.slots_to_append)
            for progress in scoring.steps(clock, lambda: self.chunk_tokens(turns)):
                with clock.queued():
                    yield progress
            scored = scoring.scored(clock)
            self._keep(job, sequence)
            yield scored
        finally:
            self._promises.forget(sequence)
            if not job.is_kept:
                self.cache.release(sequence)

    def chunk_tokens(self, turns: Turns) -> int:
        """Tokens of the next prefill chunk."""
        return self._chunk_tokens_shared if turns.others_waiting else self._chunk_tokens

    def retract(self, job: ScoreJob) -> None:
        """Give up what the job kept: its caller is gone and will not learn of it."""
        if job.is_kept and job.keep_handle is not None:
            self.handles.release([job.keep_handle])

    def _restored(self, job: ScoreJob) -> int:
        """A sequence of the job's own: its base's fork, short of the tokens whose queries count."""
        if job.base is None:
            return self.cache.new_sequence()
        handle, tokens = job.base
        state = self.handles.base(handle, tokens, job.prompt_ids)
        return self.cache.fork(state.sequence, min(tokens, job.prompt_tokens - job.query_tokens))

    def _keep(self, job: ScoreJob, sequence: int) -> None:
        if job.keep_handle is None:
            return
        state = HeldState(
            sequence=sequence,
            token_ids=job.prompt_ids,
            instance_id=job.instance_id,
            lease_s=job.lease_s,
        )
        self.handles.put(job.keep_handle, state)
        job.is_kept = True
