"""A checkpoint's config.json as values that the lean decoder implements; others are refused here.

The architecture is fixed by `model_type`. Of each field that transformers' code of that
architecture reads, either the decoder implements the value, or loading stops and names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from engine.rope import RopeConfig, yarn_attention_factor

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]

# What the classes of transformers assume where config.json is silent.
_MISTRAL_WINDOW = 4096
_QWEN3_HEAD_DIM = 128

# Fields that would change the arithmetic, with the value that changes nothing.
_NEUTRAL: Mapping[str, object] = {
    "attention_bias": False,
    "mlp_bias": False,
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
    "use_sliding_window": False,
    "is_encoder_decoder": False,
    "num_experts": 0,
    "num_local_experts": 0,
    "n_routed_experts": 0,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
}
_REFUSED = (
    "quantization_config",
    "compression_config",
    "attention_multiplier",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "no_rope_layers",
    "attention_chunk_size",
    "kv_lora_rank",
)
_ROPE_FIELDS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}


class UnsupportedModel(ValueError):
    """The checkpoint asks for something that is not implemented."""


class InvalidCheckpoint(ValueError):
    """The files of a checkpoint contradict its config or themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    positions_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    architecture: Architecture
    shape: ModelShape
    intermediate: int
    norm_eps: float
    tied_head: bool
    rope: RopeConfig

    @property
    def qkv_bias(self) -> bool:
        return self.architecture == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.architecture == "qwen3"

    def first_layers(self, layers: int) -> DecoderConfig:
        """The same model cut after its first layers. Raises UnsupportedModel if it has fewer."""
        if not 1 <= layers <= self.shape.layers:
            raise UnsupportedModel(f"layers={layers}: the model has {self.shape.layers}")
        return replace(self, shape=replace(self.shape, layers=layers))


def parse_config(config: Mapping[str, Any]) -> DecoderConfig:
    """config: the parsed config.json. Raises UnsupportedModel, naming the field and its value."""
    refuse_code(config)
    architecture = _architecture(config)
    _refuse_other_arithmetic(config)
    shape = _shape(config, architecture)
    _refuse_window(config, architecture, shape.positions_max)
    return DecoderConfig(
        architecture=architecture,
        shape=shape,
        intermediate=_count(config, "intermediate_size"),
        norm_eps=_number(config, "rms_norm_eps"),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        rope=_rope(config, shape.positions_max),
    )


def refuse_code(config: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that wants its own Python code to run."""
    if config.get("auto_map"):
        raise _unsupported("auto_map", config["auto_map"])


def _architecture(config: Mapping[str, Any]) -> Architecture:
    found = config.get("model_type")
    for architecture in get_args(Architecture):
        if found == architecture:
            expected = f"{architecture.capitalize()}ForCausalLM"
            if (config.get("architectures") or [expected]) != [expected]:
                raise _unsupported("architectures", config["architectures"])
            return architecture
    raise _unsupported("model_type", found)


def _refuse_other_arithmetic(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise _unsupported("hidden_act", config["hidden_act"])
    for field, neutral in _NEUTRAL.items():
        if config.get(field) not in (None, neutral):
            raise _unsupported(field, config[field])
    for field in _REFUSED:
        if config.get(field) is not None:
            raise _unsupported(field, config[field])


def _refuse_window(
    config: Mapping[str, Any], architecture: Architecture, positions_max: int
) -> None:
    """A window as long as the positions cuts nothing; Qwen has a switch, which is checked above."""
    if set(config.get("layer_types") or ["full_attention"]) != {"full_attention"}:
        raise _unsupported("layer_types", config["layer_types"])
    if architecture in ("qwen2", "qwen3"):
        return
    default = _MISTRAL_WINDOW if architecture == "mistral" else None
    window = config.get("sliding_window", default)
    if window is not None and window < positions_max:
        raise _unsupported("sliding_window", window)


def _shape(config: Mapping[str, Any], architecture: Architecture) -> ModelShape:
    hidden, q_heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    if architecture == "llama" and config.get("num_key_value_heads") is None:
        kv_heads = q_heads
    else:
        kv_heads = _count(config, "num_key_value_heads")
    if config.get("head_dim") is not None:
        head_dim = _count(config, "head_dim")
    else:
        head_dim = _QWEN3_HEAD_DIM if architecture == "qwen3" else hidden // q_heads
    if q_heads % kv_heads:
        raise UnsupportedModel(f"num_key_value_heads={kv_heads} does not divide {q_heads} heads")
    if head_dim % 2:
        raise _unsupported("head_dim", head_dim)
    return ModelShape(
        layers=_count(config, "num_hidden_layers"),
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        vocab=_count(config, "vocab_size"),
        positions_max=_count(config, "max_position_embeddings"),
    )


def _rope(config: Mapping[str, Any], positions_max: int) -> RopeConfig:
    """Both spellings: `rope_parameters`, or the older `rope_scaling` beside `rope_theta`."""
    fields = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    theta = fields.pop("rope_theta", None) or config.get("rope_theta") or RopeConfig().theta
    older = fields.pop("type", "default")
    kind = fields.pop("rope_type", None) or older
    if (part := fields.pop("partial_rotary_factor", None)) not in (None, 1.0):
        raise _unsupported("partial_rotary_factor", part)
    if kind not in _ROPE_FIELDS:
        raise _unsupported("rope_type", kind)
    for field, value in fields.items():
        if field not in _ROPE_FIELDS[kind] and value is not None:
            raise _unsupported(f"rope_parameters.{field}", value)
    if config.get("original_max_position_embeddings") is not None:
        fields["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return _rope_of_kind(kind, {"rope_theta": theta, **fields}, positions_max)


def _rope_of_kind(kind: str, fields: Mapping[str, Any], positions_max: int) -> RopeConfig:
    theta = _number(fields, "rope_theta")
    original = int(fields.get("original_max_position_embeddings") or positions_max)
    match kind:
        case "linear":
            return RopeConfig(kind="linear", theta=theta, factor=_number(fields, "factor"))
        case "llama3":
            return _llama3(theta, fields, original=original)
        case "yarn":
            return _yarn(theta, fields, original=original, positions_max=positions_max)
        case _:
            return RopeConfig(theta=theta)


def _llama3(theta: float, fields: Mapping[str, Any], *, original: int) -> RopeConfig:
    low, high = _number(fields, "low_freq_factor"), _number(fields, "high_freq_factor")
    if high <= low:
        raise _unsupported("rope_parameters.high_freq_factor", high)
    return RopeConfig(
        kind="llama3",
        theta=theta,
        factor=_number(fields, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_positions=original,
    )


def _yarn(
    theta: float, fields: Mapping[str, Any], *, original: int, positions_max: int
) -> RopeConfig:
    factor = float(fields.get("factor") or positions_max / original)
    attention_factor = fields.get("attention_factor")
    if attention_factor is None:
        attention_factor = yarn_attention_factor(
            factor, mscale=fields.get("mscale"), mscale_all_dim=fields.get("mscale_all_dim")
        )
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_positions=original,
        attention_factor=float(attention_factor),
        beta_fast=float(fields.get("beta_fast") or 32),
        beta_slow=float(fields.get("beta_slow") or 1),
        truncate=bool(fields.get("truncate", True)),
    )


def _count(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _unsupported(field, value)
    return value


def _number(config: Mapping[str, Any], field: str) -> float:
    value = config.get(field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise _unsupported(field, value)
    return float(value)


def _unsupported(field: str, value: object) -> UnsupportedModel:
    return UnsupportedModel(f"config field {field}={value!r} is not supported")
