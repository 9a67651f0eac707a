"""Token ids to text, as they come: only text that later tokens cannot change, cut at stop strings.

The target uses it to stop, the gateway to cut the text that clients see.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
# Tokens that are decoded again with the next ones. Three, because an unfinished character has at
# most three of its four bytes and each token has at least one. And one before them, because
# decoders treat the first token of a text in its own way (most drop a leading blank).
WINDOW_TOKENS = 4
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer:
    """Text of one reply: all that push and then finish return is the decoded reply up to the stop.

    tokenizer: tokenizers.Tokenizer, or anything with its decode, id_to_token and
    get_added_tokens_decoder. The stop string that ends first wins, of those the longest one.
    Each push decodes a bounded number of tokens besides its own.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, stop_strings: Sequence[str], skip_special: bool = True
    ) -> None:
        self._text = _CertainText(tokenizer, skip_special=skip_special)
        self._search = _StopSearch(stop_strings)

    @property
    def matched_stop(self) -> str | None:
        """The stop string that was found; push and finish return no text after it."""
        return self._search.matched

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that became certain: no unfinished character, no possible start of a stop string."""
        return self._search.push(self._text.push(token_ids))

    def finish(self) -> str:
        """The text held back so far. It may complete a stop string: look at matched_stop again."""
        return self._search.push(self._text.finish()) + self._search.finish()


class _CertainText:
    """Decodes a short window of the newest tokens, and tells apart what later tokens may change.

    Two things may change. A text that ends with U+FFFD may end with an unfinished character: that
    one is held back. And a run of byte tokens (<0x0A>) is decoded as a whole, as UTF-8 if all of it
    is valid and as nothing but U+FFFD otherwise: it is held back until another token ends it.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().items()
        # Left out here, not by the decoder: a window must not begin with a token that has no text.
        self._skipped = {i for i, token in added if token.special} if skip_special else set()
        self._window: list[int] = []
        # Characters of the window's text that were returned.
        self._returned = 0
        self._ends_in_byte_run = False

    def push(self, token_ids: Iterable[int]) -> str:
        if not self._extend(token_ids) or self._ends_in_byte_run:
            return ""
        text = self._decode()
        held = text.endswith(REPLACEMENT)
        new = text[self._returned : len(text) - held]
        self._slide(text, held=held)
        return new

    def finish(self) -> str:
        new = self._decode()[self._returned :]
        self._window.clear()
        self._returned = 0
        return new

    def _extend(self, token_ids: Iterable[int]) -> bool:
        length = len(self._window)
        for token_id in token_ids:
            token = self._tokenizer.id_to_token(token_id)
            # A model may have more ids than its tokenizer; those have no text.
            if token is not None and token_id not in self._skipped:
                self._window.append(token_id)
                self._ends_in_byte_run = _BYTE_TOKEN.fullmatch(token) is not None
        return len(self._window) > length

    def _slide(self, text: str, *, held: bool) -> None:
        if len(self._window) > WINDOW_TOKENS:
            # Characters cut at the window's new start decode to U+FFFD then and later: they count
            # as returned, and UTF-8 falls into step again at the next character.
            del self._window[:-WINDOW_TOKENS]
            text = self._decode()
        self._returned = len(text) - held

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


class _StopSearch:
    """Returns text up to the first stop string, and holds back what may be the start of one."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        assert all(stop_strings)
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        self.matched: str | None = None

    def push(self, new: str) -> str:
        if self.matched is not None or not new:
            return ""
        text = self._held + new
        found = [
            (text.index(stop) + len(stop), -len(stop), stop)
            for stop in self._stop_strings
            if stop in text
        ]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[: end - len(self.matched)]
        certain = len(text) - self._possible_start(text)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        text, self._held = self._held, ""
        return text

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of text that starts a stop string."""
        longest = 0
        for stop in self._stop_strings:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
