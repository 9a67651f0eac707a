"""The `specprefill` command line. Text and --json go to stdout, tables and progress to stderr.

Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 the service cannot be reached, 130 Ctrl-C.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from client import render
from client.client import DEFAULT_ADDRESS, GATEWAY_SERVICE, TURN_S_MAX, Client
from client.prompts import GenerateOptions, PrefillOptions
from client.results import Delta, Finished, ModelInfo, Progress, ServerInfo
from serving.errors import InvalidRequest, ServiceError, Unavailable

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130
FILE_BYTES_MAX = 8 * 2**20
CHUNKS_SHOWN = 5

app = typer.Typer(
    help="Ask a SpecPrefill gateway: long prompts, sparse prefill, and what it cost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Address = Annotated[
    str, typer.Option(envvar="SPECPREFILL_ADDRESS", help="Host and port of the gateway.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs, nothing else.")]
FileOption = Annotated[
    Path | None, typer.Option("--file", "-f", help="A text to ask about; - reads stdin.")
]
Ask = Annotated[str, typer.Option("--ask", "-a", help="The question, placed after the text.")]
System = Annotated[str | None, typer.Option(help="System message.")]
Mode = Annotated[str | None, typer.Option(help="auto, dense or sparse.")]
Keep = Annotated[str | None, typer.Option(help="Keep rate: 20%, 0.2 or 2000 (basis points).")]
QueryMode = Annotated[str | None, typer.Option(help="lookahead or tail_window.")]
Timeout = Annotated[float, typer.Option(min=0.001, help="Deadline in seconds.")]


@app.command()
def generate(
    ask: Ask = "",
    file: FileOption = None,
    system: System = None,
    mode: Mode = None,
    keep: Keep = None,
    query_mode: QueryMode = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest reply.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option(help="For reproducible sampling.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    timeout: Timeout = TURN_S_MAX,
    address: Address = DEFAULT_ADDRESS,
    as_json: AsJson = False,
) -> None:
    """Ask a question, stream the answer, show where the time went."""
    options: GenerateOptions = {**_prefill(mode, keep, query_mode), "timeout_s": timeout}  # type: ignore[typeddict-item]
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "stop": stop,
    }
    options |= {name: value for name, value in given.items() if value is not None}  # type: ignore[typeddict-item]
    messages = _messages(ask, file, system)
    with _errors(address, as_json), Client(address) as client:
        if as_json:
            _print_json(asdict(client.complete(messages, **options)))
        else:
            _stream(client, messages, options)


@app.command()
def explain(
    ask: Ask = "",
    file: FileOption = None,
    system: System = None,
    mode: Mode = None,
    keep: Keep = None,
    query_mode: QueryMode = None,
    chunks: Annotated[int, typer.Option(min=0, help="Chunks to show of each end.")] = CHUNKS_SHOWN,
    timeout: Timeout = TURN_S_MAX,
    address: Address = DEFAULT_ADDRESS,
    as_json: AsJson = False,
) -> None:
    """Show what sparse prefill would keep of a prompt, and how important each chunk is."""
    options: PrefillOptions = {**_prefill(mode, keep, query_mode), "timeout_s": timeout}
    messages = _messages(ask, file, system)
    with _errors(address, as_json), Client(address) as client:
        explanation = client.explain(messages, include_text=True, **options)
        if as_json:
            _print_json(asdict(explanation))
        else:
            Console().print(render.explanation_view(explanation, most=chunks))


@app.command()
def health(address: Address = DEFAULT_ADDRESS, as_json: AsJson = False) -> None:
    """Is the gateway alive, and does it take requests?"""
    with _errors(address, as_json), Client(address) as client:
        alive, ready = client.health(""), client.health(GATEWAY_SERVICE)
        if as_json:
            _print_json({"address": address, "alive": alive, "ready": ready})
        else:
            Console().print(f"{address}: alive {alive}, ready {ready}")
    if ready != "SERVING":
        raise typer.Exit(EXIT_FAILED)


@app.command()
def info(address: Address = DEFAULT_ADDRESS, as_json: AsJson = False) -> None:
    """Models, defaults, limits and memory of a running system."""
    with _errors(address, as_json), Client(address) as client:
        found = client.server_info()
        if as_json:
            _print_json(asdict(found))
        else:
            Console().print(_info_table(found))


def main() -> None:
    """Entry point of the `specprefill` script."""
    try:
        app()
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None


def keep_basis_points(text: str) -> int:
    """ "20%", "0.2" or "2000" as basis points; what lies outside 1..10000 is left to the gateway.

    Raises typer.BadParameter.
    """
    try:
        if text.endswith("%"):
            return round(float(text[:-1]) * 100)
        return round(float(text) * 10000) if "." in text else int(text)
    except (ValueError, OverflowError):
        raise typer.BadParameter("a keep rate is written 20%, 0.2 or 2000") from None


def _prefill(mode: str | None, keep: str | None, query_mode: str | None) -> PrefillOptions:
    options: PrefillOptions = {}
    if mode is not None:
        options["mode"] = _one_of("--mode", mode, ("auto", "dense", "sparse"))
    if query_mode is not None:
        options["query_mode"] = _one_of("--query-mode", query_mode, ("lookahead", "tail_window"))
    if keep is not None:
        options["keep_basis_points"] = keep_basis_points(keep)
    return options


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise typer.BadParameter(f"{option} is one of {', '.join(allowed)}")
    return value


def _messages(ask: str, file: Path | None, system: str | None) -> list[dict[str, str]]:
    """One user message: the text, an empty line, the question."""
    text = _read(file) if file is not None else ""
    content = "\n\n".join(part for part in (text, ask) if part)
    if not content:
        raise typer.BadParameter("nothing to ask: give --ask, --file or both")
    messages = [{"role": "user", "content": content}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def _read(file: Path) -> str:
    try:
        data = sys.stdin.buffer.read(FILE_BYTES_MAX + 1) if str(file) == "-" else _bytes_of(file)
        if len(data) > FILE_BYTES_MAX:
            raise typer.BadParameter(f"{file} is larger than {FILE_BYTES_MAX} bytes")
        return data.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{file} is not UTF-8 text") from None
    except OSError as error:
        raise typer.BadParameter(f"cannot read {file}: {error.strerror}") from None


def _bytes_of(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(FILE_BYTES_MAX + 1)


def _stream(client: Client, messages: list[dict[str, str]], options: GenerateOptions) -> None:
    errors = Console(stderr=True)
    wrote = False
    with errors.status("waiting for the gateway") as status:
        for event in client.generate(messages, **options):
            match event:
                case Progress():
                    status.update(render.progress_line(event))
                case Delta():
                    status.stop()
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
                    wrote = True
                case Finished():
                    status.stop()
                    sys.stdout.write("\n" if wrote else "")
                    sys.stdout.flush()
                    errors.print()
                    errors.print(render.summary(event))


def _info_table(found: ServerInfo) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("version", found.version)
    table.add_row("target", _model_line(found.target))
    table.add_row("draft", _model_line(found.draft))
    table.add_row("tokenizers match", "yes" if found.tokenizers_match else "no")
    plan = found.defaults.plan
    table.add_row(
        "defaults",
        f"keep {plan.keep_basis_points / 100:g} % in chunks of {plan.chunk_tokens}, "
        f"{plan.query_mode.lower()}, sparse from {found.defaults.threshold_tokens} tokens",
    )
    limits = f"{found.prompt_tokens_max} prompt tokens, {found.completion_tokens_max} reply tokens"
    table.add_row("limits", limits)
    for name, usage in (("target pages", found.target_kv), ("draft pages", found.draft_kv)):
        if usage is not None:
            used = usage.pages_total - usage.pages_free
            table.add_row(
                name, f"{used} of {usage.pages_total} in use, {usage.page_tokens} tokens each"
            )
    return table


def _model_line(model: ModelInfo | None) -> str:
    if model is None:
        return "not reachable: prompts go dense"
    layers = (
        f"{model.layers_used} of {model.layers}"
        if model.layers_used < model.layers
        else model.layers
    )
    return (
        f"{model.name} ({model.architecture}, {layers} layers, {model.dtype} on {model.device}, "
        f"{model.positions_max} positions)"
    )


@contextmanager
def _errors(address: str, as_json: bool) -> Iterator[None]:
    """Turn errors into one clear message and an exit code."""
    try:
        yield
    except Unavailable as error:
        _complain(error, _unavailable_line(error, address), as_json)
        raise typer.Exit(EXIT_UNREACHABLE) from None
    except InvalidRequest as error:
        is_named = error.field is None or error.field in error.message
        where = "" if is_named else f" ({error.field})"
        _complain(error, f"refused: {error.message}{where}", as_json)
        raise typer.Exit(EXIT_FAILED) from None
    except ServiceError as error:
        _complain(error, f"failed: {error.message} [{error.reason}]", as_json)
        raise typer.Exit(EXIT_FAILED) from None


def _unavailable_line(error: Unavailable, address: str) -> str:
    if error.metadata.get("request_id"):
        return f"the gateway at {address} cannot answer now: {error.message}"
    return f"no gateway answers at {address}; `make serve` starts one, --address names another"


def _complain(error: ServiceError, line: str, as_json: bool) -> None:
    if as_json:
        body = {"reason": error.reason, "message": error.message, "field": error.field}
        _print_json({"error": body | {"metadata": error.metadata}})
    else:
        Console(stderr=True).print(line, style="red", markup=False, highlight=False)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
