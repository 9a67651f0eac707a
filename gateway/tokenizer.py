"""Prompt text to token ids and back, with the tokenizer of the model directory.

Encoding wants text that went through ControlTokens.sealed: typed special tokens are plain text
here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from gateway.control_tokens import ControlTokens
from serving.model_dir import ModelDirError, load_tokenizer, tokenizer_digest


class PromptTokenizer:
    """Encodes sealed text, and hands out the plain tokenizer for decoding."""

    def __init__(self, model_dir: Path, *, template_literals: Iterable[str] = ()) -> None:
        """template_literals: what the chat template can write; format tokens are those found there.

        Raises ModelDirError for a tokenizer that cannot keep typed special tokens apart.
        """
        self.plain = load_tokenizer(model_dir)
        self.digest = tokenizer_digest(model_dir)
        self.controls = _control_tokens(self.plain, "\0".join(template_literals))
        self._sealed = _sealed_tokenizer(self.plain, self.controls)

    def encode(self, sealed_text: str, *, add_special_tokens: bool) -> np.ndarray:
        """Token ids uint32 [tokens]. Blocking; other threads run meanwhile.

        add_special_tokens: what the tokenizer itself puts around a text; a chat template writes its
        own.
        """
        # encode() keeps the interpreter's lock for the whole text, encode_batch_fast() gives it
        # away.
        encoded = self._sealed.encode_batch_fast(
            [sealed_text], add_special_tokens=add_special_tokens
        )
        return np.asarray(encoded[0].ids, dtype=np.uint32)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of token ids, special tokens included."""
        return self.plain.decode(list(token_ids), skip_special_tokens=False)


def _control_tokens(tokenizer: Tokenizer, literals: str) -> ControlTokens:
    added = tokenizer.get_added_tokens_decoder()
    special = {token.content: i for i, token in added.items() if token.special}
    # Runs of blanks are added tokens of some tokenizers, and ordinary text to everybody.
    format_tokens = {
        token.content: i
        for i, token in added.items()
        if not token.special and token.content.strip() and token.content in literals
    }
    return ControlTokens(special=special, format_tokens=format_tokens)


def _sealed_tokenizer(tokenizer: Tokenizer, controls: ControlTokens) -> Tokenizer:
    """The same tokenizer with its control tokens renamed everywhere; ids stay as they are."""
    names = controls.sealed_names
    data = json.loads(tokenizer.to_str())
    for token in data.get("added_tokens", ()):
        token["content"] = names.get(token["content"], token["content"])
    _rename_in_model(data["model"], names)
    sealed = Tokenizer.from_str(json.dumps(data))
    for text, name in names.items():
        if sealed.token_to_id(name) != tokenizer.token_to_id(text):
            raise ModelDirError("tokenizer.json has special tokens whose ids depend on their text")
    return sealed


def _rename_in_model(model: dict[str, Any], names: dict[str, str]) -> None:
    merged = {"".join(pair) for pair in map(_merge_pair, model.get("merges", ()))}
    if not merged.isdisjoint(names):
        raise ModelDirError("tokenizer.json has a special token that ordinary text merges into")
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): i for text, i in vocab.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])


def _merge_pair(merge: str | list[str]) -> list[str]:
    """Newer files write a merge as a pair, older ones as one string with a blank."""
    return merge.split(" ") if isinstance(merge, str) else merge
