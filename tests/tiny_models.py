"""Random tiny checkpoints of every supported architecture, with tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_TOKEN = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Enough variety for a few hundred merges; the words mean nothing.
TRAINING_TEXT = (
    "the quick brown fox jumps over the lazy dog while seven tall ships sail past the old harbour "
    "wall and a keeper counts the lamps that burn along the stone pier before the winter rain "
)
# transformers' usual 0.02 gives nearly flat logits; greedy tokens of a tiny model must differ.
INIT_STD = 0.15

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


def write_tiny_model(
    directory: Path,
    arch: str = "llama",
    *,
    rope: str | None = None,
    tied: bool = True,
    layers: int = 2,
    hidden: int = 32,
    q_heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 400,
    seed: int = 0,
    positions_max: int = 2048,
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """Write config, weights (float32 safetensors), tokenizer and template; returns the directory.

    arch: llama, mistral, qwen2, qwen3, or another model type of transformers. rope: a key of
    ROPES, or None for the default kind. fields: of the config, over the values chosen here.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(vocab)
    values: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions_max,
        "tie_word_embeddings": tied,
        "initializer_range": INIT_STD,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(END_TOKEN),
        "pad_token_id": None,
    }
    if rope is not None:
        values["rope_parameters"] = {"rope_theta": 10000.0, **ROPES[rope]}
    if arch == "mistral":
        values["sliding_window"] = None
    if arch == "qwen3":
        values["head_dim"] = 16
    values.update(fields or {})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **values))
        _randomise_vectors(model)
    model.generation_config.eos_token_id = values["eos_token_id"]
    model.float().save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    template = {"chat_template": CHAT_TEMPLATE, "eos_token": END_TOKEN}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def _randomise_vectors(model: torch.nn.Module) -> None:
    """Norm weights are ones and biases zeros at first: a forward that ignores them would pass."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                centre = 1.0 if "norm" in name else 0.0
                parameter.copy_(centre + 0.2 * torch.randn_like(parameter))


def _tokenizer(vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    return tokenizer
