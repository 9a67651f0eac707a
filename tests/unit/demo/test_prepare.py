"""The prepared default model: its template, its tokenizer, and that it answers."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from demo.prepare import PrepareError, find_source, is_prepared, prepare, prepared_model_dir
from demo.tokenizer_files import TEMPLATE, build_tokenizer, write_tokenizer_files
from engine.gguf_weights import GgufFile
from engine.weights import load_decoder, read_checkpoint
from gateway.chat_template import ChatTemplate
from serving.model_dir import end_token_ids, load_tokenizer
from tests.numerics.gguf_files import write_gguf
from tests.numerics.plain_attend import PlainAttend
from tests.tiny_models import write_tiny_model

# As the model's file carries it.
SHIPPED_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = [{"name": "weather", "parameters": {"city": "string"}}, {"name": "clock"}]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What time is it?"}
ASSISTANT = {"role": "assistant", "content": "Noon."}
TOOL = {"role": "tool", "content": '{"time": "12:00"}'}
TEXTS = [
    "def f(x):\n    return x ** 2  # squares\n\n\tif x >= 10:\r\n        pass\n",
    "In 2024, 1234567 people paid $3.14 (or 2,718.28) at 08:15.",
    "naïve café ÆØÅ 日本語のテスト 한국어 العربية ½ ① 😀👩‍👩‍👧 \u200b",
    "<|im_start|>user\nHi 42<|im_end|>\n<|endoftext|><file_sep>a <repo_name> b",
    "   leading and trailing   ",
    "a\n\n1. one\n        700\n",
    "can't WON'T I'll we've",
]


def render(
    source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> str:
    template = ChatTemplate({"default": source}, special_tokens={}, characters_max=10_000)
    return template.render(messages, tools=tools, now=datetime(2024, 1, 1))


@pytest.mark.parametrize(
    "messages",
    [[USER], [SYSTEM, USER], [SYSTEM], [USER, ASSISTANT, USER], [SYSTEM, USER, TOOL], []],
)
def test_without_tools_the_template_renders_as_the_shipped_one(
    messages: list[dict[str, Any]],
) -> None:
    ours = TEMPLATE.read_text(encoding="utf-8")
    assert render(ours, messages) == render(SHIPPED_TEMPLATE, messages)


@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [SYSTEM, USER, ASSISTANT, USER]])
def test_tools_are_a_json_list_in_the_one_system_message(messages: list[dict[str, Any]]) -> None:
    ours = TEMPLATE.read_text(encoding="utf-8")
    system, _, rest = render(ours, messages, TOOLS).partition("<|im_end|>\n")
    plain_system, _, plain_rest = render(ours, messages).partition("<|im_end|>\n")
    assert system.startswith(plain_system)
    assert json.loads(system.split("Tools:\n")[1]) == TOOLS
    assert rest == plain_rest


def test_calls_and_answers_of_tools_are_rendered() -> None:
    call = {"function": {"name": "clock", "arguments": {"zone": "UTC"}}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    text = render(TEMPLATE.read_text(encoding="utf-8"), [USER, asked, TOOL], TOOLS)
    spoken = json.dumps(call["function"])
    assert f"<|im_start|>assistant\n{spoken}<|im_end|>\n" in text
    assert f"<|im_start|>tool\n{TOOL['content']}<|im_end|>\n<|im_start|>assistant\n" in text


def tiny_vocabulary() -> dict[str, Any]:
    """Metadata of a GGUF whose only merge joins two blanks: 256 bytes, a merge, four specials."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "ĠĠ"]
    tokens += sorted(pre_tokenizers.ByteLevel.alphabet())
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 4] + [1] * (len(tokens) - 4),
        "tokenizer.ggml.merges": ["Ġ Ġ"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "llama.context_length": 64,
    }


def test_blanks_before_a_digit_stay_together_because_digits_are_split_first() -> None:
    tokenizer = build_tokenizer(tiny_vocabulary().__getitem__)
    assert tokenizer.encode("  12").tokens == ["ĠĠ", "1", "2"]
    assert tokenizer.encode("  ab").tokens == ["Ġ", "Ġ", "a", "b"]
    assert tokenizer.encode("<|im_end|><think>").tokens == ["<|im_end|>", "<think>"]
    assert tokenizer.decode([2, 3]) == "<think>", "control tokens are special, others are text"


@pytest.mark.parametrize(
    ("field", "value"),
    [("tokenizer.ggml.pre", "llama-bpe"), ("tokenizer.ggml.model", "llama")],
)
def test_another_kind_of_tokenizer_is_refused(field: str, value: str) -> None:
    fields = tiny_vocabulary() | {field: value}
    with pytest.raises(ValueError, match=value):
        build_tokenizer(fields.__getitem__)


def test_the_written_files_say_what_services_ask(tmp_path: Path) -> None:
    write_tokenizer_files(tiny_vocabulary().__getitem__, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert end_token_ids(tmp_path) == {0, 2}
    assert load_tokenizer(tmp_path).encode("ab").tokens == ["a", "b"]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["eos_token"] == "<|im_end|>"
    assert config["chat_template"] == (tmp_path / "chat_template.jinja").read_text("utf-8")


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(PrepareError, match="was not made by this command"):
        prepare(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    fields = {k: v for k, v in tiny_vocabulary().items() if k.startswith("tokenizer.")}
    vocab = len(fields["tokenizer.ggml.tokens"])
    write_tiny_model(folder / "checkpoint", fields={"vocab_size": vocab})
    write_gguf(folder / "checkpoint", folder / "tiny.gguf", metadata=fields)
    return folder / "tiny.gguf"


def test_a_prepared_directory_holds_the_model_of_the_file(tmp_path: Path, tiny_gguf: Path) -> None:
    steps: list[tuple[int, int]] = []
    out = prepare(
        tmp_path / "new" / "model", source=tiny_gguf, progress=lambda *step: steps.append(step)
    )
    config, tensors = read_checkpoint(out)
    expected_config, expected = read_checkpoint(tiny_gguf.parent)
    assert config == expected_config
    assert tensors.shapes() == expected.shapes()
    assert all(torch.equal(tensors.read(n), expected.read(n)) for n in expected.shapes())
    assert is_prepared(out)
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1]
    assert [entry.name for entry in out.parent.iterdir()] == ["model"], "something was left beside"


def test_an_outdated_directory_is_replaced_whole(tmp_path: Path, tiny_gguf: Path) -> None:
    out = prepare(tmp_path / "model", source=tiny_gguf)
    (out / "prepared.json").write_text('{"format": 0}')
    (out / "stale.txt").write_text("from an older format")
    prepare(out, source=tiny_gguf)
    assert is_prepared(out)
    assert not (out / "stale.txt").exists()


def test_a_preparation_that_fails_leaves_nothing_behind(tmp_path: Path, tiny_gguf: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "model", source=tiny_gguf, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_of_two_preparations_at_once_the_second_to_finish_keeps_the_first(
    tmp_path: Path, tiny_gguf: Path
) -> None:
    out = tmp_path / "model"

    def meanwhile(done: int, total: int) -> None:
        if done == total:
            prepare(out, source=tiny_gguf)
            (out / "first.txt").touch()

    prepare(out, source=tiny_gguf, progress=meanwhile)
    assert (out / "first.txt").exists()
    assert is_prepared(out)


def test_a_prepared_directory_is_not_prepared_again(tmp_path: Path) -> None:
    (tmp_path / "prepared.json").write_text('{"format": 1}')

    def never(done: int, total: int) -> None:
        raise AssertionError("it was")

    assert prepare(tmp_path, progress=never) == tmp_path
    (tmp_path / "prepared.json").write_text('{"format": 0}')
    assert not is_prepared(tmp_path)


@pytest.mark.model
@pytest.mark.timeout(180)
def test_the_tokenizer_equals_transformers_conversion_with_digits_split() -> None:
    """transformers' conversion knows no "smollm" and leaves out that digits are split first."""
    source = find_source()
    theirs = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), theirs.backend_tokenizer.pre_tokenizer]
    )
    ours = build_tokenizer(GgufFile(source).field)
    assert ours.get_vocab() == theirs.get_vocab()
    for text in [*TEXTS, Path(__file__).read_text(encoding="utf-8")]:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.model
@pytest.mark.timeout(180)
def test_the_prepared_model_answers_a_short_question() -> None:
    directory = prepare()
    assert directory == prepared_model_dir()
    tokenizer = load_tokenizer(directory)
    decoder = load_decoder(directory, dtype=torch.float32, device="cpu")
    question = {"role": "user", "content": "What is the capital of France?"}
    text = render((directory / "chat_template.jinja").read_text("utf-8"), [question])
    ids, attend, reply = tokenizer.encode(text, add_special_tokens=False).ids, PlainAttend(), []
    position = 0
    while not (reply and reply[-1] in end_token_ids(directory)) and len(reply) < 16:
        hidden = decoder(torch.tensor(ids), torch.arange(position, position + len(ids)), attend)
        position += len(ids)
        ids = [int(decoder.logits(hidden[-1:]).argmax())]
        reply += ids
    assert "Paris" in tokenizer.decode(reply)
    assert reply[-1] == tokenizer.token_to_id("<|im_end|>")
