"""The two services as the gateway sees them: what it asks, what it gets, in its own words.

upstream.py implements both over gRPC, tests implement them in memory. Every method raises
ServiceError only.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from serving.finish import FinishReason
from serving.keep_plan import KeepPlan, PlanSettings, QueryMode, Run
from serving.sampling_settings import Sampling, Stops


class Phase(enum.Enum):
    """A step a request is in. The numbers are those of Phase in types.proto."""

    QUEUED = 1
    SCORE_PREFILL = 2
    SCORE_QUERIES = 3
    SCORE_K_PASS = 4
    SCORE_SELECT = 5
    PROTECTED_PREFILL = 6
    SPARSE_PREFILL = 7
    DENSE_PREFILL = 8
    DECODE = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a service loaded."""

    name: str
    architecture: str
    revision: str
    tokenizer_digest: str
    layers: int
    layers_used: int
    vocab_tokens: int
    positions_max: int
    dtype: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KvUse:
    """Occupancy of a service's KV storage."""

    pages_total: int
    pages_free: int
    page_tokens: int
    page_bytes: int
    handles: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerFacts:
    version: str
    boot_id: str
    model: Model
    kv: KvUse
    default_query_mode: QueryMode
    lookahead_tokens_max: int
    window_tokens_max: int
    head_set: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    version: str
    boot_id: str
    model: Model
    kv: KvUse


@dataclass(frozen=True, slots=True)
class Progress:
    phase: Phase
    done_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCall:
    """One prompt to score. prompt_ids: uint32 [tokens]."""

    request_id: str
    prompt_ids: np.ndarray
    settings: PlanSettings
    protected_head_tokens: int
    protected_spans: tuple[Run, ...]
    include_importance: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTimes:
    """Seconds inside the scorer."""

    queue_s: float = 0.0
    restore_s: float = 0.0
    prefill_s: float = 0.0
    queries_s: float = 0.0
    k_pass_s: float = 0.0
    select_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The last event of a score. chunk_importance: float32 [chunks], None unless asked for."""

    plan: KeepPlan
    chunk_importance: np.ndarray | None
    restored_tokens: int
    prefilled_tokens: int
    queries: int
    times: ScoreTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """One prompt to prefill and decode. plan None: dense. prompt_ids: uint32 [tokens].

    handle: minted by the gateway, names the sequence this call makes.
    """

    request_id: str
    handle: str
    prompt_ids: np.ndarray
    plan: KeepPlan | None
    protected_head_tokens: int
    protected_spans: tuple[Run, ...]
    sampling: Sampling
    stops: Stops


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTimes:
    """Seconds inside the target; the first six make up first_token_s."""

    queue_s: float = 0.0
    restore_s: float = 0.0
    protected_prefill_s: float = 0.0
    sparse_prefill_s: float = 0.0
    dense_prefill_s: float = 0.0
    kick_off_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Restored:
    """The target took the request. How many prompt tokens it had already."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Reply tokens, in order. first_token_times: with the first ones only."""

    token_ids: tuple[int, ...]
    first_token_times: TargetTimes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The last event of a generation."""

    finish_reason: FinishReason
    matched_stop_string: str | None
    matched_stop_token_id: int | None
    dense_restored_tokens: int
    sparse_restored_tokens: int
    executed_tokens: int
    completion_tokens: int
    sparse: bool
    times: TargetTimes = field(default_factory=TargetTimes)


ScoreEvent = Progress | Scored
GenerateEvent = Restored | Progress | Tokens | Generated


class Scorer(Protocol):
    """The draft model's service. It may come and go."""

    @property
    def facts(self) -> ScorerFacts | None:
        """What the service said last; None while it is not there."""
        ...

    def score(self, call: ScoreCall, *, timeout_s: float) -> AsyncGenerator[ScoreEvent, None]:
        """Progress, then exactly one Scored. Closing the generator stops the work."""
        ...


class Target(Protocol):
    """The target model's service."""

    @property
    def facts(self) -> TargetFacts | None:
        """What the service said last; None while it is not there."""
        ...

    def generate(
        self, call: GenerateCall, *, timeout_s: float
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Restored, progress, tokens, then exactly one Generated. Closing it stops the work."""
        ...

    async def release(self, handles: Sequence[str], *, timeout_s: float) -> None:
        """Free sequences; unknown handles are ignored."""
        ...
