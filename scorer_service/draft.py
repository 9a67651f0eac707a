"""The draft model as the scorer holds it: decoder, key-value storage, handles and what it is."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.decoder import Decoder
from engine.handles import HandleStore
from engine.kv_cache import PagedKvCache
from engine.weights import load_decoder
from scorer_service.scorer import Scorer
from scorer_service.settings import ScorerSettings
from serving.keep_plan import QueryMode
from serving.model_dir import end_token_ids, model_revision, read_config, tokenizer_digest

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftInfo:
    """layers: of the checkpoint; layers_used: really computed."""

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

    @property
    def default_query_mode(self) -> QueryMode:
        """The head of a draft cut short is not trained for its last layer: it decodes badly."""
        if self.layers_used < self.layers:
            return QueryMode.TAIL_WINDOW
        return QueryMode.LOOKAHEAD


@dataclass(frozen=True, slots=True)
class Draft:
    scorer: Scorer
    info: DraftInfo


def load_draft(settings: ScorerSettings) -> Draft:
    """Load the model and set its storage up. Runs on the GPU thread.

    Raises ModelDirError, UnsupportedModel or InvalidCheckpoint.
    """
    if settings.torch_threads is not None:
        torch.set_num_threads(settings.torch_threads)
    device = _device(settings.device)
    decoder = load_decoder(
        settings.model_dir,
        dtype=_dtype(settings.dtype, device),
        device=device,
        layers=settings.draft_layers,
        kind=settings.decoder,
    )
    cache = PagedKvCache(
        decoder.shape,
        pages=settings.pages,
        page_tokens=settings.page_tokens,
        dtype=decoder.dtype,
        device=device,
    )
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
    return Draft(scorer, _info(settings.model_dir, decoder))


def _info(model_dir: Path, decoder: Decoder) -> DraftInfo:
    config = read_config(model_dir)
    return DraftInfo(
        name=model_dir.resolve().name,
        architecture=str(config["model_type"]),
        revision=model_revision(model_dir),
        tokenizer_digest=tokenizer_digest(model_dir),
        layers=int(config["num_hidden_layers"]),
        layers_used=decoder.shape.layers,
        vocab_tokens=decoder.shape.vocab,
        positions_max=decoder.shape.positions_max,
        dtype=str(decoder.dtype).removeprefix("torch."),
        device=str(decoder.device),
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return DTYPES[name]
