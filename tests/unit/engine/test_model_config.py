"""What a config.json may say, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from engine.model_config import ModelShape, UnsupportedModel, parse_config
from engine.rope import RopeConfig

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}
MISTRAL = LLAMA | {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "sliding_window": None,
}
QWEN2 = LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
YARN = {"rope_type": "yarn", "factor": 4.0}


def without(config: dict[str, Any], field: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != field}


def test_a_llama_config_becomes_a_shape() -> None:
    config = parse_config(LLAMA)
    assert config.shape == ModelShape(
        layers=3, q_heads=4, kv_heads=2, head_dim=8, hidden=32, vocab=100, positions_max=8192
    )
    assert config.rope == RopeConfig(theta=5e5)
    assert (config.intermediate, config.norm_eps, config.tied_head) == (48, 1e-5, False)
    assert not config.qkv_bias
    assert not config.qk_norm


def test_only_qwen2_has_biases_and_only_qwen3_norms_its_heads() -> None:
    assert parse_config(QWEN2).qkv_bias
    assert not parse_config(QWEN2).qk_norm
    assert parse_config(QWEN3).qk_norm
    assert not parse_config(QWEN3).qkv_bias


def test_defaults_are_those_of_transformers() -> None:
    assert parse_config(without(LLAMA, "num_key_value_heads")).shape.kv_heads == 4
    assert parse_config(QWEN3).shape.head_dim == 128
    assert parse_config(QWEN3 | {"head_dim": 16}).shape.head_dim == 16
    assert parse_config(without(LLAMA, "rope_theta")).rope.theta == 10_000.0


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (LLAMA, "model_type", "gpt2"),
        (LLAMA, "architectures", ["LlamaForSequenceClassification"]),
        (LLAMA, "hidden_act", "gelu"),
        (LLAMA, "attention_bias", True),
        (LLAMA, "mlp_bias", True),
        (QWEN3, "attention_bias", True),
        (LLAMA, "partial_rotary_factor", 0.5),
        (LLAMA, "rope_interleaved", True),
        (LLAMA, "quantization_config", {"quant_method": "gptq"}),
        (LLAMA, "auto_map", {"AutoModelForCausalLM": "code.Model"}),
        (LLAMA, "num_local_experts", 8),
        (LLAMA, "num_experts", 8),
        (LLAMA, "sliding_window", 4096),
        (LLAMA, "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        (LLAMA, "final_logit_softcapping", 30.0),
        (LLAMA, "residual_multiplier", 0.2),
        (MISTRAL, "sliding_window", 4096),
        (QWEN2, "use_sliding_window", True),
        (QWEN3, "layer_types", ["sliding_attention"] * 3),
        (LLAMA, "head_dim", 7),
        (LLAMA, "num_key_value_heads", 3),
        (LLAMA, "num_hidden_layers", 0),
        (LLAMA, "hidden_size", "32"),
        (LLAMA, "rms_norm_eps", -1.0),
    ],
)
def test_what_is_not_implemented_is_refused_by_name_and_value(
    config: dict[str, Any], field: str, value: object
) -> None:
    with pytest.raises(UnsupportedModel, match=field) as refused:
        parse_config(config | {field: value})
    assert repr(value) in str(refused.value) or str(value) in str(refused.value)


@pytest.mark.parametrize(
    "field",
    [
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rms_norm_eps",
    ],
)
def test_a_missing_field_is_refused_by_name(field: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{field}=None"):
        parse_config(without(LLAMA, field))


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type='dynamic'"),
        ({"rope_type": "longrope", "factor": 2.0}, "rope_type='longrope'"),
        ({"type": "mrope", "mrope_section": [1, 2]}, "rope_type='mrope'"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "rope_parameters.mrope_section"),
        ({"rope_type": "linear"}, "factor=None"),
        ({"rope_type": "linear", "factor": 0}, "factor=0"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor=None"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4},
            "high_freq_factor=4",
        ),
        ({"rope_type": "yarn", "factor": 4.0, "finetuned": True}, "rope_parameters.finetuned"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"full_attention": {"rope_type": "default"}}, "rope_parameters.full_attention"),
    ],
)
def test_rope_that_is_not_implemented_is_refused(rope: dict[str, Any], named: str) -> None:
    for spelling in ("rope_parameters", "rope_scaling"):
        with pytest.raises(UnsupportedModel, match=named):
            parse_config(LLAMA | {spelling: rope})


def test_neutral_values_of_refused_fields_pass() -> None:
    neutral = {
        "attention_bias": False,
        "mlp_bias": False,
        "quantization_config": None,
        "partial_rotary_factor": 1.0,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 3,
        "architectures": None,
        "pretraining_tp": 1,
    }
    assert parse_config(LLAMA | neutral).shape == parse_config(LLAMA).shape


def test_a_window_as_long_as_the_positions_cuts_nothing() -> None:
    assert parse_config(MISTRAL | {"sliding_window": 8192}).architecture == "mistral"
    assert parse_config(QWEN2 | {"use_sliding_window": False, "sliding_window": 64})


def test_a_silent_mistral_config_means_a_window() -> None:
    with pytest.raises(UnsupportedModel, match="sliding_window=4096"):
        parse_config(without(MISTRAL, "sliding_window"))


def test_both_spellings_of_rope_mean_the_same() -> None:
    older = LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    newer = without(LLAMA, "rope_theta") | {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    }
    assert parse_config(older).rope == parse_config(newer).rope
    assert parse_config(older).rope == RopeConfig(kind="linear", theta=5e5, factor=2.0)


def test_yarn_without_original_positions_takes_the_models_own() -> None:
    assert parse_config(LLAMA | {"rope_scaling": YARN}).rope.original_positions == 8192
    stated = YARN | {"original_max_position_embeddings": 2048}
    assert parse_config(LLAMA | {"rope_scaling": stated}).rope.original_positions == 2048


def test_the_first_layers_keep_everything_else() -> None:
    config = parse_config(LLAMA)
    cut = config.first_layers(2)
    assert cut.shape.layers == 2
    assert cut.first_layers(2) == cut
    for layers in (0, 4):
        with pytest.raises(UnsupportedModel, match="the model has 3"):
            config.first_layers(layers)
