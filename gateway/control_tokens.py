"""Keeps special tokens that callers type apart from those that the chat template writes.

"<|im_end|>" inside a message is text that somebody typed; between two messages it is the template's
marker. After rendering both look the same, so they are told apart in three steps:

1. mark: before rendering, control tokens inside callers' strings are wrapped in unguessable digits.
   The token itself stays in place, so a template that looks for one (say, to cut reasoning away)
   still finds it.
2. seal: after rendering, every control token that is not wrapped is the template's own: it gets an
   unguessable name. Then the wrapping is dropped.
3. The tokenizer that encodes the text knows control tokens under these names only. What callers
   typed is ordinary text to it, tokenised in one go with its surroundings.

Text without control tokens is rendered and tokenised exactly as if none of this existed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping
from typing import Any

from serving.model_dir import ModelDirError

NONCE_DIGITS = 32


class ControlTokens:
    """Control tokens of one tokenizer: the special ones, and the template's other format tokens.

    Special tokens are text wherever a caller typed them. Format tokens ("<tool_call>", not special
    in the tokenizer's own words) are text in what users and tools say, but stay tokens in system
    and assistant messages, where operators and earlier replies use them.
    """

    def __init__(self, *, special: Mapping[str, int], format_tokens: Mapping[str, int]) -> None:
        """Both map a token's text to its id."""
        tokens = {**format_tokens, **special}
        self._open, self._close, self._break, self._name = _nonces(tokens)
        self.sealed_names = {text: f"{self._name}x{i}x" for text, i in tokens.items()}
        self._strict = _any_of(tokens)
        self._lenient = _any_of(special)
        self._starts = tuple({text[:end] for text in special for end in range(1, len(text))})
        self._ends = tuple({text[start:] for text in special for start in range(1, len(text))})
        self._insides = "\0".join(special)
        marks = f"{self._open}|{self._close}|{self._break}"
        wrapped = f"{self._open}(?P<typed>{self._strict.pattern}){self._close}"
        self._rendered = re.compile(f"{wrapped}|(?P<own>{self._strict.pattern})|{marks}")

    def marked_text(self, text: str, *, strict: bool) -> str:
        """Free text with its control tokens wrapped. strict: format tokens, too.

        Text that is a part of a special token is kept from growing into one together with its
        neighbours.
        """
        wrapped = self._wrapped(text, self._strict if strict else self._lenient)
        if text and text in self._insides:
            return f"{self._break}{wrapped}{self._break}"
        return self._fenced(wrapped, text)

    def marked_value(self, value: Any) -> Any:
        """A JSON value (tools, calls) with the special tokens in all its strings and keys wrapped.

        Short words stay as they are: templates compare them ("function", "string").
        """
        if isinstance(value, str):
            return self._fenced(self._wrapped(value, self._lenient), value)
        if isinstance(value, Mapping):
            return {
                self._wrapped(key, self._lenient): self.marked_value(item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.marked_value(item) for item in value]
        return value

    def sealed(self, rendered: str) -> str:
        """Rendered text, the template's own control tokens under sealed names, marks dropped."""
        return self._rendered.sub(self._sealed_piece, rendered)

    def _wrapped(self, text: str, pattern: re.Pattern[str]) -> str:
        return pattern.sub(f"{self._open}\\g<0>{self._close}", text)

    def _fenced(self, wrapped: str, text: str) -> str:
        at_start = self._break if text.startswith(self._ends) else ""
        at_end = self._break if text.endswith(self._starts) else ""
        return f"{at_start}{wrapped}{at_end}"

    def _sealed_piece(self, match: re.Match[str]) -> str:
        if match["typed"] is not None:
            return match["typed"]
        if match["own"] is not None:
            return self.sealed_names[match["own"]]
        return ""


def _any_of(tokens: Collection[str]) -> re.Pattern[str]:
    """Any of the tokens, the longest first; nothing if there is none."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _nonces(tokens: Collection[str]) -> tuple[str, str, str, str]:
    """Digits only: no filter of a template (upper, tojson, trim) changes them."""
    if not all(tokens) or any(text.isdigit() for text in tokens):
        raise ModelDirError("tokenizer.json has a special token that is empty or a number")
    first, second, third, fourth = (
        "".join(secrets.choice("0123456789") for _ in range(NONCE_DIGITS)) for _ in range(4)
    )
    return first, second, third, fourth
