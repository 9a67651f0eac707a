"""`make serve` with one's own models: a saved random Qwen3 as target, a smaller one as draft."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from client import Client
from tests.e2e.conftest import conversation
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.e2e

WAIT_S = 40


def test_own_models_are_served_until_they_are_told_to_stop(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "target", "qwen3", layers=3, positions_max=8192)
    draft = write_tiny_model(tmp_path / "draft", "qwen3", layers=1, positions_max=8192, seed=1)
    command = [sys.executable, "-m", "demo.serve", "--port", "0"]
    command += ["--target", str(target), "--draft", str(draft)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = iter(process.stdout.readline, "")
            listening = (re.search(r"listens on (\S+:\d+)\.", line) for line in said)
            address = next(match[1] for match in listening if match)
            with Client(address, timeout_s=WAIT_S) as client:
                info = client.server_info()
                reply = client.complete(conversation(), mode="sparse", max_tokens=4)
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
    assert info.target is not None
    assert info.draft is not None
    assert (info.target.architecture, info.target.layers, info.draft.layers) == ("qwen3", 3, 1)
    assert info.tokenizers_match
    assert (reply.decision.path, reply.decision.reason) == ("SPARSE", "REQUESTED")
