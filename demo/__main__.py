"""The demo: a question about a long text through three real services, sparse against dense.

Prepares the model once, starts the services, streams the answer, shows what was kept and what each
stage cost, asks the same densely, and ends with every process it started gone. Exit code 1
if the turn did not go sparse with enough ranked chunks, or if an answer lacks the shipped fact.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from client import Client, Delta, Finished, Progress, render
from demo.launcher import LaunchError, LocalServices, exit_on_sigterm
from demo.models import default_plan
from demo.prepare import PrepareError
from serving.errors import ServiceError

RANKED_CHUNKS_MIN = 8
ANSWER_TOKENS_MAX = 32
# The model is small: it finds a fact better when told what it has before it.
SYSTEM = (
    "You answer questions about a document that the user sends. "
    "Be brief, be exact, and quote the document where you can do so."
)
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, kw_only=True)
class Question:
    """expect: what a right answer contains; None where we cannot know."""

    ask: str
    expect: str | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    mode: str
    text: str
    is_right: bool | None
    finished: Finished


@app.command()
def run(
    file: Annotated[Path | None, typer.Option(help="Ask about this text instead.")] = None,
    ask: Annotated[str | None, typer.Option(help="The question.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Ask about a long text, sparse and dense."""
    console = Console(stderr=as_json)
    questions = _questions(is_shipped=file is None, ask=ask)
    text = _shipped_text() if file is None else _text_of(file)
    with tempfile.TemporaryDirectory(prefix="specprefill-demo-") as logs:
        plan = default_plan(Path(logs), console)
        with (
            LocalServices(plan, notify=lambda line: console.print(line, style="dim")) as services,
            Client(services.address) as client,
        ):
            answers = _ask_all(client, text, questions, console)
    problems = _problems(answers[0])
    if as_json:
        sys.stdout.write(json.dumps(_report(questions, answers, problems)) + "\n")
    for problem in problems:
        console.print(problem, style="bold red")
    raise typer.Exit(EXIT_FAILED if problems else 0)


def _ask_all(
    client: Client, text: str, questions: list[Question], console: Console
) -> list[tuple[Answer, Answer]]:
    """(sparse, dense) of every question; the first is shown as it comes."""
    first = questions[0]
    console.print(f"\n[bold]Question:[/bold] {first.ask}\n")
    sparse = _ask(client, text, first, mode="auto", console=console)
    console.print(render.summary(sparse.finished))
    console.print("\n[bold]The same, dense:[/bold]\n")
    dense = _ask(client, text, first, mode="dense", console=console)
    console.print(render.stage_table(dense.finished.timings))
    answers = [(sparse, dense)]
    rest = questions[1:]
    for question in track(rest, "the other questions", console=console, disable=not rest):
        sparse = _ask(client, text, question, mode="auto", console=None)
        dense = _ask(client, text, question, mode="dense", console=None)
        answers.append((sparse, dense))
    console.print(_comparison(questions, answers))
    console.print(_verdict(answers))
    return answers


def _ask(
    client: Client, text: str, question: Question, *, mode: str, console: Console | None
) -> Answer:
    """Ask once; with a console the answer is streamed to it."""
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{text}\n\nQuestion: {question.ask}"},
    ]
    pieces: list[str] = []
    finished: Finished | None = None
    show = console or Console(quiet=True)
    with show.status("waiting") as status:
        for event in client.generate(messages, mode=mode, max_tokens=ANSWER_TOKENS_MAX):
            match event:
                case Progress():
                    status.update(render.progress_line(event))
                case Delta():
                    status.stop()
                    pieces.append(event.text)
                    show.print(event.text, end="", markup=False, highlight=False)
                case Finished():
                    finished = event
    show.print("\n")
    assert finished is not None
    answer = "".join(pieces).strip()
    is_right = None if question.expect is None else question.expect.lower() in answer.lower()
    return Answer(mode=mode, text=answer, is_right=is_right, finished=finished)


def _comparison(questions: list[Question], answers: list[tuple[Answer, Answer]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    table.add_column("sparse against dense, this run", overflow="ellipsis", no_wrap=True, ratio=1)
    table.add_column("right")
    table.add_column("first token", justify="right")
    for question, pair in zip(questions, answers, strict=True):
        table.add_row(Text(question.ask, style="bold"))
        for answer in pair:
            path = answer.finished.decision.path.lower()
            table.add_row(
                Text(f"  {path:7} {' '.join(answer.text.split())}"),
                {True: "yes", False: "no", None: ""}[answer.is_right],
                f"{answer.finished.timings.time_to_first_token_s:.2f} s",
            )
    return table


def _verdict(answers: list[tuple[Answer, Answer]]) -> str:
    asked = len(answers)
    sparse_s, dense_s = _median_ttft_s(answers)
    lines = [
        f"first token{', median' if asked > 1 else ''}: sparse {sparse_s:.2f} s, "
        f"dense {dense_s:.2f} s; sparse is {dense_s / sparse_s:.2f} times as fast"
    ]
    if answers[0][0].is_right is not None:
        right = [sum(bool(pair[i].is_right) for pair in answers) for i in (0, 1)]
        lines.append(f"right answers: sparse {right[0]}/{asked}, dense {right[1]}/{asked}")
    return "\n".join(lines)


def _median_ttft_s(answers: list[tuple[Answer, Answer]]) -> tuple[float, float]:
    sparse, dense = (
        statistics.median(pair[i].finished.timings.time_to_first_token_s for pair in answers)
        for i in (0, 1)
    )
    return sparse, dense


def _problems(default: tuple[Answer, Answer]) -> list[str]:
    """What the default question must show and did not."""
    sparse, dense = default
    finished, problems = sparse.finished, []
    if finished.decision.path != "SPARSE":
        problems.append(f"the prompt did not go sparse: {finished.decision.reason}")
    elif finished.plan is None or finished.plan.ranked_chunks < RANKED_CHUNKS_MIN:
        problems.append(f"fewer than {RANKED_CHUNKS_MIN} chunks were kept by importance")
    problems += [
        f"the {answer.finished.decision.path.lower()} answer lacks the fact asked for"
        for answer in (sparse, dense)
        if answer.is_right is False
    ]
    return problems


def _report(
    questions: list[Question], answers: list[tuple[Answer, Answer]], problems: list[str]
) -> dict[str, Any]:
    sparse_s, dense_s = _median_ttft_s(answers)
    return {
        "problems": problems,
        "sparse_s": sparse_s,
        "dense_s": dense_s,
        "questions": [
            {"ask": question.ask, "expect": question.expect}
            | {
                name: _answer(answer)
                for name, answer in zip(("sparse", "dense"), pair, strict=True)
            }
            for question, pair in zip(questions, answers, strict=True)
        ],
    }


def _answer(answer: Answer) -> dict[str, Any]:
    return {"text": answer.text, "is_right": answer.is_right, **asdict(answer.finished)}


def _questions(*, is_shipped: bool, ask: str | None) -> list[Question]:
    """The five shipped ones, the default first; or just the one that was given."""
    if ask is not None:
        return [Question(ask=ask)]
    if not is_shipped:
        raise typer.BadParameter("a text of your own needs a question: --ask (ASK=... with make)")
    data = json.loads(_resource("questions.json"))
    return [Question(ask=item["ask"], expect=item["expect"]) for item in data]


def _shipped_text() -> str:
    return _resource("handbook.txt").strip()


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{file} is not UTF-8 text") from None
    except OSError as error:
        raise typer.BadParameter(f"cannot read {file}: {error.strerror}") from None


def _resource(name: str) -> str:
    return resources.files("demo").joinpath(name).read_text(encoding="utf-8")


def main() -> None:
    exit_on_sigterm()
    try:
        app()
    except (LaunchError, PrepareError, ServiceError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(EXIT_FAILED) from None
    except SystemExit as done:
        if done.code == EXIT_INTERRUPTED:
            sys.stderr.write("interrupted; every process started here has ended\n")
        raise


if __name__ == "__main__":
    main()
