"""A conversation out of its message: roles, texts and the JSON in it, checked."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from gateway.prompt import Conversation
from serving.errors import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGES_MAX = 16_384
# Parsed in the event loop, so it has to be quick.
JSON_BYTES_MAX = 2**20
JSON_DEPTH_MAX = 64
FIELD = "prompt.conversation"


def conversation_from(message: Any) -> Conversation:
    """Conversation of a wire message. Raises InvalidRequest and names the field."""
    if not message.messages:
        raise InvalidRequest(f"{FIELD}.messages is empty", field=f"{FIELD}.messages")
    if len(message.messages) > MESSAGES_MAX:
        raise InvalidRequest(
            f"{FIELD}.messages has {len(message.messages)} messages, the limit is {MESSAGES_MAX}",
            field=f"{FIELD}.messages",
            metadata={"limit": str(MESSAGES_MAX), "got": str(len(message.messages))},
        )
    tools = None
    if message.HasField("tools_json"):
        tools = tuple(_objects(message.tools_json, field=f"{FIELD}.tools_json")) or None
    return Conversation(
        messages=tuple(
            _message_from(one, field=f"{FIELD}.messages[{index}]")
            for index, one in enumerate(message.messages)
        ),
        tools=tools,
    )


def _message_from(message: Any, *, field: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise InvalidRequest(
            f"{field}.role must be one of {', '.join(ROLES)}", field=f"{field}.role"
        )
    values: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("name", "tool_call_id"):
        if message.HasField(name):
            values[name] = getattr(message, name)
    if message.HasField("tool_calls_json"):
        calls = _objects(message.tool_calls_json, field=f"{field}.tool_calls_json")
        if calls:
            values["tool_calls"] = calls
    return values


def _objects(text: str, *, field: str) -> list[dict[str, Any]]:
    """A JSON array of objects, without what JSON cannot say (NaN) and UTF-8 cannot write."""
    if len(text.encode()) > JSON_BYTES_MAX:
        raise InvalidRequest(
            f"{field} is larger than {JSON_BYTES_MAX} bytes",
            field=field,
            metadata={"limit": str(JSON_BYTES_MAX)},
        )
    try:
        value = json.loads(text, parse_constant=_no_constant)
        # A lone surrogate passes as an escape, and no tokenizer takes it.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{field} is not valid JSON", field=field) from None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InvalidRequest(f"{field} must be a JSON array of objects", field=field)
    if _depth(value) > JSON_DEPTH_MAX:
        raise InvalidRequest(
            f"{field} is nested deeper than {JSON_DEPTH_MAX} levels",
            field=field,
            metadata={"limit": str(JSON_DEPTH_MAX)},
        )
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _depth(value: Any) -> int:
    """Levels of nesting; counts level by level, so that depth costs no stack."""
    levels = 0
    level = [value]
    while level:
        levels += 1
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    return levels
