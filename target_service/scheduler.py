"""One request from its restore to its last token, as a job of bounded steps."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer

from engine.decoder import Decoder
from engine.kv_cache import PagedKvCache
from engine.sampling import Sampler
from target_service.decode import Reply, decode, next_token
from target_service.events import Counts, Event, Finished, Progress, Sampled, Started
from target_service.metrics import TargetMetrics, TokenKind
from target_service.prefill import PrefillKind, PrefillPart, fill, prefill_parts
from target_service.request import GenerateCall
from target_service.sequences import OpenSequence, Sequences
from target_service.timings import RequestClock, Stage, Timings

STAGES: Mapping[PrefillKind, Stage] = {
    PrefillKind.PROTECTED: Stage.PROTECTED_PREFILL,
    PrefillKind.SPARSE: Stage.SPARSE_PREFILL,
    PrefillKind.DENSE: Stage.DENSE_PREFILL,
}
EXECUTED: Mapping[PrefillKind, TokenKind] = {
    PrefillKind.PROTECTED: "protected_executed",
    PrefillKind.SPARSE: "sparse_executed",
    PrefillKind.DENSE: "dense_executed",
}


class Turns(Protocol):
    """What a job knows of the others: engine.gpu_thread.JobContext."""

    @property
    def others_waiting(self) -> bool: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSizes:
    """Prefill chunk in tokens: alone, and while other jobs wait for their step."""

    alone_tokens: int
    shared_tokens: int


@dataclasses.dataclass(slots=True)
class GenerateJob:
    """is_kept: the sequence lives on under the call's handle. Written on the GPU thread."""

    call: GenerateCall
    is_kept: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """All that one request needs besides its sequence."""

    job: GenerateJob
    turns: Turns
    clock: RequestClock
    parts: tuple[PrefillPart, ...]
    sampler: Sampler
    reply: Reply

    @property
    def call(self) -> GenerateCall:
        return self.job.call

    @property
    def last_kind(self) -> PrefillKind:
        """What the kick-off token counts as."""
        return PrefillKind.DENSE if self.call.plan is None else PrefillKind.SPARSE

    def told(self, timings: Timings | None) -> Iterator[Sampled]:
        """The newest token, unless it ended the reply as a token: then Finished names it."""
        if self.reply.matched_token_id is None:
            yield Sampled(self.reply.token_ids[-1], timings)


class Scheduler:
    """Makes the job of a request. Runs on the GPU thread."""

    def __init__(
        self,
        *,
        decoder: Decoder,
        cache: PagedKvCache,
        sequences: Sequences,
        tokenizer: Tokenizer,
        end_token_ids: frozenset[int],
        chunk_sizes: ChunkSizes,
        metrics: TargetMetrics,
        time_s: Callable[[], float],
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._sequences = sequences
        self._tokenizer = tokenizer
        self._end_token_ids = end_token_ids
        self._chunk_sizes = chunk_sizes
        self._metrics = metrics
        self._time_s = time_s

    def generate(self, job: GenerateJob, turns: Turns) -> Iterator[Event]:
        """The job's steps. Each is one event; between two of them others have their turn.

        Raises KvEvicted, BaseMismatch, AlreadyExists, KvCacheFull or ResourceExhausted before any
        work, InternalError for logits that are not finite. Whatever ends it, only a kept sequence
        is left.
        """
        run = self._run(job, turns)
        with contextlib.closing(self._steps(run)) as steps:
            for event in steps:
                with run.clock.queued():
                    yield event

    def retract(self, job: GenerateJob) -> None:
        """Give up what the job kept: its caller is gone and will not learn of it."""
        if job.is_kept:
            self._sequences.release(job.call.instance_id, (job.call.handle,))

    def _run(self, job: GenerateJob, turns: Turns) -> _Run:
        call = job.call
        return _Run(
            job=job,
            turns=turns,
            clock=RequestClock(time_s=self._time_s, started_at=call.received_at),
            parts=prefill_parts(
                prompt_tokens=call.prompt_tokens, base_tokens=call.base_tokens, plan=call.plan
            ),
            sampler=Sampler(call.sampling),
            reply=Reply(
                call.stops,
                end_token_ids=self._end_token_ids,
                prompt_tokens=call.prompt_tokens,
                positions_max=self._decoder.shape.positions_max,
                tokenizer=self._tokenizer,
            ),
        )

    def _steps(self, run: _Run) -> Generator[Event, None, None]:
        call = run.call
        run.clock.enter(Stage.RESTORE)
        # The last token of a reply takes no slot, the kick-off takes one.
        slots = filled_tokens(run.parts) + run.reply.tokens_max
        with self._sequences.opened(call, slots=slots) as opened:
            if opened.base is not None:
                kind: TokenKind = "dense_restored" if opened.base.dense else "sparse_restored"
                self._metrics.count_tokens(kind, call.base_tokens)
            yield Started(call.base_tokens)
            for part in run.parts:
                run.clock.enter(STAGES[part.kind])
                yield from self._filled(run, opened, part)
            run.clock.enter(Stage.KICK_OFF)
            timings = self._kick_off(run, opened)
            yield from run.told(timings)
            yield from self._decoded(run, opened)
            finished = self._finished(run, opened)
            if call.retain:
                self._sequences.keep(opened, call, state_tokens(call, run.reply))
                run.job.is_kept = True
        # The pages are free, or under their handle, before the caller hears that it is over.
        self._metrics.observe_finished(finished)
        yield finished

    def _filled(self, run: _Run, opened: OpenSequence, part: PrefillPart) -> Iterator[Progress]:
        sizes, turns = self._chunk_sizes, run.turns
        steps = fill(
            self._decoder,
            self._cache,
            opened.sequence,
            token_ids=run.call.prompt_ids,
            positions=part.positions,
            chunk_tokens=lambda: (
                sizes.shared_tokens if turns.others_waiting else sizes.alone_tokens
            ),
        )
        counted = 0
        for done in steps:
            self._metrics.count_tokens(EXECUTED[part.kind], done - counted)
            counted = done
            yield Progress(part.kind, done, part.positions.size)

    def _kick_off(self, run: _Run, opened: OpenSequence) -> Timings:
        """Run the last prompt token alone; its logits give the first token."""
        last = run.call.prompt_tokens - 1
        token_id = next_token(
            self._decoder,
            self._cache,
            opened.sequence,
            sampler=run.sampler,
            token_id=int(run.call.prompt_ids[last]),
            position=last,
        )
        run.reply.add(token_id)
        self._check_executed(run, opened)
        timings = run.clock.first_token()
        self._metrics.observe_first_token(timings, kinds={part.kind for part in run.parts})
        self._metrics.count_tokens(EXECUTED[run.last_kind], 1)
        self._metrics.count_tokens("generated", 1)
        return timings

    def _check_executed(self, run: _Run, opened: OpenSequence) -> None:
        """What the target ran, by the slots it wrote, is what was selected and the kick-off."""
        call = run.call
        executed = self._cache.length(opened.sequence) - opened.restored_slots
        assert executed == filled_tokens(run.parts) + 1
        if call.plan is None:
            assert executed == call.prompt_tokens - call.base_tokens
        else:
            head = call.protected_head_tokens - call.base_tokens
            assert executed == head + call.plan.kept_tokens

    def _decoded(self, run: _Run, opened: OpenSequence) -> Iterator[Sampled]:
        steps = decode(
            self._decoder,
            self._cache,
            opened.sequence,
            reply=run.reply,
            sampler=run.sampler,
            prompt_tokens=run.call.prompt_tokens,
        )
        previous = began = self._time_s()
        for _ in steps:
            now = self._time_s()
            self._metrics.observe_decode_step(step_s=now - began, gap_s=now - previous)
            self._metrics.count_tokens("generated", 1)
            previous = now
            yield from run.told(None)
            began = self._time_s()

    def _finished(self, run: _Run, opened: OpenSequence) -> Finished:
        reply = run.reply
        assert reply.finish_reason is not None
        return Finished(
            reason=reply.finish_reason,
            matched_stop_string=reply.matched_stop_string,
            matched_token_id=reply.matched_token_id,
            counts=_counts(run, opened),
            timings=run.clock.total(),
            positions=run.call.prompt_tokens + len(reply.token_ids) - 1,
            slots=self._cache.length(opened.sequence),
            sparse=run.call.plan is not None,
        )


def filled_tokens(parts: Sequence[PrefillPart]) -> int:
    return sum(int(part.positions.size) for part in parts)


def state_tokens(call: GenerateCall, reply: Reply) -> np.ndarray:
    """Ids of the sequence by position, uint32 [positions]: the last sampled one was never run."""
    return np.concatenate((call.prompt_ids, np.asarray(reply.token_ids[:-1], dtype=np.uint32)))


def _counts(run: _Run, opened: OpenSequence) -> Counts:
    call = run.call
    is_dense = opened.base is None or opened.base.dense
    head = call.protected_head_tokens
    return Counts(
        prompt=call.prompt_tokens,
        dense_restored=call.base_tokens if is_dense else 0,
        sparse_restored=0 if is_dense else call.base_tokens,
        executed=filled_tokens(run.parts) + 1,
        protected_executed=sum(int((part.positions < head).sum()) for part in run.parts),
        completion=len(run.reply.token_ids),
    )
