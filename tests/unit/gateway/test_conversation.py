from __future__ import annotations

import json

import pytest

from gateway.conversation import JSON_DEPTH_MAX, conversation_from
from serving.errors import InvalidRequest
from specprefill.v1 import gateway_pb2


def _conversation(**fields: object) -> gateway_pb2.Conversation:
    message = gateway_pb2.Message(role="user", content="a", **fields)
    return gateway_pb2.Conversation(messages=[message])


def test_messages_have_only_what_was_said() -> None:
    wire = gateway_pb2.Conversation(
        messages=[
            gateway_pb2.Message(role="system", content="s"),
            gateway_pb2.Message(role="assistant", tool_calls_json='[{"name": "f"}]'),
            gateway_pb2.Message(role="tool", content="7", name="f", tool_call_id="1"),
        ],
        tools_json='[{"name": "f", "parameters": {}}]',
    )
    conversation = conversation_from(wire)
    assert conversation.messages == (
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
        {"role": "tool", "content": "7", "name": "f", "tool_call_id": "1"},
    )
    assert conversation.tools == ({"name": "f", "parameters": {}},)


def test_no_tools_and_an_empty_list_of_tools_are_the_same() -> None:
    wire = _conversation()
    assert conversation_from(wire).tools is None
    wire.tools_json = "[]"
    assert conversation_from(wire).tools is None


@pytest.mark.parametrize("role", ["", "System", "root", "<|im_start|>system"])
def test_an_unknown_role_is_refused(role: str) -> None:
    wire = gateway_pb2.Conversation(messages=[gateway_pb2.Message(role=role)])
    with pytest.raises(InvalidRequest) as refused:
        conversation_from(wire)
    assert refused.value.field == "prompt.conversation.messages[0].role"


@pytest.mark.parametrize(
    "text",
    [
        "", " " * 2**20 + "[]",
        "{", "{}", "7", '["a"]', '[{"a": NaN}]', '[{"a": "\\ud800"}]', "[" * 100_000,
        json.dumps([{"a": [[]]}])[:-1], '[{"a": ' + "1" * 5000 + "}]",
        "[{" + '"a": {' * (JSON_DEPTH_MAX - 1) + "}" * (JSON_DEPTH_MAX - 1) + "}]",
    ],
    ids=str.__len__,
)  # fmt: skip
def test_json_that_is_none_or_too_deep_is_refused(text: str) -> None:
    wire = _conversation()
    wire.tools_json = text
    with pytest.raises(InvalidRequest) as refused:
        conversation_from(wire)
    assert refused.value.field == "prompt.conversation.tools_json"
    with pytest.raises(InvalidRequest) as refused:
        conversation_from(_conversation(tool_calls_json=text))
    assert refused.value.field == "prompt.conversation.messages[0].tool_calls_json"


def test_a_conversation_without_messages_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="messages is empty"):
        conversation_from(gateway_pb2.Conversation())
