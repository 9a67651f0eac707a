from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.chat_template import ChatTemplate, load_chat_template
from serving.errors import InvalidRequest
from serving.model_dir import ModelDirError
from tests.unit.gateway.prompts import NOON, open_encoder, talk
from tests.unit.gateway.tokenizer_dirs import CHATML, write_byte_level

MESSAGES = [{"role": "user", "content": "hello"}]


def _template(source: str, **sources: str) -> ChatTemplate:
    return ChatTemplate(
        {"default": source, **sources}, special_tokens={"bos_token": "<s>"}, characters_max=1000
    )


def _render(source: str, tools: list[dict[str, Any]] | None = None) -> str:
    return _template(source).render(MESSAGES, tools=tools, now=NOON)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'] }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__self__.__class__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ dict.__subclasses__() }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{% set _ = messages.append(1) %}",
        "{% set _ = messages[0].update(role='system') %}",
        "{% include 'tokenizer_config.json' %}",
        "{% for i in range(999999999) %}{% endfor %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    assert _rendered_or_refused(source) in ("", "the chat template cannot render this conversation")
    assert MESSAGES == [{"role": "user", "content": "hello"}]


def _rendered_or_refused(source: str) -> str:
    """The sandbox refuses, or gives an undefined value, which prints as nothing."""
    try:
        return _render(source)
    except InvalidRequest as refused:
        return refused.message


@pytest.mark.parametrize(
    "source",
    ["{% set n = namespace(__class__=1) %}", "{% set n = namespace() %}{% set n._x = 1 %}"],
)
def test_a_namespace_takes_no_inner_names(source: str) -> None:
    with pytest.raises(InvalidRequest):
        _render(source)


def test_template_code_in_a_message_is_only_text(tmp_path: Path) -> None:
    content = "{{ ''.__class__ }}{% raw %}{# no #}"
    write_byte_level(tmp_path, CHATML)
    encoder = open_encoder(tmp_path)
    prompt = encoder.encode(talk(("user", content)), tokens_max=1000)
    assert content in encoder.decode(prompt.token_ids.tolist())


def test_a_template_that_refuses_says_why_and_nothing_more() -> None:
    with pytest.raises(InvalidRequest, match="refuses the conversation: roles must alternate"):
        _render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    ["{{ 1 / 0 }}", "{{ messages[7].content }}", "{{ messages | nosuch }}", "{{ 'a' + 1 }}",
     "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"],
)  # fmt: skip
def test_an_error_in_a_template_shows_no_stack(source: str) -> None:
    try:
        template = _template(source)
    except ModelDirError:
        return
    with pytest.raises(InvalidRequest) as refused:
        template.render(MESSAGES, tools=None, now=NOON)
    assert refused.value.message == "the chat template cannot render this conversation"
    assert refused.value.field == "prompt.conversation"


def test_a_render_that_grows_too_long_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="longer than 1000 characters"):
        _render("{% for i in range(90000) %}{{ 'abcdefgh' }}{% endfor %}")


def test_json_is_plain_and_not_escaped_for_html() -> None:
    tools = [{"name": "é<b>", "args": {"b": 1, "a": [True, None]}}]
    assert _render("{{ tools | tojson }}", tools) == json.dumps(tools, ensure_ascii=False)
    indented = _render("{{ tools | tojson(indent=2, sort_keys=true) }}", tools)
    assert indented == json.dumps(tools, ensure_ascii=False, indent=2, sort_keys=True)


def test_templates_have_what_the_hub_gives_them() -> None:
    assert _render("{{ strftime_now('%d %b %Y') }}") == "17 May 2031"
    assert _render("{{ bos_token }}") == "<s>"
    assert _render("{% generation %}a{% endgeneration %}b") == "ab"
    assert (
        _render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "1"
    )
    assert (
        _render("{% set n = namespace(x=1) %}{% set n.x = 2 %}{{ n.x }}{{ dict(a=3).a }}") == "23"
    )
    assert (
        _render("{%- if tools is none %}none{% endif %}{{ add_generation_prompt }}") == "noneTrue"
    )


def test_renders_equal_those_of_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m['content'] | trim }}]\n"
        "  {% endif %}\n{% endfor %}\n{{ tools | tojson }}"
    )
    tools = [{"name": "a", "description": "<b> & 'c'"}]
    theirs, _ = render_jinja_template([MESSAGES], tools=tools, chat_template=source)
    assert _render(source, tools) == theirs[0]


def test_tools_take_the_template_that_is_named_for_them() -> None:
    template = _template("plain", tool_use="with tools")
    assert template.render(MESSAGES, tools=None, now=NOON) == "plain"
    assert template.render(MESSAGES, tools=[{"name": "a"}], now=NOON) == "with tools"


def test_tools_that_the_template_leaves_out_are_refused(tmp_path: Path) -> None:
    encoder = open_encoder(write_byte_level(tmp_path, CHATML))
    with pytest.raises(InvalidRequest, match="does not render tools") as refused:
        encoder.encode(talk(("user", "a"), tools=[{"name": "count"}]), tokens_max=999)
    assert refused.value.field == "prompt.conversation.tools_json"


def test_a_template_file_goes_before_the_config(tmp_path: Path) -> None:
    write_byte_level(tmp_path, "from config")
    (tmp_path / "chat_template.jinja").write_text("from file", encoding="utf-8")
    template = load_chat_template(tmp_path, characters_max=1000)
    assert template is not None
    assert template.render(MESSAGES, tools=None, now=NOON) == "from file"


def test_special_tokens_may_stand_as_objects(tmp_path: Path) -> None:
    config = {"chat_template": "{{ bos_token }}{{ eos_token }}",
              "bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    template = load_chat_template(tmp_path, characters_max=1000)
    assert template is not None
    assert template.render(MESSAGES, tools=None, now=NOON) == "<s></s>"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ('{"chat_template": "{% if %}"}', "does not compile"),
        ('{"chat_template": [{"name": "rag", "template": "a"}]}', "no default"),
        ('{"chat_template": 7}', "no default"),
        ('{"chat_template": "' + "a" * 1_100_000 + '"}', "larger than"),
        ("[]", "no JSON object"),
        ("{", "no JSON"),
    ],
)
def test_a_template_that_cannot_be_used_stops_the_start(
    tmp_path: Path, config: str, problem: str
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config, encoding="utf-8")
    with pytest.raises(ModelDirError, match=problem):
        load_chat_template(tmp_path, characters_max=1000)


def test_a_directory_without_a_template_has_none(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, characters_max=1000) is None
