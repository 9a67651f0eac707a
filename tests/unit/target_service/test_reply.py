"""When a reply is over."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from serving.finish import FinishReason
from serving.sampling_settings import Stops
from target_service.decode import Reply

# Ids 0 to 25 are the letters; 26 is what ends a reply.
LETTERS = "abcdefghijklmnopqrstuvwxyz"
END = 26


def tokenizer() -> Tokenizer:
    vocab = {letter: index for index, letter in enumerate(LETTERS)} | {"<end>": END}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<end>"))
    made.decoder = decoders.Fuse()
    return made


def after(
    text: str,
    *,
    end: bool = False,
    prompt_tokens: int = 10,
    positions_max: int = 1000,
    **stops: Any,
) -> Reply:
    """The reply after these letters."""
    reply = Reply(
        Stops(**{"max_tokens": 100, **stops}),
        end_token_ids=frozenset({END}),
        prompt_tokens=prompt_tokens,
        positions_max=positions_max,
        tokenizer=tokenizer(),
    )
    for token_id in [LETTERS.index(letter) for letter in text] + ([END] if end else []):
        assert reply.finish_reason is None
        reply.add(token_id)
    return reply


def test_a_reply_goes_on_while_nothing_ends_it() -> None:
    reply = after("abc", stop_strings=("x",), stop_token_ids=frozenset({9}))
    assert reply.finish_reason is None
    assert reply.token_ids == [0, 1, 2]


def test_an_end_token_ends_it_and_is_named() -> None:
    reply = after("ab", end=True)
    assert reply.finish_reason is FinishReason.END_TOKEN
    assert reply.matched_token_id == END


def test_an_ignored_end_token_is_a_token() -> None:
    assert after("ab", end=True, ignore_end_tokens=True).finish_reason is None


def test_an_ignored_end_token_can_still_be_a_stop_token() -> None:
    reply = after("ab", end=True, ignore_end_tokens=True, stop_token_ids=frozenset({END}))
    assert reply.finish_reason is FinishReason.STOP_TOKEN


def test_a_stop_string_ends_it_with_the_token_that_completes_it() -> None:
    reply = after("xab", stop_strings=("ab", "zz"))
    assert reply.finish_reason is FinishReason.STOP_STRING
    assert reply.matched_stop_string == "ab"
    assert reply.matched_token_id is None


def test_max_tokens_end_it() -> None:
    assert after("abc", max_tokens=3).finish_reason is FinishReason.MAX_TOKENS


@pytest.mark.parametrize(("positions_max", "tokens"), [(10, 1), (11, 2), (13, 4)])
def test_the_models_last_position_ends_it_after_one_more_token(
    positions_max: int, tokens: int
) -> None:
    reply = after("abcd"[:tokens], positions_max=positions_max)
    assert reply.tokens_max == tokens
    assert reply.finish_reason is FinishReason.CONTEXT_END


def test_where_several_ends_meet_the_most_telling_counts() -> None:
    stops = {"max_tokens": 2, "stop_token_ids": frozenset({1, END}), "stop_strings": ("b",)}
    assert after("a", end=True, **stops).finish_reason is FinishReason.END_TOKEN
    assert after("ab", **stops).finish_reason is FinishReason.STOP_TOKEN
    without_ids = {**stops, "stop_token_ids": frozenset()}
    assert after("ab", **without_ids).finish_reason is FinishReason.STOP_STRING
    last = after("ac", positions_max=11, **without_ids)
    assert last.finish_reason is FinishReason.MAX_TOKENS


def test_nothing_is_added_to_a_reply_that_is_over() -> None:
    reply = after("ab", end=True)
    with pytest.raises(AssertionError):
        reply.add(0)
