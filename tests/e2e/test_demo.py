"""`python -m demo` as a user runs it, on a tiny random model: exit codes, nothing left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from demo.models import DRAFT_LAYERS
from demo.prepare import FORMAT, MODEL_NAME
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.e2e

WAIT_S = 40
# Above the demo's threshold of 1,024 tokens with a tokenizer of a few hundred words.
TEXT = " ".join(f"Berth {n} is kept by sailor {n * 7}." for n in range(200))


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a machine where the model is prepared: a tiny one in its place."""
    cache = tmp_path_factory.mktemp("cache")
    model = write_tiny_model(
        cache / "specprefill" / MODEL_NAME, layers=DRAFT_LAYERS + 1, positions_max=8192
    )
    (model / "prepared.json").write_text(json.dumps({"format": FORMAT}), encoding="utf-8")
    return {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}


@contextmanager
def _demo(environ: dict[str, str], *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "demo", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_prompt_that_goes_sparse_is_exit_code_0(environ: dict[str, str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    with _demo(environ, "--file", str(text), "--ask", "Who keeps berth 3?", "--json") as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err.decode()
    report = json.loads(out)
    assert report["problems"] == []
    assert report["questions"][0]["sparse"]["decision"]["path"] == "SPARSE"


def test_a_prompt_that_does_not_go_sparse_is_exit_code_1(
    environ: dict[str, str], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Too short to drop anything.", encoding="utf-8")
    with _demo(environ, "--file", str(text), "--ask", "Why?") as process:
        out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert b"did not go sparse: BELOW_THRESHOLD" in out


def test_ctrl_c_is_exit_code_130_and_ends_all_three_services(environ: dict[str, str]) -> None:
    with _demo(environ) as process:
        assert process.stdout is not None
        while b"Question:" not in process.stdout.readline():
            assert process.poll() is None
        children = _children(process.pid)
        assert len(children) == 3
        watches = [os.pidfd_open(child) for child in children]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert b"every process started here has ended" in err
    # A pidfd is readable once its process has ended.
    assert len(select.select(watches, [], [], 0)[0]) == 3
    for watch in watches:
        os.close(watch)


def _children(parent: int) -> list[int]:
    threads = Path(f"/proc/{parent}/task").glob("*/children")
    return [int(child) for path in threads for child in path.read_text().split()]
