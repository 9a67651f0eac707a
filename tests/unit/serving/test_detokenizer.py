"""Pushed text adds up to the tokenizer's own decode, whole characters only, cut at stop strings."""

import itertools
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from serving.detokenizer import WINDOW_TOKENS, Detokenizer

REPLACEMENT = "\ufffd"
# Emoji with a joiner, CJK, combining marks, right-to-left, four-byte characters.
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and then the dog sleeps.\n\n",
    "日本語の文章と你好世界、여러 나라의 글자",
    "👩‍👩‍👧 family 😀😃😄 rocket 🚀 flag 🇩🇪",
    "e\u0301 a\u0308 n\u0303 — naïve café “quotes” …",
    "שלום עולם مرحبا",
]
EXAMPLES = settings(max_examples=150, deadline=None)


def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE as of Qwen and Llama 3: a token is any bytes, also part of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """As of Llama 2 and Mistral: what has no token of its own is spelled in byte tokens."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "the", "t", "h", "e", ".", "▁.", "日", "é", "\u0301", "▁▁"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    pieces = ["<unk>", "▁the", "▁", "a", "▁a", REPLACEMENT]
    tokenizer = Tokenizer(
        models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=False)
    )
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
METASPACE = metaspace_tokenizer()
TOKENIZERS = {"byte level": BYTE_LEVEL, "byte fallback": BYTE_FALLBACK, "metaspace": METASPACE}
by_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


def byte_ids(text: str | bytes) -> list[int]:
    """The ids that spell text byte by byte, for the byte-level tokenizer."""
    data = text.encode() if isinstance(text, str) else text
    alphabet = _byte_alphabet()
    return [BYTE_LEVEL.token_to_id(alphabet[byte]) for byte in data]


def _byte_alphabet() -> dict[int, str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }


def fallback_ids(data: bytes) -> list[int]:
    return [BYTE_FALLBACK.token_to_id(f"<0x{byte:02X}>") for byte in data]


def pieces_of(
    tokenizer: Tokenizer,
    pushes: Iterable[list[int]],
    *,
    stop_strings: tuple[str, ...] = (),
    skip_special: bool = True,
) -> tuple[list[str], str | None]:
    """What each push and then finish return, and the stop string that was found."""
    detokenizer = Detokenizer(tokenizer, stop_strings=stop_strings, skip_special=skip_special)
    pieces = [detokenizer.push(ids) for ids in pushes]
    return [*pieces, detokenizer.finish()], detokenizer.matched_stop


def one_by_one(ids: Iterable[int]) -> list[list[int]]:
    return [[token_id] for token_id in ids]


@st.composite
def pushes_of(draw: st.DrawFn, tokenizer: Tokenizer) -> list[list[int]]:
    # Two ids past the vocabulary: models have such rows.
    ids = st.integers(0, tokenizer.get_vocab_size() + 1)
    one = st.lists(ids, min_size=1, max_size=1)
    return draw(st.lists(one | st.lists(ids, max_size=6), max_size=40))


def check_adds_up(tokenizer: Tokenizer, pushes: list[list[int]], *, skip_special: bool) -> None:
    ids = list(itertools.chain.from_iterable(pushes))
    whole = tokenizer.decode(ids, skip_special_tokens=skip_special)
    pieces, matched = pieces_of(tokenizer, pushes, skip_special=skip_special)
    assert "".join(pieces) == whole
    assert matched is None


@given(data=st.data(), skip_special=st.booleans())
@EXAMPLES
@by_tokenizer
def test_random_tokens_add_up_to_the_tokenizers_own_decode(
    tokenizer: Tokenizer, data: st.DataObject, skip_special: bool
) -> None:
    check_adds_up(tokenizer, data.draw(pushes_of(tokenizer)), skip_special=skip_special)


# Lead bytes, continuation bytes, bytes that UTF-8 never has, and one letter.
NASTY_BYTES = b"\xf0\x9f\x98\x80\xe4\xbd\xa0\xed\xc3\xa9\xc0\xff\xe0\xf4\xbfa"


@given(data=st.lists(st.sampled_from(NASTY_BYTES), max_size=60))
@EXAMPLES
def test_bytes_that_are_no_text_add_up_too(data: list[int]) -> None:
    check_adds_up(BYTE_LEVEL, one_by_one(byte_ids(bytes(data))), skip_special=True)
    check_adds_up(BYTE_FALLBACK, one_by_one(fallback_ids(bytes(data))), skip_special=True)


@given(text=st.text(max_size=30) | st.sampled_from(CORPUS))
@EXAMPLES
def test_a_character_split_over_tokens_comes_whole(text: str) -> None:
    for pushes in (one_by_one(byte_ids(text)), one_by_one(BYTE_LEVEL.encode(text).ids)):
        pieces, _ = pieces_of(BYTE_LEVEL, pushes)
        assert "".join(pieces) == text
        assert all(REPLACEMENT not in piece for piece in pieces) or REPLACEMENT in text


def test_an_emoji_of_four_tokens_comes_with_the_fourth() -> None:
    pieces, _ = pieces_of(BYTE_LEVEL, one_by_one(byte_ids("a😀b")))
    assert pieces == ["a", "", "", "", "😀", "b", ""]


def test_an_unfinished_character_at_the_end_comes_with_finish_only() -> None:
    pieces, _ = pieces_of(BYTE_LEVEL, one_by_one(byte_ids("日".encode()[:2])))
    assert pieces == ["", "", REPLACEMENT]


def test_byte_tokens_come_when_another_token_ends_their_run() -> None:
    the = BYTE_FALLBACK.token_to_id("▁the")
    ids = [the, *fallback_ids("😀\n".encode()), the]
    pieces, _ = pieces_of(BYTE_FALLBACK, one_by_one(ids))
    assert pieces == ["the", "", "", "", "", "", "😀\n the", ""]


def test_byte_tokens_at_the_end_come_with_finish() -> None:
    pieces, _ = pieces_of(BYTE_FALLBACK, one_by_one(fallback_ids("é".encode())))
    assert pieces == ["", "", "é"]


def test_a_special_token_does_not_cost_the_next_word_its_blank() -> None:
    the, end = BYTE_FALLBACK.token_to_id("▁the"), BYTE_FALLBACK.token_to_id("</s>")
    ids = [the, end, end, end, end, end, the]
    pieces, _ = pieces_of(BYTE_FALLBACK, one_by_one(ids))
    assert "".join(pieces) == "the the"


def test_special_tokens_are_shown_where_they_are_asked_for() -> None:
    ids = [*BYTE_LEVEL.encode("dog").ids, BYTE_LEVEL.token_to_id("<|end|>")]
    assert "".join(pieces_of(BYTE_LEVEL, one_by_one(ids))[0]) == "dog"
    shown, _ = pieces_of(BYTE_LEVEL, one_by_one(ids), skip_special=False)
    assert "".join(shown) == "dog<|end|>"


@pytest.mark.parametrize(
    ("text", "stops", "kept", "matched"),
    [
        ("one two three", ("two",), "one ", "two"),
        ("one two three", ("three", "two"), "one ", "two"),
        ("one two three", ("four",), "one two three", None),
        ("aaab", ("aab",), "a", "aab"),
        ("abab abc", ("abc",), "abab ", "abc"),
        # What ends first wins, and of those the longest.
        ("abc", ("abc", "b"), "a", "b"),
        ("abc", ("b", "ab"), "", "ab"),
        ("stop", ("stop",), "", "stop"),
        ("日本語😀の", ("😀",), "日本語", "😀"),
        ("日本語😀の", ("語😀の",), "日本", "語😀の"),
        ("a\n\nb", ("\n\n",), "a", "\n\n"),
    ],
)
def test_text_is_cut_where_a_stop_string_begins(
    text: str, stops: tuple[str, ...], kept: str, matched: str | None
) -> None:
    byte_by_byte = one_by_one(byte_ids(text))
    tokens = one_by_one(BYTE_LEVEL.encode(text).ids)
    at_once = [BYTE_LEVEL.encode(text).ids]
    for pushes in (byte_by_byte, tokens, at_once):
        pieces, found = pieces_of(BYTE_LEVEL, pushes, stop_strings=stops)
        assert "".join(pieces) == kept
        assert found == matched


def cut_by_scan(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The rule, said plainly: read on until the text ends with a stop string; take the longest."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(
    text=st.text(alphabet="ab😀", max_size=25),
    stops=st.lists(st.text(alphabet="ab😀", min_size=1, max_size=5), max_size=4).map(tuple),
    cuts=st.randoms(use_true_random=False),
)
@EXAMPLES
def test_where_the_tokens_are_cut_does_not_matter_to_stop_strings(
    text: str, stops: tuple[str, ...], cuts: random.Random
) -> None:
    ids = byte_ids(text)
    pushes = []
    while ids:
        size = cuts.randint(1, 6)
        pushes.append(ids[:size])
        ids = ids[size:]
    pieces, matched = pieces_of(BYTE_LEVEL, pushes, stop_strings=stops)
    assert ("".join(pieces), matched) == cut_by_scan(text, stops)


def test_a_stop_string_inside_one_token_drops_the_rest_of_the_token() -> None:
    think = BYTE_LEVEL.token_to_id("<think>")
    ids = [*byte_ids("a"), think, *byte_ids("b")]
    pieces, matched = pieces_of(BYTE_LEVEL, one_by_one(ids), stop_strings=("hin",))
    assert pieces == ["a", "<t", "", ""]
    assert matched == "hin"


def test_the_start_of_a_stop_string_is_held_back_until_it_is_none() -> None:
    pieces, _ = pieces_of(BYTE_LEVEL, one_by_one(byte_ids("x##y##")), stop_strings=("###",))
    assert pieces == ["x", "", "", "##y", "", "", "##"]


def test_a_stop_string_is_known_with_the_token_that_completes_it() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, stop_strings=["##"])
    first, second = byte_ids("##")
    assert detokenizer.push([first]) == ""
    assert detokenizer.matched_stop is None
    assert detokenizer.push([second]) == ""
    assert detokenizer.matched_stop == "##"


def test_a_stop_string_may_come_to_light_with_finish() -> None:
    detokenizer = Detokenizer(BYTE_FALLBACK, stop_strings=["\n"])
    assert detokenizer.push(fallback_ids(b"a\nb")) == ""
    assert detokenizer.finish() == "a"
    assert detokenizer.matched_stop == "\n"


def test_finish_returns_what_is_left_once() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, stop_strings=["##"])
    detokenizer.push(byte_ids("#"))
    assert detokenizer.finish() == "#"
    assert detokenizer.finish() == ""


def test_an_empty_stop_string_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        Detokenizer(BYTE_LEVEL, stop_strings=["a", ""])


class CountingTokenizer:
    """The byte-level or byte-fallback tokenizer, and how many tokens it was asked to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoded_tokens = 0
        self.id_to_token = tokenizer.id_to_token
        self.get_added_tokens_decoder = tokenizer.get_added_tokens_decoder

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        self.decoded_tokens += len(ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


ENDLESS = {
    "text": (BYTE_LEVEL, byte_ids("some words 😀 ")),
    "bytes that never make a character": (BYTE_LEVEL, byte_ids(b"\xff")),
    "lead bytes only": (BYTE_LEVEL, byte_ids(b"\xf0")),
    "a run of byte tokens": (BYTE_FALLBACK, fallback_ids("é".encode())),
    "special tokens": (BYTE_LEVEL, [BYTE_LEVEL.token_to_id("<|end|>")]),
}


@pytest.mark.parametrize(("tokenizer", "unit"), ENDLESS.values(), ids=ENDLESS.keys())
def test_a_push_decodes_a_bounded_number_of_tokens_however_long_the_reply(
    tokenizer: Tokenizer, unit: list[int]
) -> None:
    counting = CountingTokenizer(tokenizer)
    ids = list(itertools.islice(itertools.cycle(unit), 2000))
    pieces, _ = pieces_of(counting, one_by_one(ids))
    assert "".join(pieces) == tokenizer.decode(ids)
    # At most: the window and the new token, then the window alone.
    assert counting.decoded_tokens <= (2 * WINDOW_TOKENS + 1) * len(ids)
