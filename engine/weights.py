"""Weights from a local checkpoint directory: safetensors, sharded or not, or one GGUF file.

Every tensor that the config implies must be there with its shape, and no other may be: a tensor
nobody reads is a part of the model nobody runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.decoder import Decoder, DecoderWeights, LayerWeights, LeanDecoder
from engine.gguf_weights import GgufFile
from engine.model_config import (
    DecoderConfig,
    InvalidCheckpoint,
    UnsupportedModel,
    parse_config,
    refuse_code,
)

DecoderKind = Literal["lean", "transformers", "auto"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
# Old Llama checkpoints carry the RoPE table, which the config determines.
_REDUNDANT = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class TensorSource(Protocol):
    """Tensors under the names transformers uses."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> Tensor: ...


def load_decoder(
    directory: Path | str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    layers: int | None = None,
    kind: DecoderKind = "lean",
) -> Decoder:
    """The decoder of a checkpoint; `layers`: only its first ones, under the same norm and head.

    kind "auto" takes the lean decoder and, for architectures it does not know, transformers.
    Raises UnsupportedModel or InvalidCheckpoint, naming the field or tensor.
    """
    path, device = Path(directory), torch.device(device)
    if kind == "transformers":
        return _load_transformers(path, dtype=dtype, device=device, layers=layers)
    try:
        return _load_lean(path, dtype=dtype, device=device, layers=layers)
    except UnsupportedModel:
        if kind == "lean" or not (path / "config.json").exists():
            raise
        return _load_transformers(path, dtype=dtype, device=device, layers=layers)


def read_checkpoint(directory: Path) -> tuple[DecoderConfig, TensorSource]:
    """Config and tensors of a directory; safetensors win over a GGUF file beside them."""
    if any((directory / name).exists() for name in (_SINGLE, _INDEX)):
        return parse_config(_read_json(directory / "config.json")), SafetensorFiles(directory)
    found = sorted(directory.glob("*.gguf"))
    if len(found) != 1:
        raise InvalidCheckpoint(f"expected {_SINGLE}, {_INDEX} or one .gguf file")
    file = GgufFile(found[0])
    return file.config(), file


def _load_lean(
    path: Path, *, dtype: torch.dtype, device: torch.device, layers: int | None
) -> LeanDecoder:
    config, source = read_checkpoint(path)
    check_tensors(config, source)
    if layers is not None:
        config = config.first_layers(layers)
    return LeanDecoder(config, _read_weights(config, source, dtype=dtype, device=device))


def _load_transformers(
    path: Path, *, dtype: torch.dtype, device: torch.device, layers: int | None
) -> Decoder:
    # transformers takes seconds to import, and the lean decoder does without it.
    from engine.hf_decoder import load_hf_decoder

    refuse_code(_read_json(path / "config.json"))
    return load_hf_decoder(path, dtype=dtype, device=device, layers=layers)


def check_tensors(config: DecoderConfig, source: TensorSource) -> None:
    """Compare names and shapes with what the config implies, before anything is read."""
    found = source.shapes()
    expected = dict(_expected_shapes(config))
    if config.tied_head and _HEAD in found:
        expected[_HEAD] = expected[_EMBEDDING]
    for name, shape in expected.items():
        if name not in found:
            raise InvalidCheckpoint(f"tensor {name} is missing")
        if found[name] != shape:
            raise InvalidCheckpoint(f"tensor {name} has shape {found[name]}, expected {shape}")
    for name in found:
        if name not in expected and not _REDUNDANT.fullmatch(name):
            raise InvalidCheckpoint(f"tensor {name} is unexpected")


def _expected_shapes(config: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    shape = config.shape
    q, kv = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield _EMBEDDING, (shape.vocab, shape.hidden)
    yield "model.norm.weight", (shape.hidden,)
    if not config.tied_head:
        yield _HEAD, (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (shape.hidden,)
        yield prefix + "post_attention_layernorm.weight", (shape.hidden,)
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield f"{prefix}self_attn.{name}.weight", (rows, shape.hidden)
            if config.qkv_bias:
                yield f"{prefix}self_attn.{name}.bias", (rows,)
        if config.qk_norm:
            yield prefix + "self_attn.q_norm.weight", (shape.head_dim,)
            yield prefix + "self_attn.k_norm.weight", (shape.head_dim,)
        yield prefix + "self_attn.o_proj.weight", (shape.hidden, q)
        yield prefix + "mlp.gate_proj.weight", (config.intermediate, shape.hidden)
        yield prefix + "mlp.up_proj.weight", (config.intermediate, shape.hidden)
        yield prefix + "mlp.down_proj.weight", (shape.hidden, config.intermediate)


def _read_weights(
    config: DecoderConfig, source: TensorSource, *, dtype: torch.dtype, device: torch.device
) -> DecoderWeights:
    def read(*names: str) -> Tensor:
        """These tensors stacked along their rows."""
        parts = [source.read(name).to(device=device, dtype=dtype) for name in names]
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).contiguous()

    embedding = read(_EMBEDDING)
    if not config.tied_head:
        head = read(_HEAD)
    elif _HEAD in source.shapes() and not torch.equal(read(_HEAD), embedding):
        raise InvalidCheckpoint(f"tensor {_HEAD} differs from the embedding it is tied to")
    else:
        head = embedding
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_read_layer(config, layer, read) for layer in range(config.shape.layers)),
        final_norm=read("model.norm.weight"),
        head=head,
    )


class _Read(Protocol):
    def __call__(self, *names: str) -> Tensor: ...


def _read_layer(config: DecoderConfig, layer: int, read: _Read) -> LayerWeights:
    prefix = f"model.layers.{layer}."
    attention = prefix + "self_attn."
    fused = [f"{attention}{name}_proj" for name in "qkv"]
    return LayerWeights(
        input_norm=read(prefix + "input_layernorm.weight"),
        qkv=read(*(f"{name}.weight" for name in fused)),
        qkv_bias=read(*(f"{name}.bias" for name in fused)) if config.qkv_bias else None,
        q_norm=read(attention + "q_norm.weight") if config.qk_norm else None,
        k_norm=read(attention + "k_norm.weight") if config.qk_norm else None,
        output=read(attention + "o_proj.weight"),
        mlp_norm=read(prefix + "post_attention_layernorm.weight"),
        gate_up=read(prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"),
        down=read(prefix + "mlp.down_proj.weight"),
    )


class SafetensorFiles:
    """The safetensors of a directory, one file or the shards that an index lists."""

    def __init__(self, directory: Path) -> None:
        single = directory / _SINGLE
        files = [single] if single.exists() else _shards(directory)
        self._files: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            opened = _open(file)
            for name in opened.keys():  # noqa: SIM118 - the handle is no mapping
                if name in self._files:
                    raise InvalidCheckpoint(f"tensor {name} is in two files")
                self._files[name] = opened
                self._shapes[name] = tuple(opened.get_slice(name).get_shape())
        if not single.exists():
            _check_index(directory, self._shapes)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise InvalidCheckpoint(f"{file.name} cannot be read: {error}") from error


def _weight_map(directory: Path) -> dict[str, str]:
    weight_map = _read_json(directory / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidCheckpoint(f"{_INDEX} has no weight_map")
    return weight_map


def _shards(directory: Path) -> list[Path]:
    names = sorted(set(_weight_map(directory).values()))
    for name in names:
        if Path(name).name != name:
            raise InvalidCheckpoint(f"{_INDEX} names a file outside the directory")
    return [directory / name for name in names]


def _check_index(directory: Path, found: Mapping[str, object]) -> None:
    for name in _weight_map(directory):
        if name not in found:
            raise InvalidCheckpoint(f"tensor {name} is in {_INDEX} but in no shard")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidCheckpoint(f"{file.name} cannot be read: {type(error).__name__}") from error
    if not isinstance(parsed, dict):
        raise InvalidCheckpoint(f"{file.name} holds no object")
    return parsed
