"""Tiny tokenizers of the kinds that real models have, as model directories without a model."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Cuts reasoning out of earlier replies, as reasoning models' templates do, and knows tools.
REASONING = (
    "{%- if tools %}{{- '<|im_start|>system\\n<tools>' + (tools | tojson) + '</tools>' }}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
DEFAULT_SYSTEM = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    " {{ message['content'] | trim }}{{ eos_token }}{% else %}"
    "[INST] {{ message['content'] | trim }} [/INST]{% endif %}{% endfor %}"
)
WORDS = "the quick brown fox jumps over a lazy dog and the harbour wall keeps seven ships"


def write_byte_level(directory: Path, template: str | None = CHATML) -> Path:
    """Byte-level BPE, as GPT-2, Qwen and Llama 3 have; with format tokens and a token of blanks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("</think>", "<tool_call>")])
    tokenizer.add_tokens([AddedToken("    ")])
    return _write(directory, tokenizer, template, eos="<|im_end|>", bos=None)


def write_sentencepiece(directory: Path, template: str | None = INST) -> Path:
    """BPE over characters with byte fallback, as Llama 2 and Mistral have; adds a bos to text."""
    characters = sorted(set(WORDS + "▁<>|/[]ISNT.x") - {" "})
    tokens = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)] + characters
    tokens += ["▁t", "he", "▁the", "qu"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[("▁", "t"), ("h", "e"), ("▁t", "he"), ("q", "u")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [
            AddedToken("<unk>", normalized=False),
            AddedToken("<s>", normalized=False),
            AddedToken("</s>", normalized=False, rstrip=True),
            AddedToken("[INST]", normalized=False, lstrip=True),
            AddedToken("[/INST]", normalized=False),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return _write(directory, tokenizer, template, eos="</s>", bos="<s>")


def write_unigram(directory: Path, template: str | None = INST) -> Path:
    """A unigram model whose special tokens stand in its vocabulary, with the best of scores."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("[INST]", 0.0), ("[/INST]", 0.0)]
    letters = sorted(set(WORDS + "▁<>|/[]ISNT.x") - {" "})
    pieces += [(letter, -9.0) for letter in letters] + [("▁the", -3.0), ("▁fox", -4.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens([piece for piece, _ in pieces[:5]])
    return _write(directory, tokenizer, template, eos="</s>", bos="<s>")


def _write(
    directory: Path, tokenizer: Tokenizer, template: str | None, *, eos: str, bos: str | None
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": template,
        "eos_token": eos,
        "bos_token": bos,
    }
    given = {name: value for name, value in config.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(given), encoding="utf-8")
    (directory / "config.json").write_text(
        json.dumps({"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 2}), encoding="utf-8"
    )
    return directory
