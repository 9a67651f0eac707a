"""The draft model as the scorer holds it: decoder, key-value storage, handles and what it is."""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.handles import HandleStore
from engine.model_service import ModelFacts, load_model, model_facts, new_cache
from scorer_service.scorer import Scorer
from scorer_service.settings import ScorerSettings
from serving.keep_plan import QueryMode
from serving.model_dir import end_token_ids


@dataclass(frozen=True, slots=True)
class Draft:
    scorer: Scorer
    facts: ModelFacts

    @property
    def default_query_mode(self) -> QueryMode:
        """The head of a draft cut short is not trained for its last layer: it decodes badly."""
        if self.facts.layers_used < self.facts.layers:
            return QueryMode.TAIL_WINDOW
        return QueryMode.LOOKAHEAD


def load_draft(settings: ScorerSettings) -> Draft:
    """Load the model and set its storage up. Runs on the GPU thread.

    Raises ModelDirError, UnsupportedModel or InvalidCheckpoint.
    """
    decoder = load_model(settings, layers=settings.draft_layers)
    cache = new_cache(decoder, settings)
    handles = HandleStore(
        cache,
        clock=time.monotonic,
        handles_max=settings.handles_max,
        lease_s_max=settings.lease_s_max,
    )
    scorer = Scorer(
        decoder,
        cache,
        handles,
        end_token_ids=end_token_ids(settings.model_dir),
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        prefill_chunk_tokens_shared=settings.prefill_chunk_tokens_shared,
    )
    return Draft(scorer, model_facts(settings.model_dir, decoder))
