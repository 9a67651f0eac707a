"""A target on a tiny random model, driven step by step without a thread; and plans made by hand."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer, models

from engine.decoder import Decoder
from engine.handles import HandleStore
from engine.kv_cache import PagedKvCache
from serving.keep_plan import KeepPlan, PlanSettings, QueryMode, Run, runs_of
from serving.sampling_settings import Sampling, Stops
from target_service.events import Event, Finished, Progress, Sampled, Started
from target_service.metrics import TargetMetrics
from target_service.prefill import PrefillKind
from target_service.request import BaseRef, GenerateCall
from target_service.scheduler import ChunkSizes, GenerateJob, Scheduler
from target_service.sequences import Sequences

CHUNK_TOKENS = 8
PAGE_TOKENS = 8


@dataclass
class Turns:
    """What a job hears of the others."""

    others_waiting: bool = False


@dataclass(frozen=True)
class Result:
    """All events of one request."""

    events: tuple[Event, ...]

    @property
    def tokens(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, Sampled)]

    @property
    def finished(self) -> Finished:
        (finished,) = (event for event in self.events if isinstance(event, Finished))
        return finished

    @property
    def kinds(self) -> set[PrefillKind]:
        return {event.kind for event in self.events if isinstance(event, Progress)}

    @property
    def steps(self) -> list[int]:
        """Tokens done after each prefill step."""
        return [event.done_tokens for event in self.events if isinstance(event, Progress)]

    @property
    def restored_tokens(self) -> int:
        (started,) = (event for event in self.events if isinstance(event, Started))
        return started.restored_tokens


class TargetRig:
    """One target: cache, handles and scheduler around a decoder, which rigs may share."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        pages: int = 128,
        page_tokens: int = PAGE_TOKENS,
        chunk_tokens: int = 32,
        shared_tokens: int = 4,
        end_token_ids: Iterable[int] = (),
        tokenizer: Tokenizer | None = None,
        handles_max: int = 8,
    ) -> None:
        self.decoder = decoder
        self.cache = PagedKvCache(
            decoder.shape,
            pages=pages,
            page_tokens=page_tokens,
            dtype=decoder.dtype,
            device=decoder.device,
        )
        self.store = HandleStore(
            self.cache, clock=lambda: 0.0, handles_max=handles_max, lease_s_max=60.0
        )
        self.sequences = Sequences(self.cache, self.store, handles_max=handles_max)
        self.registry = CollectorRegistry()
        self.scheduler = Scheduler(
            decoder=decoder,
            cache=self.cache,
            sequences=self.sequences,
            tokenizer=tokenizer or Tokenizer(models.BPE()),
            end_token_ids=frozenset(end_token_ids),
            chunk_sizes=ChunkSizes(alone_tokens=chunk_tokens, shared_tokens=shared_tokens),
            metrics=TargetMetrics(self.registry),
            time_s=time.perf_counter,
        )

    def steps(self, call: GenerateCall, turns: Turns | None = None) -> Iterator[Event]:
        return self.scheduler.generate(GenerateJob(call), turns or Turns())

    def run(self, call: GenerateCall) -> Result:
        """Run it alone to its end, and find the books right at every step."""
        events = []
        for event in self.steps(call):
            self.sequences.check_invariants()
            events.append(event)
        self.sequences.check_invariants()
        return Result(tuple(events))

    def run_together(self, *calls: GenerateCall) -> list[Result]:
        """Run them in turns, one step each, as the thread does."""
        steps = [self.steps(call, Turns(others_waiting=True)) for call in calls]
        events: list[list[Event]] = [[] for _ in calls]
        going = set(range(len(calls)))
        while going:
            for index in sorted(going):
                event = next(steps[index], None)
                if event is None:
                    going.discard(index)
                else:
                    events[index].append(event)
                self.sequences.check_invariants()
        return [Result(tuple(each)) for each in events]

    @property
    def pages_used(self) -> int:
        return self.cache.pages_total - self.cache.pages_free


def generate_call(prompt: Sequence[int] | np.ndarray, **fields: Any) -> GenerateCall:
    """A greedy dense request for 8 tokens that keeps nothing, but for `fields`."""
    plan = fields.get("plan")
    values: dict[str, Any] = {
        "request_id": "request",
        "instance_id": "gateway",
        "handle": "",
        "prompt_ids": np.asarray(prompt, dtype=np.uint32),
        "base": None,
        "plan": None,
        "protected_head_tokens": plan.protected_head_tokens if plan else 0,
        "sampling": Sampling(),
        "stops": Stops(max_tokens=8),
        "retain": False,
        "lease_s": 60.0,
        "received_at": time.perf_counter(),
    }
    if "base" in fields and fields["base"] is not None:
        fields["base"] = BaseRef(*fields["base"])
    return GenerateCall(**(values | fields))


def keep_plan(
    prompt_tokens: int,
    kept: Iterable[int],
    *,
    head: int = 0,
    spans: Sequence[tuple[int, int]] = (),
    tail_tokens: int = 0,
    keep_basis_points: int = 5000,
) -> KeepPlan:
    """A plan that keeps these chunks of CHUNK_TOKENS."""
    return KeepPlan(
        prompt_tokens=prompt_tokens,
        settings=PlanSettings(
            keep_basis_points=keep_basis_points,
            chunk_tokens=CHUNK_TOKENS,
            tail_tokens=tail_tokens,
            query_mode=QueryMode.TAIL_WINDOW,
        ),
        kept=runs_of(kept),
        forced=(),
        protected_head_tokens=head,
        protected_spans=tuple(Run(*span) for span in spans),
        settings_digest=b"digest",
    )


def keep_all(prompt_tokens: int, *, head: int = 0) -> KeepPlan:
    """What a keep rate of 10000 basis points selects."""
    chunks = -(-prompt_tokens // CHUNK_TOKENS)
    return keep_plan(
        prompt_tokens, range(head // CHUNK_TOKENS, chunks), head=head, keep_basis_points=10_000
    )


def random_prompt(decoder: Decoder, tokens: int, *, seed: int = 0) -> np.ndarray:
    """Token ids uint32 [tokens]."""
    vocab = decoder.shape.vocab
    return np.random.default_rng(seed).integers(vocab, size=tokens).astype(np.uint32)
