"""GGUF files load as the checkpoint they were written from, and as transformers loads them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from demo.prepare import find_source
from engine.gguf_weights import GgufFile
from engine.model_config import InvalidCheckpoint, UnsupportedModel, parse_config
from engine.rope import RopeConfig, inverse_frequencies
from engine.weights import SafetensorFiles, load_decoder, read_checkpoint
from tests.numerics.gguf_files import write_gguf
from tests.numerics.plain_attend import PlainAttend
from tests.tiny_models import ROPES, write_tiny_model

F16, Q8_0 = gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0


def both_forms(tmp_path: Path, arch: str = "llama", **options: Any) -> tuple[Path, Path]:
    """A tiny checkpoint as safetensors and as GGUF."""
    of_file = {"quantisation", "metadata", "tensors"} & set(options)
    gguf_options = {name: options.pop(name) for name in of_file}
    plain, packed = tmp_path / "safetensors", tmp_path / "gguf"
    write_tiny_model(plain, arch, **options)
    packed.mkdir()
    write_gguf(plain, packed / "tiny.gguf", **gguf_options)
    return plain, packed


def logits(directory: Path, layers: int | None = None) -> Tensor:
    decoder = load_decoder(directory, dtype=torch.float64, device="cpu", layers=layers)
    return decoder.logits(decoder(torch.tensor([9, 8, 7]), torch.tensor([0, 5, 90]), PlainAttend()))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_file_holds_the_weights_it_was_written_from(
    tmp_path: Path, arch: str, tied: bool
) -> None:
    plain, packed = both_forms(tmp_path, arch, tied=tied)
    expected, found = SafetensorFiles(plain), GgufFile(packed / "tiny.gguf")
    assert found.shapes() == expected.shapes()
    for name in expected.shapes():
        assert torch.equal(found.read(name), expected.read(name)), name
    assert torch.equal(logits(packed), logits(plain))
    assert torch.equal(logits(packed, layers=1), logits(plain, layers=1))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_the_config_in_the_file_equals_config_json(tmp_path: Path, arch: str) -> None:
    plain, packed = both_forms(tmp_path, arch, tied=False)
    assert read_checkpoint(packed)[0] == read_checkpoint(plain)[0]


def test_half_precision_is_exact_and_eight_bits_are_near(tmp_path: Path) -> None:
    plain, packed = both_forms(tmp_path, quantisation=F16)
    name = "model.layers.0.self_attn.q_proj.weight"
    stored = SafetensorFiles(plain).read(name)
    assert torch.equal(GgufFile(packed / "tiny.gguf").read(name), stored.half().float())
    write_gguf(plain, packed / "tiny.gguf", quantisation=Q8_0)
    found = GgufFile(packed / "tiny.gguf").read(name)
    largest = stored.abs().max().item()
    torch.testing.assert_close(found, stored, rtol=0, atol=1.1 * largest / 127 / 2)


def test_frequency_divisors_of_llama3_files_are_used(tmp_path: Path) -> None:
    """llama.cpp stores the scaling as one divisor for each frequency."""
    config = parse_config(_fields_with_llama3())
    plain_table = inverse_frequencies(RopeConfig(), 8, torch.float64)
    divisors = plain_table / inverse_frequencies(config.rope, 8, torch.float64)
    tensors = {"rope_freqs.weight": divisors.float().numpy()}
    plain, packed = both_forms(tmp_path, rope="llama3", tensors=tensors)
    assert read_checkpoint(packed)[0].rope.kind == "divided"
    torch.testing.assert_close(logits(packed), logits(plain), rtol=0, atol=1e-5)


def _fields_with_llama3() -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 32,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_parameters": ROPES["llama3"],
    }


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_rope_in_the_metadata_is_used(tmp_path: Path, kind: str) -> None:
    metadata: dict[str, int | float | str] = {
        "rope.scaling.type": kind,
        "rope.scaling.factor": 4.0,
    }
    if kind == "yarn":
        metadata["rope.scaling.original_context_length"] = 64
    plain, packed = both_forms(tmp_path, rope=kind, metadata=metadata)
    assert read_checkpoint(packed)[0].rope == read_checkpoint(plain)[0].rope
    assert torch.equal(logits(packed), logits(plain))


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"attention.scale": 0.5}, "llama.attention.scale=0.5"),
        ({"logit_scale": 2.0}, "llama.logit_scale=2.0"),
        ({"expert_count": 8}, "num_experts=8"),
        ({"attention.sliding_window": 128}, "sliding_window=128"),
        ({"rope.scaling.type": "longrope"}, "rope_type='longrope'"),
        ({"rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
    ],
)
def test_metadata_that_is_not_implemented_is_refused(
    tmp_path: Path, metadata: dict[str, int | float | str], named: str
) -> None:
    _, packed = both_forms(tmp_path, metadata=metadata)
    with pytest.raises(UnsupportedModel, match=named):
        logits(packed)


def test_a_head_that_rotates_in_part_is_refused(tmp_path: Path) -> None:
    _, packed = both_forms(tmp_path)
    reader = gguf.GGUFReader(packed / "tiny.gguf", "r+")
    reader.fields["llama.rope.dimension_count"].parts[-1][0] = 4
    reader.data.flush()
    with pytest.raises(UnsupportedModel, match=r"rope\.dimension_count=4 is not head_dim 8"):
        logits(packed)


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_sinks.weight": np.zeros(4, dtype=np.float32)}
    _, packed = both_forms(tmp_path, tensors=tensors)
    with pytest.raises(InvalidCheckpoint, match=r"blk\.0\.attn_sinks\.weight is unexpected"):
        logits(packed)


def test_an_unknown_architecture_and_a_foreign_file_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gptneox")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="model_type='gptneox'"):
        logits(tmp_path)
    (tmp_path / "other.gguf").write_bytes(b"no such format")
    with pytest.raises(InvalidCheckpoint, match=r"other\.gguf is no readable GGUF"):
        logits(tmp_path)


@pytest.mark.model
@pytest.mark.timeout(180)
def test_the_embedded_model_loads_as_transformers_loads_it() -> None:
    source = find_source()
    found = GgufFile(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float32, local_files_only=True
        )
    expected = model.state_dict()
    assert set(expected) - set(found.shapes()) == {"lm_head.weight"}
    for name in found.shapes():
        assert torch.equal(found.read(name), expected[name]), name
