"""From a model service's settings to its decoder, its key-value storage and what it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.decoder import Decoder
from engine.kv_cache import PagedKvCache
from engine.weights import load_decoder
from serving.model_dir import model_revision, read_config, tokenizer_digest
from serving.model_settings import ModelServiceSettings

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What GetInfo tells of a model. layers: of the checkpoint; layers_used: really computed."""

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


def load_model(settings: ModelServiceSettings, *, layers: int | None = None) -> Decoder:
    """The decoder on its device, with the threads the settings name. layers: the first ones only.

    Raises ModelDirError, UnsupportedModel or InvalidCheckpoint.
    """
    if settings.torch_threads is not None:
        torch.set_num_threads(settings.torch_threads)
    device = _device(settings.device)
    return load_decoder(
        settings.model_dir,
        dtype=_dtype(settings.dtype, device),
        device=device,
        layers=layers,
        kind=settings.decoder,
    )


def new_cache(decoder: Decoder, settings: ModelServiceSettings) -> PagedKvCache:
    """Key-value storage of the size the settings name."""
    return PagedKvCache(
        decoder.shape,
        pages=settings.pages,
        page_tokens=settings.page_tokens,
        dtype=decoder.dtype,
        device=decoder.device,
    )


def model_facts(model_dir: Path, decoder: Decoder) -> ModelFacts:
    config = read_config(model_dir)
    return ModelFacts(
        name=model_dir.resolve().name,
        architecture=str(config.get("model_type", "")),
        revision=model_revision(model_dir),
        tokenizer_digest=tokenizer_digest(model_dir),
        # A config with another name for it is never cut short.
        layers=int(config.get("num_hidden_layers", decoder.shape.layers)),
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
