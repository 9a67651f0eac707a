"""Checkpoint directories: shards, and every way in which tensors and config can disagree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.decoder import Decoder
from engine.model_config import InvalidCheckpoint, UnsupportedModel
from engine.weights import DecoderKind, load_decoder
from tests.numerics.plain_attend import PlainAttend
from tests.tiny_models import write_tiny_model

Tensors = dict[str, Tensor]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", tied=False)


def load(directory: Path, **options: Any) -> Decoder:
    return load_decoder(directory, dtype=torch.float32, device="cpu", **options)


def hidden(decoder: Decoder) -> Tensor:
    return decoder(torch.tensor([5, 6, 7]), torch.tensor([0, 3, 9]), PlainAttend())


def change(directory: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / SINGLE)
    edit(tensors)
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})


def set_fields(directory: Path, **fields: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | fields))


def shard(directory: Path, edit: Callable[[dict[str, str]], object] = lambda names: None) -> None:
    """Split model.safetensors in two; `edit` changes the index's map from tensor to file."""
    tensors = load_file(directory / SINGLE)
    (directory / SINGLE).unlink()
    weight_map = {}
    for part in range(2):
        file = f"model-{part + 1:05}-of-00002.safetensors"
        names = sorted(tensors)[part::2]
        save_file({name: tensors[name] for name in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    edit(weight_map)
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_shards_equal_one_file(model_dir: Path) -> None:
    expected = hidden(load(model_dir))
    shard(model_dir)
    assert torch.equal(hidden(load(model_dir)), expected)


@pytest.mark.parametrize("name", [Q, "lm_head.weight", "model.norm.weight"])
def test_a_missing_tensor_is_named(model_dir: Path, name: str) -> None:
    change(model_dir, lambda tensors: tensors.pop(name))
    with pytest.raises(InvalidCheckpoint, match=f"tensor {name} is missing"):
        load(model_dir)


def test_an_unexpected_tensor_is_named(model_dir: Path) -> None:
    name = "model.layers.1.self_attn.q_norm.weight"
    change(model_dir, lambda tensors: tensors.update({name: torch.ones(8)}))
    with pytest.raises(InvalidCheckpoint, match=f"tensor {name} is unexpected"):
        load(model_dir)


def test_a_layer_more_than_the_config_says_is_unexpected(model_dir: Path) -> None:
    set_fields(model_dir, num_hidden_layers=1)
    with pytest.raises(InvalidCheckpoint, match=r"model\.layers\.1\.\S+ is unexpected"):
        load(model_dir)


def test_a_mis_shaped_tensor_is_named_with_both_shapes(model_dir: Path) -> None:
    change(model_dir, lambda tensors: tensors.update({Q: torch.zeros(32, 31)}))
    with pytest.raises(InvalidCheckpoint, match=rf"{Q} has shape \(32, 31\), expected \(32, 32\)"):
        load(model_dir)


def test_a_flattened_tensor_is_mis_shaped(model_dir: Path) -> None:
    change(model_dir, lambda tensors: tensors.update({Q: tensors[Q].flatten()}))
    with pytest.raises(InvalidCheckpoint, match=r"has shape \(1024,\)"):
        load(model_dir)


def test_the_transformers_adapter_refuses_a_checkpoint_with_holes(model_dir: Path) -> None:
    change(model_dir, lambda tensors: tensors.pop(Q))
    with pytest.raises(InvalidCheckpoint, match=f"missing_keys: {Q}"):
        load(model_dir, kind="transformers")


def test_a_redundant_rope_table_is_no_error(model_dir: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(model_dir, lambda tensors: tensors.update({name: torch.ones(4)}))
    load(model_dir)


def test_a_tied_head_may_be_stored_twice_but_not_differently(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, tied=True)
    expected = hidden(load(tmp_path))
    embedding = load_file(tmp_path / SINGLE)["model.embed_tokens.weight"]
    change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    assert torch.equal(hidden(load(tmp_path)), expected)
    change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(InvalidCheckpoint, match=r"lm_head\.weight differs"):
        load(tmp_path)


def test_an_index_may_not_leave_its_directory(model_dir: Path) -> None:
    shard(model_dir, lambda names: names.update({Q: "../model-00001-of-00002.safetensors"}))
    with pytest.raises(InvalidCheckpoint, match="outside the directory"):
        load(model_dir)


def test_an_index_that_promises_too_much_is_refused(model_dir: Path) -> None:
    shard(model_dir, lambda names: names.update({"ghost": next(iter(names.values()))}))
    with pytest.raises(InvalidCheckpoint, match="ghost is in"):
        load(model_dir)


def test_a_missing_shard_is_named(model_dir: Path) -> None:
    shard(model_dir)
    (model_dir / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InvalidCheckpoint, match=r"model-00002-of-00002\.safetensors"):
        load(model_dir)


def test_a_cut_off_file_is_refused(model_dir: Path) -> None:
    whole = (model_dir / SINGLE).read_bytes()
    (model_dir / SINGLE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidCheckpoint, match=rf"{SINGLE} cannot be read"):
        load(model_dir)


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_a_broken_config_is_refused(model_dir: Path, content: str | None) -> None:
    config = model_dir / "config.json"
    config.unlink() if content is None else config.write_text(content)
    with pytest.raises(InvalidCheckpoint, match=r"config\.json"):
        load(model_dir)


def test_a_directory_without_weights_is_refused(model_dir: Path) -> None:
    (model_dir / SINGLE).unlink()
    (model_dir / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors"):
        load(model_dir)


@pytest.mark.parametrize("kind", get_args(DecoderKind))
def test_no_kind_of_decoder_runs_code_of_the_checkpoint(model_dir: Path, kind: DecoderKind) -> None:
    set_fields(model_dir, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    (model_dir / "modeling.py").write_text("raise SystemExit('ran')\n")
    with pytest.raises(UnsupportedModel, match="auto_map"):
        load(model_dir, kind=kind)


@pytest.mark.parametrize("kind", get_args(DecoderKind))
def test_quantised_checkpoints_are_refused(model_dir: Path, kind: DecoderKind) -> None:
    set_fields(model_dir, quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(UnsupportedModel, match="quantization_config"):
        load(model_dir, kind=kind)


@pytest.mark.parametrize("kind", get_args(DecoderKind))
def test_more_layers_than_there_are_is_refused(model_dir: Path, kind: DecoderKind) -> None:
    with pytest.raises(UnsupportedModel, match="the model has 2"):
        load(model_dir, kind=kind, layers=3)


def test_weights_take_the_dtype_that_was_asked_for(model_dir: Path) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        decoder = load_decoder(model_dir, dtype=dtype, device="cpu")
        assert decoder.dtype == hidden(decoder).dtype == dtype
