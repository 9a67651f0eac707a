"""The launcher with children that are not the real services."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from demo.launcher import LaunchError, LaunchPlan, LocalServices, log_events

WAIT_S = 20


def _plan(tmp_path: Path, **env: dict[str, str]) -> LaunchPlan:
    return LaunchPlan(
        target_dir=tmp_path / "target",
        draft_dir=tmp_path / "draft",
        log_dir=tmp_path / "logs",
        **env,
    )


def test_a_service_that_ends_at_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    plan = _plan(tmp_path, scorer_env={"NO_SUCH_SETTING": "1"})
    with pytest.raises(LaunchError, match=r"(?s)the scorer ended with code 2.*NO_SUCH_SETTING"):
        LocalServices(plan).start("scorer")


def test_a_failed_start_leaves_no_process(tmp_path: Path) -> None:
    services = LocalServices(_plan(tmp_path, target_env={"NO_SUCH_SETTING": "1"}))
    with pytest.raises(LaunchError):
        services.__enter__()
    assert services.services
    assert not any(service.is_running for service in services.services.values())


def test_settings_carry_models_layers_and_addresses(tmp_path: Path) -> None:
    plan = LaunchPlan(
        target_dir=Path("t"),
        draft_dir=Path("d"),
        log_dir=tmp_path,
        draft_layers=3,
        scorer_env={"KV_TOKENS": "9"},
    )
    assert plan.settings("scorer", {}) == {
        "MODEL_DIR": "d",
        "DRAFT_LAYERS": "3",
        "KV_TOKENS": "9",
    }
    assert plan.settings("target", {}) == {"MODEL_DIR": "t"}


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed, so only the kernel is left to end the child."""
    module = tmp_path / "endless.py"
    module.write_text("import signal, sys\nprint('up', flush=True)\nsignal.pause()\n")
    parent = (
        "import os, subprocess, sys, signal\n"
        "command = [sys.executable, '-m', 'demo.child', str(os.getpid()), 'endless']\n"
        "child = subprocess.Popen(command, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "signal.pause()\n"
    )
    search = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", parent],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": search},
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        watch = os.pidfd_open(child)
        process.kill()
        # The descriptor becomes readable when the child has ended.
        assert _ends(watch)


def _ends(pid_descriptor: int) -> bool:
    ready, _, _ = select.select([pid_descriptor], [], [], WAIT_S)
    return bool(ready)


def test_log_events_skips_lines_that_are_no_json(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("oops\n" + json.dumps({"event": "serving", "port": 1}) + "\n[]\n")
    assert log_events(log) == [{"event": "serving", "port": 1}]


def test_sigterm_leaves_through_finally() -> None:
    program = (
        "import signal\n"
        "from demo.launcher import exit_on_sigterm\n"
        "exit_on_sigterm()\n"
        "try:\n"
        "    print('up', flush=True)\n"
        "    signal.pause()\n"
        "finally:\n"
        "    print('clean', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=WAIT_S)[0] == b"clean\n"
    assert process.returncode == 128 + signal.SIGTERM
