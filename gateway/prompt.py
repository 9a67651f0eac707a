"""From what a caller sent to prompt token ids and the length of their protected head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from gateway.chat_template import ChatTemplate
from gateway.control_tokens import ControlTokens
from gateway.protected_head import probe_conversations, protected_head_tokens
from gateway.tokenizer import PromptTokenizer
from serving.errors import ContextLengthExceeded, InvalidRequest

# What users and tools say is data from outside; the other roles are the operator's and the model's
# own.
OUTSIDE_ROLES = frozenset({"user", "tool"})
FREE_TEXT_FIELDS = ("content", "name", "tool_call_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages as chat templates want them (role, content, ...), and tool definitions."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class TextInput:
    """Text to continue, without a chat template."""

    text: str


@dataclass(frozen=True, slots=True)
class IdsInput:
    """Token ids, uint32 [tokens], checked against the vocabulary."""

    token_ids: np.ndarray


PromptInput = Conversation | TextInput | IdsInput


@dataclass(frozen=True, slots=True)
class Prompt:
    """token_ids: uint32 [tokens], at least one. The head is shorter than the prompt."""

    token_ids: np.ndarray
    protected_head_tokens: int

    @property
    def tokens(self) -> int:
        return int(self.token_ids.size)


class PromptEncoder:
    """Renders and tokenises. Blocking: meant for a worker thread; keeps nothing between calls."""

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        template: ChatTemplate | None,
        *,
        bytes_max: int,
        now: Callable[[], datetime],
    ) -> None:
        """template: None where the model has none. bytes_max: of the texts of one prompt."""
        self._tokenizer = tokenizer
        self._template = template
        self._bytes_max = bytes_max
        self._now = now

    def encode(self, source: PromptInput, *, tokens_max: int) -> Prompt:
        """The prompt of a request. tokens_max: positions of the model.

        Raises InvalidRequest (empty, too large, refused by the template) or ContextLengthExceeded.
        """
        if isinstance(source, IdsInput):
            prompt = Prompt(source.token_ids, 0)
        elif isinstance(source, TextInput):
            self._check_bytes(len(source.text.encode()), field="prompt.text")
            # Nothing in plain text is known to be protected.
            prompt = Prompt(self._tokenizer.encode(source.text, add_special_tokens=True), 0)
        else:
            prompt = self._encode_conversation(source)
        if prompt.tokens == 0:
            raise InvalidRequest("the prompt is empty", field="prompt")
        if prompt.tokens > tokens_max:
            raise ContextLengthExceeded(
                f"the prompt has {prompt.tokens} tokens, the model has {tokens_max} positions",
                field="prompt",
                metadata={"limit": str(tokens_max), "got": str(prompt.tokens)},
            )
        return prompt

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of prompt tokens, special tokens included."""
        return self._tokenizer.decode(token_ids)

    def _encode_conversation(self, conversation: Conversation) -> Prompt:
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template: send text or token ids",
                field="prompt.conversation",
            )
        self._check_bytes(_text_bytes(conversation), field="prompt.conversation")
        # One moment for all renders: a template that shows the time must show the same one.
        render = _Renderer(self._template, self._tokenizer, self._now())
        text = render.text(conversation.messages, conversation.tools)
        if conversation.tools is not None:
            _check_tools_matter(text, conversation, render)
        prompt_ids = render.ids(text)
        if prompt_ids.size == 0:
            return Prompt(prompt_ids, 0)
        probes = [
            render.ids(render.text(probe, conversation.tools))
            for probe in probe_conversations(conversation.messages)
        ]
        return Prompt(prompt_ids, protected_head_tokens(prompt_ids, probes))

    def _check_bytes(self, size: int, *, field: str) -> None:
        if size > self._bytes_max:
            raise InvalidRequest(
                f"the prompt has {size} bytes of text, the limit is {self._bytes_max}",
                field=field,
                metadata={"limit": str(self._bytes_max), "got": str(size)},
            )


class _Renderer:
    """Renders of one request: callers' control tokens kept apart, one moment in time."""

    def __init__(self, template: ChatTemplate, tokenizer: PromptTokenizer, now: datetime) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._now = now

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        """Sealed text of a conversation."""
        controls = self._tokenizer.controls
        rendered = self._template.render(
            [_marked(message, controls) for message in messages],
            tools=None if tools is None else controls.marked_value(tools),
            now=self._now,
        )
        return controls.sealed(rendered)

    def ids(self, sealed_text: str) -> np.ndarray:
        """Token ids uint32 [tokens]; the template wrote all special tokens itself."""
        return self._tokenizer.encode(sealed_text, add_special_tokens=False)


def _marked(message: Mapping[str, Any], controls: ControlTokens) -> dict[str, Any]:
    marked = dict(message)
    strict = message["role"] in OUTSIDE_ROLES
    for field in FREE_TEXT_FIELDS:
        if field in message:
            marked[field] = controls.marked_text(message[field], strict=strict)
    if "tool_calls" in message:
        marked["tool_calls"] = controls.marked_value(message["tool_calls"])
    return marked


def _check_tools_matter(text: str, conversation: Conversation, render: _Renderer) -> None:
    """Refuse tools that the template would leave out without a word."""
    try:
        without_tools = render.text(conversation.messages, None)
    except InvalidRequest:
        return
    if text == without_tools:
        raise InvalidRequest(
            "the chat template of this model does not render tools",
            field="prompt.conversation.tools_json",
        )


def _text_bytes(conversation: Conversation) -> int:
    """Bytes of all strings in messages and tools."""
    return _bytes_in([list(conversation.messages), list(conversation.tools or ())])


def _bytes_in(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, Mapping):
        return sum(_bytes_in(key) + _bytes_in(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_bytes_in, value))
    return 0
