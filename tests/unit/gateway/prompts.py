"""A prompt encoder over a tiny tokenizer directory, and conversations for it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from gateway.chat_template import load_chat_template
from gateway.prompt import Conversation, PromptEncoder
from gateway.tokenizer import PromptTokenizer

NOON = datetime(2031, 5, 17, 12, 0)


def open_tokenizer(directory: Path) -> PromptTokenizer:
    template = load_chat_template(directory, characters_max=100_000)
    return PromptTokenizer(directory, template_literals=template.literals if template else ())


def open_encoder(directory: Path, *, bytes_max: int = 100_000) -> PromptEncoder:
    template = load_chat_template(directory, characters_max=100_000)
    tokenizer = open_tokenizer(directory)
    return PromptEncoder(tokenizer, template, bytes_max=bytes_max, now=lambda: NOON)


def talk(*turns: tuple[str, str], tools: list[dict[str, Any]] | None = None) -> Conversation:
    return Conversation(
        messages=tuple({"role": role, "content": content} for role, content in turns),
        tools=None if tools is None else tuple(tools),
    )
