"""RoPE tables against transformers' own, and against what a rotation must be."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.model_config import parse_config
from engine.rope import Rope, RopeConfig, inverse_frequencies, rotate

CPU = torch.device("cpu")
HEAD_DIM = 64
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "default-theta": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "llama3-theta": LLAMA3 | {"rope_theta": 5e5},
    "yarn": YARN,
    "yarn-theta": YARN | {"rope_theta": 1e6},
    "yarn-no-factor": YARN | {"factor": None},
    "yarn-attention-factor": YARN | {"attention_factor": 1.25},
    "yarn-mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn-betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn-one-step-ramp": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
}


def config_fields(rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 4 * HEAD_DIM,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, **rope},
    }


def ours(kind: str, dtype: torch.dtype = torch.float32) -> Rope:
    config = parse_config(config_fields(KINDS[kind]))
    return Rope(config.rope, head_dim=HEAD_DIM, dtype=dtype, device=CPU)


def theirs(kind: str) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(LlamaConfig(**config_fields(KINDS[kind])))


@pytest.mark.parametrize("kind", KINDS)
def test_float32_tables_equal_those_of_transformers_at_any_position(kind: str) -> None:
    positions = torch.tensor([0, 1, 7, 511, 512, 513, 2047, 4095, 100_000])
    cos, sin = ours(kind).angles(positions)
    expected_cos, expected_sin = theirs(kind)(torch.zeros(1), positions[None])
    assert torch.equal(cos[:, 0].repeat(1, 2), expected_cos[0])
    assert torch.equal(sin[:, 0].repeat(1, 2), expected_sin[0])


@pytest.mark.parametrize("kind", KINDS)
def test_rotated_heads_equal_those_of_transformers(kind: str) -> None:
    positions = torch.tensor([3, 700, 4000])
    q = torch.randn(3, 4, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    cos, sin = theirs(kind)(torch.zeros(1), positions[None])
    expected, _ = apply_rotary_pos_emb(q[None], q[None], cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(rotate(q, ours(kind).angles(positions)), expected[0])


@pytest.mark.parametrize("kind", KINDS)
def test_float64_frequencies_are_the_same_formula_in_float64(kind: str) -> None:
    config = parse_config(config_fields(KINDS[kind])).rope
    double = inverse_frequencies(config, HEAD_DIM, torch.float64)
    assert double.dtype == torch.float64
    torch.testing.assert_close(
        double.float(), inverse_frequencies(config, HEAD_DIM, torch.float32), rtol=2e-6, atol=0
    )


def test_float64_angles_are_exact_where_float32_ones_are_not() -> None:
    cos, _ = ours("default", torch.float64).angles(torch.tensor([4095]))
    expected = math.cos(4095 * 10000.0 ** (-2 / HEAD_DIM))
    assert cos[0, 0, 1].item() == pytest.approx(expected, abs=1e-12)


def test_one_pair_turns_by_its_position_in_radians() -> None:
    rope = Rope(RopeConfig(), head_dim=2, dtype=torch.float64, device=CPU)
    x = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    turned = rotate(x, rope.angles(torch.tensor([2])))[0, 0]
    assert turned.tolist() == pytest.approx([math.cos(2), math.sin(2)])


def test_a_dot_product_depends_on_the_distance_only() -> None:
    rope = ours("llama3", torch.float64)
    q, k = torch.randn(2, 1, 1, HEAD_DIM, dtype=torch.float64)

    def dot(q_position: int, k_position: int) -> float:
        turned_q = rotate(q, rope.angles(torch.tensor([q_position])))
        turned_k = rotate(k, rope.angles(torch.tensor([k_position])))
        return float((turned_q * turned_k).sum())

    assert dot(1500, 1400) == pytest.approx(dot(100, 0), abs=1e-9)
    assert dot(1500, 1400) != pytest.approx(dot(1500, 1000), abs=1e-3)


def test_bfloat16_heads_are_rotated_in_float32() -> None:
    positions = torch.tensor([5, 900])
    x = torch.randn(2, 3, HEAD_DIM).bfloat16()
    angles = ours("default", torch.bfloat16).angles(positions)
    assert angles.cos.dtype == torch.float32
    assert torch.equal(rotate(x, angles), rotate(x.float(), angles).bfloat16())


def test_divisors_divide_the_default_frequencies() -> None:
    config = RopeConfig(kind="divided", divisors=(1.0, 4.0))
    assert inverse_frequencies(config, 4, torch.float64).tolist() == pytest.approx([1.0, 0.0025])
