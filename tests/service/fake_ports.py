"""A scorer and a target in memory, behind the gateway's ports; tests script what they do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gateway.ports import (
    GenerateCall,
    Generated,
    GenerateEvent,
    KvUse,
    Model,
    Phase,
    Progress,
    Restored,
    ScoreCall,
    Scored,
    ScoreEvent,
    ScorerFacts,
    ScoreTimes,
    TargetFacts,
    TargetTimes,
    Tokens,
)
from serving.errors import ServiceError
from serving.finish import FinishReason
from serving.keep_plan import KeepPlan, QueryMode, Run

MODEL = Model(
    name="tiny",
    architecture="llama",
    revision="r1",
    tokenizer_digest="digest",
    layers=4,
    layers_used=4,
    vocab_tokens=319,
    positions_max=4096,
    dtype="float32",
    device="cpu",
)
KV = KvUse(pages_total=64, pages_free=60, page_tokens=64, page_bytes=1024, handles=1)
SCORER_FACTS = ScorerFacts(
    version="1.0",
    boot_id="scorer-boot",
    model=replace(MODEL, name="draft", layers_used=2),
    kv=KV,
    default_query_mode=QueryMode.TAIL_WINDOW,
    lookahead_tokens_max=64,
    window_tokens_max=256,
    head_set="all",
)
TARGET_FACTS = TargetFacts(version="1.0", boot_id="target-boot", model=MODEL, kv=KV)
SCORE_TIMES = ScoreTimes(
    queue_s=1e-4, prefill_s=2e-4, queries_s=1e-4, k_pass_s=1e-4, select_s=1e-4, total_s=6e-4
)
FIRST_TIMES = TargetTimes(queue_s=1e-4, dense_prefill_s=2e-4, kick_off_s=1e-4, first_token_s=4e-4)


@dataclass(eq=False)
class Hold:
    """A step that says it was reached and then lasts until the test lets it go."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    let_go: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> None:
        self.reached.set()
        await self.let_go.wait()


ScoreStep = ScoreEvent | ServiceError | Hold
GenerateStep = GenerateEvent | ServiceError | Hold


def keep_all(call: ScoreCall) -> KeepPlan:
    """A plan that keeps every selectable chunk and forces the last."""
    chunks = -(-call.prompt_ids.size // call.settings.chunk_tokens)
    first = call.protected_head_tokens // call.settings.chunk_tokens
    return KeepPlan(
        prompt_tokens=int(call.prompt_ids.size),
        settings=call.settings,
        kept=(Run(first, chunks),),
        forced=(Run(chunks - 1, chunks),),
        protected_head_tokens=call.protected_head_tokens,
        protected_spans=call.protected_spans,
        settings_digest=b"d" * 32,
    )


def scored(call: ScoreCall, plan: KeepPlan | None = None) -> Scored:
    plan = plan or keep_all(call)
    importance = np.arange(plan.chunks_total, dtype=np.float32)
    return Scored(
        plan=plan,
        chunk_importance=importance if call.include_importance else None,
        restored_tokens=0,
        prefilled_tokens=int(call.prompt_ids.size),
        queries=16,
        times=SCORE_TIMES,
    )


def score_steps(call: ScoreCall) -> Iterable[ScoreStep]:
    return (Progress(Phase.SCORE_PREFILL, 1, 2), scored(call))


def generated(
    call: GenerateCall, tokens: int, reason: FinishReason = FinishReason.MAX_TOKENS
) -> Generated:
    return Generated(
        finish_reason=reason,
        matched_stop_string=None,
        matched_stop_token_id=None,
        dense_restored_tokens=0,
        sparse_restored_tokens=0,
        executed_tokens=int(call.prompt_ids.size),
        completion_tokens=tokens,
        sparse=call.plan is not None,
        times=FIRST_TIMES,
    )


def reply(call: GenerateCall, token_ids: Sequence[int]) -> Iterable[GenerateStep]:
    """A whole generation, one token an event."""
    yield Restored(0)
    yield Progress(Phase.DENSE_PREFILL, 1, 2)
    for index, token_id in enumerate(token_ids):
        yield Tokens((token_id,), None if index else FIRST_TIMES)
    yield generated(call, len(token_ids))


class FakeScorer:
    """Does what `steps` says, call by call. open: how many of its calls are running."""

    def __init__(self) -> None:
        self.facts: ScorerFacts | None = SCORER_FACTS
        self.steps: Callable[[ScoreCall], Iterable[ScoreStep]] = score_steps
        self.calls: list[ScoreCall] = []
        self.timeouts_s: list[float] = []
        self.open = 0

    async def score(self, call: ScoreCall, *, timeout_s: float) -> AsyncGenerator[ScoreEvent, None]:
        self.calls.append(call)
        self.timeouts_s.append(timeout_s)
        self.open += 1
        try:
            for step in self.steps(call):
                if isinstance(step, Hold):
                    await step.wait()
                elif isinstance(step, ServiceError):
                    raise step
                else:
                    yield step
        finally:
            self.open -= 1


class FakeTarget:
    """Does what `steps` says, call by call, and notes every release."""

    def __init__(self) -> None:
        self.facts: TargetFacts | None = TARGET_FACTS
        self.steps: Callable[[GenerateCall], Iterable[GenerateStep]] = lambda call: reply(
            call, (72, 73)
        )
        self.calls: list[GenerateCall] = []
        self.timeouts_s: list[float] = []
        self.released: list[str] = []
        self.release_error: ServiceError | None = None
        self.open = 0

    async def generate(
        self, call: GenerateCall, *, timeout_s: float
    ) -> AsyncGenerator[GenerateEvent, None]:
        self.calls.append(call)
        self.timeouts_s.append(timeout_s)
        self.open += 1
        try:
            for step in self.steps(call):
                if isinstance(step, Hold):
                    await step.wait()
                elif isinstance(step, ServiceError):
                    raise step
                else:
                    yield step
        finally:
            self.open -= 1

    async def release(self, handles: Sequence[str], *, timeout_s: float) -> None:
        self.released.extend(handles)
        if self.release_error is not None:
            raise self.release_error
