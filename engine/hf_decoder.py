"""A decoder-only model of transformers behind our contract: for other architectures, and as oracle.

Our attention takes the place of the model's. It owns the KV cache and causality, so the model runs
without cache and without mask: transformers' own attention would then take gaps in the positions
for boundaries between packed sequences.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from engine.decoder import Attend
from engine.model_config import InvalidCheckpoint, ModelShape, UnsupportedModel

# The name under which a model's config asks for our attention.
ATTENTION = "specprefill"
# Passed to every attention; they change nothing for one packed sequence without cache.
_HARMLESS = frozenset({"dropout", "is_causal", "position_ids", "use_cache"})


class HfDecoder:
    """A transformers model that calls `attend` once a layer."""

    def __init__(self, model: Any) -> None:
        """model: a causal model whose attention implementation is `ATTENTION`.

        Raises UnsupportedModel if its forward is more than decoder layers around such an attention.
        """
        self._model = model.eval().requires_grad_(False)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.shape = _shape(model)
        _probe(self._model, self.shape)

    @torch.inference_mode()
    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return _run(self._model.base_model, token_ids, positions, attend).last_hidden_state[0]

    @torch.inference_mode()
    def fill(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> None:
        last = _StoreInLastLayer(attend, self.shape.layers - 1)
        _run(self._model.base_model, token_ids, positions, last)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.get_output_embeddings()(hidden)


def load_hf_decoder(
    directory: Path, *, dtype: torch.dtype, device: torch.device, layers: int | None = None
) -> HfDecoder:
    """From a local directory; `layers`: only its first ones. Raises UnsupportedModel."""
    transformers_logging.disable_progress_bar()
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(directory, **local)
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"transformers cannot read this config: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel("config field quantization_config is not supported")
    if layers is not None:
        _keep_first_layers(config, layers)
    model, found = AutoModelForCausalLM.from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        attn_implementation=ATTENTION,
        use_safetensors=True,
        output_loading_info=True,
        **local,
    )
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        if found[problem]:
            raise InvalidCheckpoint(f"{problem}: {sorted(map(str, found[problem]))[0]}")
    return HfDecoder(model.to(device))


def _keep_first_layers(config: Any, layers: int) -> None:
    """`config` is this load's own copy: transformers would share it between models."""
    if not 1 <= layers <= config.num_hidden_layers:
        raise UnsupportedModel(f"layers={layers}: the model has {config.num_hidden_layers}")
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:layers]


class _StoreInLastLayer:
    """The attention of a fill: what the last layer computes is not read, so zeros will do."""

    def __init__(self, attend: Attend, last: int) -> None:
        self._attend = attend
        self._last = last

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        if layer < self._last:
            return self._attend(q, k, v, layer)
        self._attend.store(q, k, v, layer)
        return torch.zeros_like(q)

    def store(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> None:
        self._attend.store(q, k, v, layer)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attend: Attend,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """query: [1, heads, tokens, head_dim]. Returns [1, tokens, heads, head_dim]."""
    if attention_mask is not None:
        raise UnsupportedModel("the model builds its own attention mask")
    _refuse_other_attention(module, rest, head_dim=query.shape[-1], scaling=scaling)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, module.layer_idx)[None], None


AttentionInterface.register(ATTENTION, _attention)


def _refuse_other_attention(
    module: Any, rest: dict[str, Any], *, head_dim: int, scaling: float | None
) -> None:
    """Windows, caps and sinks reach an attention as keywords: ignored, they are silently wrong."""
    if scaling is not None and abs(scaling - head_dim**-0.5) > 1e-6 * scaling:
        raise UnsupportedModel(f"attention scaling={scaling} is not supported")
    for name, value in rest.items():
        if name in _HARMLESS or value is None or value is False:
            continue
        if name == "sliding_window" and value >= module.config.max_position_embeddings:
            continue
        raise UnsupportedModel(f"attention argument {name}={value!r} is not supported")


def _run(model: Any, token_ids: Tensor, positions: Tensor, attend: Attend) -> Any:
    return model(
        input_ids=token_ids[None], position_ids=positions[None], use_cache=False, attend=attend
    )


def _shape(model: Any) -> ModelShape:
    config = model.config
    heads = config.num_attention_heads
    return ModelShape(
        layers=config.num_hidden_layers,
        q_heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden=config.hidden_size,
        vocab=model.get_output_embeddings().weight.shape[0],
        positions_max=config.max_position_embeddings,
    )


class _ShapeCheck:
    """Stands in for attention once, to see what a model calls it with."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self.layers: list[int] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        shape, tokens = self._shape, q.shape[0]
        if q.shape != (tokens, shape.q_heads, shape.head_dim):
            raise UnsupportedModel(f"queries of shape {tuple(q.shape)} in layer {layer}")
        if not k.shape == v.shape == (tokens, shape.kv_heads, shape.head_dim):
            raise UnsupportedModel(f"keys of shape {tuple(k.shape)} in layer {layer}")
        self.layers.append(layer)
        return torch.zeros_like(q)

    def store(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> None:
        raise AssertionError("a forward only calls")


@torch.inference_mode()
def _probe(model: Any, shape: ModelShape) -> None:
    """Run two tokens: every layer must attend once, in order, and logits must be head(hidden)."""
    ids = torch.tensor([0, 1 % shape.vocab], device=model.device)
    positions = torch.arange(2, device=model.device)
    try:
        check = _ShapeCheck(shape)
        logits = _run(model, ids, positions, check).logits
        hidden = _run(model.base_model, ids, positions, _ShapeCheck(shape)).last_hidden_state
    except (TypeError, AttributeError) as error:
        raise UnsupportedModel(f"the model's forward is not of this kind: {error}") from error
    if check.layers != list(range(shape.layers)):
        raise UnsupportedModel(f"attention ran in layers {check.layers} of {shape.layers}")
    if not torch.equal(logits, model.get_output_embeddings()(hidden)):
        raise UnsupportedModel("the model changes its logits after the head")
