"""The loaded target: model, cache and what works on them. Built and used on the GPU thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.decoder import Decoder
from engine.handles import HandleStore
from engine.kv_cache import PagedKvCache
from engine.model_service import ModelFacts, load_model, model_facts, new_cache
from serving.model_dir import end_token_ids, load_tokenizer
from target_service.metrics import TargetMetrics
from target_service.prefill import fill, forward_token
from target_service.request import CallLimits
from target_service.scheduler import ChunkSizes, Scheduler
from target_service.sequences import Sequences
from target_service.settings import TargetSettings

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetCore:
    scheduler: Scheduler
    sequences: Sequences
    limits: CallLimits
    facts: ModelFacts
    prefill_chunk_tokens: int


def load_core(
    settings: TargetSettings, metrics: TargetMetrics, *, time_s: Callable[[], float]
) -> TargetCore:
    """Read the model directory and set everything up around it.

    Raises ModelDirError, UnsupportedModel or InvalidCheckpoint.
    """
    return build_core(load_model(settings), settings, metrics, time_s=time_s)


def build_core(
    decoder: Decoder,
    settings: TargetSettings,
    metrics: TargetMetrics,
    *,
    time_s: Callable[[], float],
) -> TargetCore:
    """Cache, handles and scheduler of a decoder, which is run once."""
    cache = new_cache(decoder, settings)
    warm_up(decoder, cache)
    store = HandleStore(
        cache,
        clock=time_s,
        handles_max=settings.handles_max,
        lease_s_max=settings.lease_s_max,
    )
    sequences = Sequences(cache, store, handles_max=settings.handles_max)
    scheduler = Scheduler(
        decoder=decoder,
        cache=cache,
        sequences=sequences,
        tokenizer=load_tokenizer(settings.model_dir),
        end_token_ids=end_token_ids(settings.model_dir),
        chunk_sizes=ChunkSizes(
            alone_tokens=settings.prefill_chunk_tokens,
            shared_tokens=min(settings.prefill_chunk_tokens_shared, settings.prefill_chunk_tokens),
        ),
        metrics=metrics,
        time_s=time_s,
    )
    return TargetCore(
        scheduler=scheduler,
        sequences=sequences,
        limits=_limits(settings, decoder),
        facts=model_facts(settings.model_dir, decoder),
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
    )


def warm_up(decoder: Decoder, cache: PagedKvCache) -> None:
    """A prefill with gaps in its positions and a decode step: what cannot run fails now."""
    tokens = min(WARM_UP_TOKENS, decoder.shape.positions_max // 2, _slots(cache) - 1)
    if tokens < 1:
        return
    sequence = cache.new_sequence()
    try:
        positions = 2 * np.arange(tokens, dtype=np.int64)
        ids = np.zeros(2 * tokens, dtype=np.uint32)
        for _ in fill(
            decoder,
            cache,
            sequence,
            token_ids=ids,
            positions=positions,
            chunk_tokens=lambda: tokens,
        ):
            pass
        forward_token(decoder, cache, sequence, token_id=0, position=2 * tokens - 1)
    finally:
        cache.release(sequence)


def _slots(cache: PagedKvCache) -> int:
    return cache.pages_total * cache.page_tokens


def _limits(settings: TargetSettings, decoder: Decoder) -> CallLimits:
    return CallLimits(
        vocab=decoder.shape.vocab,
        positions_max=decoder.shape.positions_max,
        completion_tokens_max=settings.completion_tokens_max,
        lease_s_max=settings.lease_s_max,
        release_handles_max=settings.release_handles_max,
    )
