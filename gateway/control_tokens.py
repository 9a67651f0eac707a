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

# 9 to the 19th: nobody guesses one.
NONCE_DIGITS = 20


class ControlTokens:
    """Control tokens of one tokenizer: the special ones, and the template's other format tokens.

    Special tokens are text wherever a caller typed them. Format tokens ("<tool_call>", not special
    in the tokenizer's own words) are text in what users and tools say, but stay tokens in system
    and assistant messages, where operators and earlier replies use them.
    """

    def __init__(self, *, special: Mapping[str, int], format_tokens: Mapping[str, int]) -> None:
        """Both map a token's text to its id."""
        self._tokens = {**format_tokens, **special}
        self._open, self._close, self._break, name = _nonces(self._tokens)
        self._marks = re.compile(f"({self._open}|{self._close}|{self._break})")
        self.sealed_names = {text: f"{name}x{i}x" for text, i in self._tokens.items()}
        self._strict = _any_of(self._tokens)
        self._lenient = _any_of(special)
        self._starts = {text[:end] for text in special for end in range(1, len(text))}
        self._ends = {text[start:] for text in special for start in range(1, len(text))}
        self._longest = max(map(len, special), default=1)
        self._insides = "\0".join(special)

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
        # Text and marks in turns; a token is never looked for across a mark.
        texts_and_marks = ["", *self._marks.split(rendered), ""]
        return "".join(
            self._sealed_text(text, before=before, after=after)
            for before, text, after in zip(
                texts_and_marks[:-1:2], texts_and_marks[1::2], texts_and_marks[2::2], strict=True
            )
        )

    def _sealed_text(self, text: str, *, before: str, after: str) -> str:
        """One mark beside a token is enough: a template may have cut the other one off."""
        typed = self._strict.match(text) if before == self._open else None
        start = typed.end() if typed else 0
        end = len(text)
        if after == self._close and start < end:
            ending = (token for token in self._tokens if text.endswith(token, start))
            end -= max(map(len, ending), default=0)
        own = self._strict.sub(lambda match: self.sealed_names[match[0]], text[start:end])
        return f"{text[:start]}{own}{text[end:]}"

    def _wrapped(self, text: str, pattern: re.Pattern[str]) -> str:
        return pattern.sub(f"{self._open}\\g<0>{self._close}", text)

    def _fenced(self, wrapped: str, text: str) -> str:
        lengths = range(1, min(self._longest, len(text) + 1))
        at_start = self._break if any(text[:n] in self._ends for n in lengths) else ""
        at_end = self._break if any(text[-n:] in self._starts for n in lengths) else ""
        return f"{at_start}{wrapped}{at_end}"


def _any_of(tokens: Collection[str]) -> re.Pattern[str]:
    """Any of the tokens, the longest first; nothing if there is none."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _nonces(tokens: Collection[str]) -> tuple[str, str, str, str]:
    """Digits only: no filter of a template (upper, tojson, trim) changes them."""
    if not all(tokens) or any(text.isdigit() for text in tokens):
        raise ModelDirError("tokenizer.json has a special token that is empty or a number")
    first, second, third, fourth = (_nonce() for _ in range(4))
    return first, second, third, fourth


def _nonce() -> str:
    """The 1 stands in front only, so a nonce never overlaps with another one or with itself."""
    return "1" + "".join(secrets.choice("023456789") for _ in range(NONCE_DIGITS - 1))
