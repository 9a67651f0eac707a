from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gateway.protected_head import common_prefix, leading_messages, protected_head_tokens
from tests.unit.gateway.prompts import open_encoder, open_tokenizer, talk
from tests.unit.gateway.tokenizer_dirs import CHATML, DEFAULT_SYSTEM, REASONING, write_byte_level

TOOLS = [{"name": "count", "parameters": {"ships": "integer"}}]


def _head_text(directory: Path, *turns: tuple[str, str], tools: bool = False) -> str:
    conversation = talk(*turns, tools=TOOLS if tools else None)
    prompt = open_encoder(directory).encode(conversation, tokens_max=10_000)
    return open_tokenizer(directory).decode(prompt.token_ids[: prompt.protected_head_tokens])


def test_a_system_message_is_the_head_up_to_the_users_words(tmp_path: Path) -> None:
    write_byte_level(tmp_path, CHATML)
    head = _head_text(tmp_path, ("system", "Be brief."), ("user", "the fox"))
    assert head == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"


def test_all_leading_system_and_developer_messages_belong_to_it(tmp_path: Path) -> None:
    write_byte_level(tmp_path, CHATML)
    turns = (("system", "One."), ("developer", "Two."), ("user", "the fox"), ("system", "Three."))
    assert [m["content"] for m in leading_messages(talk(*turns).messages)] == ["One.", "Two."]
    assert _head_text(tmp_path, *turns).endswith("Two.<|im_end|>\n<|im_start|>user\n")


def test_tools_alone_are_protected(tmp_path: Path) -> None:
    write_byte_level(tmp_path, REASONING)
    head = _head_text(tmp_path, ("user", "the fox"), tools=True)
    assert '<tools>[{"name": "count"' in head
    assert head.endswith("</tools><|im_end|>\n<|im_start|>user\n")


def test_tools_in_the_first_user_turn_are_protected_and_its_words_are_not(tmp_path: Path) -> None:
    template = CHATML.replace(
        "{{ message['content'] }}", "{% if loop.first %}{{ tools | tojson }}\n{% endif %}"
        "{{ message['content'] }}",
    )  # fmt: skip
    write_byte_level(tmp_path, template)
    head = _head_text(tmp_path, ("user", "the fox"), ("assistant", "the dog"), tools=True)
    assert head.endswith('"integer"}}]\n')


def test_a_default_system_block_is_protected(tmp_path: Path) -> None:
    write_byte_level(tmp_path, DEFAULT_SYSTEM)
    head = _head_text(tmp_path, ("user", "the fox"))
    assert head == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"


def test_without_any_of_them_only_the_templates_opening_is(tmp_path: Path) -> None:
    write_byte_level(tmp_path, CHATML)
    assert _head_text(tmp_path, ("user", "the fox")) == "<|im_start|>user\n"


def test_the_head_is_what_the_real_prompt_has_too(tmp_path: Path) -> None:
    write_byte_level(tmp_path, CHATML)
    head = _head_text(tmp_path, ("system", "Be brief."), ("assistant", "the fox"))
    assert head == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>"


def test_tools_behind_earlier_turns_are_not_mistaken_for_a_head(tmp_path: Path) -> None:
    template = CHATML.replace(
        "<|im_start|>{{",
        "{% if loop.last and tools %}{{ tools | tojson }}{% endif %}<|im_start|>{{",
    )
    write_byte_level(tmp_path, template)
    turns = (("user", "the fox"), ("assistant", "a dog"), ("user", "the wall"))
    assert _head_text(tmp_path, *turns, tools=True) == ""
    assert '"count"' in _head_text(tmp_path, ("user", "the wall"), tools=True)


def test_a_head_never_is_the_whole_prompt() -> None:
    ids = np.array([7, 8, 9], dtype=np.uint32)
    assert protected_head_tokens(ids, [ids, ids]) == 2
    assert protected_head_tokens(ids[:1], [ids, ids]) == 0


@pytest.mark.parametrize(
    ("one", "other", "length"),
    [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 9, 3], 1), ([4], [5], 0)],
)
def test_a_common_prefix_ends_at_the_first_difference(
    one: list[int], other: list[int], length: int
) -> None:
    assert common_prefix(np.array(one), np.array(other)) == length
    assert common_prefix(np.array(other), np.array(one)) == length
