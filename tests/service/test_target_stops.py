"""Why replies of the target end, and what of the last token is streamed."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from serving.detokenizer import Detokenizer
from serving.model_dir import load_tokenizer
from serving.wire import ids_to_bytes
from specprefill.v1 import types_pb2
from tests.service.target_rig import RunningTarget, prompt, request_for, running_target
from tests.tiny_models import write_tiny_model

POSITIONS_MAX = 64
PROMPT_TOKENS = 20
ALL = {"max_tokens": 30}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    return write_tiny_model(directory, positions_max=POSITIONS_MAX)


@pytest.fixture
async def target(model_dir: Path) -> AsyncIterator[RunningTarget]:
    async with running_target(model_dir) as target:
        yield target


async def full_reply(target: RunningTarget, seed: int = 0) -> list[int]:
    """What the model says when nothing stops it."""
    return (await target.generate(request_for(prompt(PROMPT_TOKENS, seed), stop=ALL))).tokens


async def test_max_tokens_end_a_reply(target: RunningTarget) -> None:
    full = await full_reply(target)
    reply = await target.generate(request_for(prompt(PROMPT_TOKENS), stop={"max_tokens": 4}))
    assert reply.tokens == full[:4]
    assert reply.finished.finish_reason == types_pb2.FINISH_REASON_MAX_TOKENS
    assert reply.finished.positions == PROMPT_TOKENS + 3
    assert not reply.finished.HasField("matched_stop_token_id")
    assert not reply.finished.HasField("matched_stop_string")


async def test_one_token_is_a_reply(target: RunningTarget) -> None:
    reply = await target.generate(request_for(prompt(PROMPT_TOKENS), stop={"max_tokens": 1}))
    assert len(reply.tokens) == 1
    assert reply.finished.positions == PROMPT_TOKENS
    # Its kick-off was the only forward after the fill.
    assert target.decoder.forwards == 3 + 1


async def test_a_stop_token_ends_a_reply_and_is_no_part_of_it(target: RunningTarget) -> None:
    full = await full_reply(target)
    # One that the model did not say before.
    index = next(i for i, token in enumerate(full) if i >= 2 and token not in full[:i])
    stop = {**ALL, "stop_token_ids": ids_to_bytes([full[index]])}
    reply = await target.generate(request_for(prompt(PROMPT_TOKENS), stop=stop))
    assert reply.tokens == full[:index]
    assert reply.finished.finish_reason == types_pb2.FINISH_REASON_STOP_TOKEN
    assert reply.finished.matched_stop_token_id == full[index]
    # It was sampled, so it counts; it was not run, so it has no position.
    assert reply.finished.counts.completion_tokens == index + 1
    assert reply.finished.positions == PROMPT_TOKENS + index


async def test_a_first_token_that_ends_the_reply_still_has_its_timings(
    target: RunningTarget,
) -> None:
    full = await full_reply(target)
    stop = {**ALL, "stop_token_ids": ids_to_bytes([full[0]])}
    reply = await target.generate(request_for(prompt(PROMPT_TOKENS), stop=stop))
    assert reply.tokens == []
    assert reply.finished.finish_reason == types_pb2.FINISH_REASON_STOP_TOKEN
    assert reply.finished.timings.first_token_s > 0


async def test_the_models_end_token_ends_a_reply_unless_it_is_ignored(
    target: RunningTarget, model_dir: Path, tmp_path: Path
) -> None:
    full = await full_reply(target)
    index = next(i for i, token in enumerate(full) if i >= 2 and token not in full[:i])
    directory = shutil.copytree(model_dir, tmp_path / "model")
    config = {"eos_token_id": [full[index], 1]}
    (directory / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    async with running_target(directory) as ending:
        stop = {**ALL, "ignore_end_tokens": False}
        reply = await ending.generate(request_for(prompt(PROMPT_TOKENS), stop=stop))
        assert reply.tokens == full[:index]
        assert reply.finished.finish_reason == types_pb2.FINISH_REASON_END_TOKEN
        assert reply.finished.matched_stop_token_id == full[index]
        assert await full_reply(ending) == full


async def test_a_stop_string_ends_a_reply_even_across_tokens(
    target: RunningTarget, model_dir: Path
) -> None:
    tokenizer = load_tokenizer(model_dir)
    for seed in range(40):
        full = await full_reply(target, seed)
        found = readable_pair(tokenizer, full)
        if found is not None:
            break
    assert found is not None, "no reply of this model has two readable tokens in a row"
    index, text = found
    stop = {**ALL, "stop_strings": [text, "not in the reply"]}
    reply = await target.generate(request_for(prompt(PROMPT_TOKENS, seed), stop=stop))
    assert reply.tokens == full[: index + 2]
    assert reply.finished.finish_reason == types_pb2.FINISH_REASON_STOP_STRING
    assert reply.finished.matched_stop_string == text


def readable_pair(tokenizer: Tokenizer, tokens: list[int]) -> tuple[int, str] | None:
    """Index and text of two adjacent tokens whose text first comes there."""
    for index in range(1, len(tokens) - 2):
        text = tokenizer.decode(tokens[index : index + 2])
        before = Detokenizer(tokenizer, stop_strings=[text])
        before.push(tokens[: index + 1])
        if text.isascii() and text.isprintable() and len(text) > 1 and not before.matched_stop:
            exact = Detokenizer(tokenizer, stop_strings=[text])
            exact.push(tokens[: index + 2])
            if exact.matched_stop:
                return index, text
    return None


@pytest.mark.parametrize("spare", [0, 1, 5])
async def test_a_reply_ends_with_the_models_last_position(
    target: RunningTarget, spare: int
) -> None:
    tokens = POSITIONS_MAX - spare
    reply = await target.generate(request_for(prompt(tokens), stop=ALL))
    # The token after the last position can be sampled, but not run.
    assert len(reply.tokens) == spare + 1
    assert reply.finished.finish_reason == types_pb2.FINISH_REASON_CONTEXT_END
    assert reply.finished.positions == POSITIONS_MAX
    await target.settles_at(pages=0, handles=0)


async def test_replies_are_counted_by_their_end(target: RunningTarget) -> None:
    await target.generate(request_for(prompt(PROMPT_TOKENS), stop={"max_tokens": 4}))
    await target.generate(request_for(prompt(POSITIONS_MAX), stop=ALL))
    for reason in ("max_tokens", "context_end"):
        assert target.sample("target_replies_total", finish_reason=reason) == 1
    assert target.sample("target_replies_total", finish_reason="stop_string") == 0
    assert target.sample("target_tokens_total", kind="generated") == 4 + 1
    executed = target.sample("target_tokens_total", kind="dense_executed")
    assert executed == PROMPT_TOKENS + POSITIONS_MAX
    assert target.sample("target_requests_total", outcome="finished") == 2
