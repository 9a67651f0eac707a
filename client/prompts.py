"""Turns a call's arguments into a request message. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from client.results import ids_to
from specprefill.v1 import gateway_pb2, types_pb2

# A list of messages goes through the model's chat template. A string is tokenised as it is, and
# token ids are taken as they are.
PromptInput = str | Sequence[Mapping[str, Any]] | Sequence[int]
AnyRequest = gateway_pb2.GenerateRequest | gateway_pb2.CompleteRequest | gateway_pb2.ExplainRequest


class PrefillOptions(TypedDict, total=False):
    """How the prompt is prefilled. What is left out is the gateway's default."""

    mode: str  # "auto", "dense" or "sparse"
    keep_basis_points: int  # 2000 = 20 %
    chunk_tokens: int
    tail_tokens: int
    query_mode: str  # "lookahead" or "tail_window"
    lookahead_tokens: int
    window_tokens: int
    lookahead_temperature: float
    lookahead_seed: int
    protected_spans: Sequence[tuple[int, int]]  # [start, end) positions of the rendered prompt
    tools: Sequence[Mapping[str, Any]]
    request_id: str
    timeout_s: float


class GenerateOptions(PrefillOptions, total=False):
    """And how the reply is sampled and ended."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_end_tokens: bool


_SAMPLING = ("temperature", "top_k", "top_p", "seed")
_PREFILL = (
    "keep_basis_points",
    "chunk_tokens",
    "tail_tokens",
    "lookahead_tokens",
    "window_tokens",
    "lookahead_temperature",
    "lookahead_seed",
)
_MESSAGE = ("name", "tool_call_id")


def generate_request(prompt: PromptInput, options: GenerateOptions) -> gateway_pb2.GenerateRequest:
    request = gateway_pb2.GenerateRequest()
    _fill(request, prompt, options)
    _fill_reply(request, options)
    return request


def complete_request(prompt: PromptInput, options: GenerateOptions) -> gateway_pb2.CompleteRequest:
    request = gateway_pb2.CompleteRequest()
    _fill(request, prompt, options)
    _fill_reply(request, options)
    return request


def explain_request(
    prompt: PromptInput, options: PrefillOptions, *, include_text: bool
) -> gateway_pb2.ExplainRequest:
    request = gateway_pb2.ExplainRequest(include_text=include_text)
    _fill(request, prompt, options)
    return request


def _fill(request: AnyRequest, prompt: PromptInput, options: PrefillOptions) -> None:
    request.request_id = options.get("request_id", "")
    _fill_prompt(request.prompt, prompt, options.get("tools"))
    prefill = request.prefill
    if "mode" in options:
        name = f"PREFILL_MODE_{options['mode'].upper()}"
        prefill.mode = _enum(gateway_pb2.PrefillMode, name, "mode")
    if "query_mode" in options:
        name = f"QUERY_MODE_{options['query_mode'].upper()}"
        prefill.query_mode = _enum(types_pb2.QueryMode, name, "query_mode")
    for start, end in options.get("protected_spans", ()):
        prefill.protected_spans.add(start=start, end=end)
    _set(prefill, options, _PREFILL)


def _fill_reply(
    request: gateway_pb2.GenerateRequest | gateway_pb2.CompleteRequest, options: GenerateOptions
) -> None:
    _set(request.sampling, options, _SAMPLING)
    _set(request.stop, options, ("max_tokens", "ignore_end_tokens"))
    request.stop.stop_strings.extend(options.get("stop", ()))
    request.stop.stop_token_ids = ids_to(list(options.get("stop_token_ids", ())))


def _fill_prompt(
    message: gateway_pb2.Prompt,
    prompt: PromptInput,
    tools: Sequence[Mapping[str, Any]] | None,
) -> None:
    if isinstance(prompt, str):
        message.text = prompt
    elif all(isinstance(part, int) for part in prompt) and prompt:
        message.token_ids = ids_to([part for part in prompt if isinstance(part, int)])
    else:
        message.conversation.SetInParent()
        for part in prompt:
            if not isinstance(part, Mapping):
                raise TypeError("a prompt is a string, a list of messages or a list of token ids")
            _add_message(message.conversation, part)
        if tools is not None:
            message.conversation.tools_json = json.dumps(list(tools))
        return
    if tools is not None:
        raise TypeError("tools need a prompt of messages")


def _add_message(conversation: gateway_pb2.Conversation, part: Mapping[str, Any]) -> None:
    unknown = set(part) - {"role", "content", "tool_calls", *_MESSAGE}
    if unknown:
        raise TypeError(f"a message has no field {sorted(unknown)}")
    message = conversation.messages.add(role=part["role"], content=part.get("content") or "")
    _set(message, part, _MESSAGE)
    if "tool_calls" in part:
        message.tool_calls_json = json.dumps(part["tool_calls"])


def _set(message: Any, options: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if name in options:
            setattr(message, name, options[name])


def _enum(enum: Any, name: str, argument: str) -> Any:
    names: list[str] = enum.keys()
    if name not in names:
        allowed = sorted(key.split("_MODE_")[1].lower() for key in names)
        allowed.remove("unspecified")
        raise ValueError(f"{argument} is one of {', '.join(allowed)}")
    return enum.Value(name)
