"""Config and weights of a GGUF file, under the names and in the layout of transformers.

Metadata of the architecture that is not known here is refused like an unknown config field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from torch import Tensor

from engine.model_config import (
    DecoderConfig,
    InvalidCheckpoint,
    UnsupportedModel,
    parse_config,
)

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_DIVISORS = "rope_freqs.weight"

_CONFIG_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "vocab_size": "vocab_size",
}
_ROPE_FIELDS = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
# Compared with the other fields, or without meaning for the arithmetic.
_CHECKED_FIELDS = {"attention.value_length", "rope.dimension_count"}
_SILENT_FIELDS = {"rope.scaling.finetuned", "expert_used_count"}


class GgufFile:
    """One GGUF file; tensors are dequantised to float32 when read."""

    def __init__(self, path: Path) -> None:
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, OSError) as error:
            raise InvalidCheckpoint(f"{path.name} is no readable GGUF file: {error}") from error
        self._metadata = {
            name: field.contents()
            for name, field in self._reader.fields.items()
            if not name.startswith("tokenizer.")
        }
        self._architecture = str(self._metadata.get("general.architecture"))
        self._tensors = {_name(t.name): t for t in self._reader.tensors if t.name != _ROPE_DIVISORS}
        self._heads: dict[str, int] = {}
        if self._architecture == "llama":
            config = self.config().shape
            self._heads = {"q_proj": config.q_heads, "k_proj": config.kv_heads}

    def config(self) -> DecoderConfig:
        """Raises UnsupportedModel, naming the metadata field."""
        config = parse_config(self.config_fields())
        divisors = [t for t in self._reader.tensors if t.name == _ROPE_DIVISORS]
        if not divisors:
            return config
        if config.rope.kind != "default":
            raise UnsupportedModel(f"tensor {_ROPE_DIVISORS} beside rope kind {config.rope.kind}")
        values = tuple(float(value) for value in _dequantised(divisors[0]))
        if len(values) != config.shape.head_dim // 2:
            raise UnsupportedModel(f"tensor {_ROPE_DIVISORS} has {len(values)} values")
        return replace(config, rope=replace(config.rope, kind="divided", divisors=values))

    def config_fields(self) -> dict[str, Any]:
        """The fields that a config.json of this model would have."""
        prefix = f"{self._architecture}."
        config: dict[str, Any] = {
            "model_type": self._architecture,
            "architectures": [f"{self._architecture.capitalize()}ForCausalLM"],
            "hidden_act": "silu",
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
        }
        rope: dict[str, Any] = {}
        for name, value in self._metadata.items():
            field = name.removeprefix(prefix)
            if not name.startswith(prefix):
                continue
            if field in _CONFIG_FIELDS:
                config[_CONFIG_FIELDS[field]] = _shortest(value)
            elif field in _ROPE_FIELDS:
                rope[_ROPE_FIELDS[field]] = _shortest(value)
            elif field not in _CHECKED_FIELDS | _SILENT_FIELDS:
                raise UnsupportedModel(f"GGUF field {name}={value!r} is not supported")
        if rope.get("rope_type", "none") != "none":
            config["rope_scaling"] = rope
        if "model.embed_tokens.weight" in self._tensors:
            config["vocab_size"] = self.shapes()["model.embed_tokens.weight"][0]
        self._check_head_dim(config)
        return config

    def _check_head_dim(self, config: Mapping[str, Any]) -> None:
        heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
        head_dim = config.get("head_dim") or (hidden // heads if heads and hidden else None)
        for field in sorted(_CHECKED_FIELDS):
            value = self._metadata.get(f"{self._architecture}.{field}", head_dim)
            if value != head_dim:
                raise UnsupportedModel(f"GGUF field {field}={value} is not head_dim {head_dim}")

    def field(self, name: str) -> Any:
        """One metadata value by its full name. Raises UnsupportedModel if the file lacks it."""
        field = self._reader.fields.get(name)
        if field is None:
            raise UnsupportedModel(f"GGUF field {name} is missing")
        return field.contents()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {
            name: tuple(int(axis) for axis in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> Tensor:
        weights = torch.from_numpy(_dequantised(self._tensors[name]))
        for projection, heads in self._heads.items():
            if f".{projection}." in name:
                return _rows_by_half(weights, heads)
        return weights


def _name(gguf_name: str) -> str:
    """transformers' name of a tensor, or the name as it is where there is none."""
    if gguf_name in _OUTER:
        return _OUTER[gguf_name]
    block = _BLOCK.fullmatch(gguf_name)
    if block is None or block[2] not in _INNER:
        return gguf_name
    return f"model.layers.{block[1]}.{_INNER[block[2]]}.{block[3]}"


def _shortest(value: Any) -> Any:
    """A float32 of the file as the decimal that was meant: 1e-05, not 9.999999747378752e-06."""
    return float(str(numpy.float32(value))) if isinstance(value, float) else value


def _dequantised(tensor: Any) -> Any:
    """float32 numpy array, writable and owned by us (the reader's memory is mapped read-only)."""
    return gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32", copy=True)


def _rows_by_half(weights: Tensor, heads: int) -> Tensor:
    """Undo the row order of q and k in Llama files: pairs that rotate together are adjacent there.

    Here the first half of a head's rows pairs with its second half. weights: [rows, ...].
    """
    pairs = weights.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2).contiguous()
