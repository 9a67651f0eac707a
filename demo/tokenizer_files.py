"""Tokenizer and chat template of a byte-level GGUF vocabulary, as files of a model directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

ReadField = Callable[[str], Any]

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
# Token types of llama.cpp.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def build_tokenizer(read: ReadField) -> Tokenizer:
    """read: a metadata field of the GGUF. Raises ValueError for another kind of tokenizer."""
    kind, splitter = read("tokenizer.ggml.model"), read("tokenizer.ggml.pre")
    if (kind, splitter) != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer {kind}/{splitter} is not supported, only gpt2/smollm")
    tokens, types = read("tokenizer.ggml.tokens"), read("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in read("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # "smollm": every digit by itself, then the split of GPT-2.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if unknown := set(types) - {_NORMAL, _CONTROL, _USER_DEFINED}:
        raise ValueError(f"token types {sorted(unknown)} are not supported")
    for token, kind in zip(tokens, types, strict=True):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    return tokenizer


def write_tokenizer_files(read: ReadField, directory: Path) -> None:
    """tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json."""
    tokenizer = build_tokenizer(read)
    tokenizer.save(str(directory / "tokenizer.json"))
    tokens = read("tokenizer.ggml.tokens")
    template = TEMPLATE.read_text(encoding="utf-8")
    named = {name: tokens[read(f"tokenizer.ggml.{field}")] for name, field in _NAMED_TOKENS.items()}
    config = named | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": read("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    write_json(directory / "tokenizer_config.json", config)
    (directory / TEMPLATE.name).write_text(template, encoding="utf-8")
    # <|endoftext|> ends a document as <|im_end|> ends a message; nothing sensible follows either.
    ends = [read("tokenizer.ggml.eos_token_id"), tokenizer.token_to_id("<|endoftext|>")]
    generation = {
        "bos_token_id": read("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends,
        "pad_token_id": read("tokenizer.ggml.padding_token_id"),
    }
    write_json(directory / "generation_config.json", generation)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
