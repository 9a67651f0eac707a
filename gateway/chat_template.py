"""The model's chat template: messages and tools to prompt text, in a sandbox.

The template comes from the model directory only. What callers send is data to it, never code. The
environment offers what templates on the model hub expect: loop controls, `raise_exception`,
`tojson`, `strftime_now`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeGuard

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from serving.errors import InvalidRequest
from serving.model_dir import ModelDirError

TEMPLATE_BYTES_MAX = 1 << 20
REFUSAL_CHARACTERS_MAX = 200
SPECIAL_TOKEN_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
# What a template may stumble over in a conversation that it does not expect.
RENDER_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class ChatTemplate:
    """Renders conversations. `sources` maps names to templates: "default", and maybe "tool_use"."""

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        special_tokens: Mapping[str, str],
        characters_max: int,
    ) -> None:
        """special_tokens: bos_token and so on, as templates name them. characters_max: of a render.

        Raises ModelDirError for a template that does not compile.
        """
        self._special_tokens = dict(special_tokens)
        self._characters_max = characters_max
        environment = _environment()
        self._templates: dict[str, Template] = {}
        self.literals: frozenset[str] = frozenset()
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
                self.literals |= _literals(environment, source)
            except TemplateSyntaxError as error:
                raise ModelDirError(f"the chat template does not compile: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        now: datetime,
    ) -> str:
        """Prompt text up to and including the generation prompt.

        now: what `strftime_now` shows; one value for all renders of a request.
        Raises InvalidRequest where the template refuses the conversation or the text gets too long.
        """
        template = self._template(tools)
        pieces: list[str] = []
        characters = 0
        try:
            for piece in template.generate(
                **self._special_tokens,
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=True,
                strftime_now=now.strftime,
            ):
                characters += len(piece)
                if characters > self._characters_max:
                    raise InvalidRequest(
                        f"the rendered prompt is longer than {self._characters_max} characters",
                        field="prompt.conversation",
                        metadata={"limit": str(self._characters_max)},
                    )
                pieces.append(piece)
        except _RefusedByTemplate as error:
            raise InvalidRequest(
                f"the chat template refuses the conversation: {error.text}",
                field="prompt.conversation",
            ) from None
        except RENDER_ERRORS:
            raise InvalidRequest(
                "the chat template cannot render this conversation", field="prompt.conversation"
            ) from None
        return "".join(pieces)

    def _template(self, tools: Sequence[Mapping[str, Any]] | None) -> Template:
        if tools is not None and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates["default"]


def load_chat_template(model_dir: Path, *, characters_max: int) -> ChatTemplate | None:
    """The template of chat_template.jinja, or else of tokenizer_config.json; None if there is none.

    Raises ModelDirError for one that is too large, unreadable, or does not compile.
    """
    config = _tokenizer_config(model_dir)
    file = model_dir / "chat_template.jinja"
    if file.is_file():
        sources = {"default": file.read_text(encoding="utf-8")}
    else:
        sources = _configured_templates(config.get("chat_template"))
    if not sources:
        return None
    if sum(len(source.encode()) for source in sources.values()) > TEMPLATE_BYTES_MAX:
        raise ModelDirError(f"the chat template is larger than {TEMPLATE_BYTES_MAX} bytes")
    tokens = {name: _token_text(config.get(name)) for name in SPECIAL_TOKEN_NAMES}
    return ChatTemplate(
        sources,
        special_tokens={name: text for name, text in tokens.items() if text is not None},
        characters_max=characters_max,
    )


def _configured_templates(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    named = {entry["name"]: entry["template"] for entry in value} if _is_named(value) else {}
    if "default" not in named:
        raise ModelDirError("chat_template in tokenizer_config.json has no default template")
    return named


def _is_named(value: object) -> TypeGuard[list[dict[str, str]]]:
    return isinstance(value, list) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
        for entry in value
    )


def _tokenizer_config(model_dir: Path) -> dict[str, Any]:
    file = model_dir / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelDirError(f"tokenizer_config.json is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelDirError("tokenizer_config.json is no JSON object")
    return config


def _token_text(value: object) -> str | None:
    """A special token stands there as its text, or as an object with its text in `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


class _RefusedByTemplate(TemplateError):
    """`raise_exception` in the template, whose author wrote the text for callers."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text[:REFUSAL_CHARACTERS_MAX]


class _GenerationBlock(Extension):
    """{% generation %} marks assistant text for training; for a prompt it is its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it as it is.

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeNamespace(Namespace):
    """Refuses names with a leading underscore, which would reach Python's internals."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name in dict(*args, **kwargs):
            _check_attribute(name)
        super().__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a namespace has no names with a leading underscore")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["dict"] = _new_dict
    environment.globals["namespace"] = _SafeNamespace
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter would escape for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise _RefusedByTemplate(str(message))


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict` as a function: the class itself would hand out its attributes."""
    return dict(*args, **kwargs)


def _literals(environment: ImmutableSandboxedEnvironment, source: str) -> frozenset[str]:
    """Text that the template itself can write: its raw text and its string constants."""
    tree = environment.parse(source)
    raw = {node.data for node in tree.find_all(nodes.TemplateData)}
    constants = {n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str)}
    return frozenset(raw | constants)
