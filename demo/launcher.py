"""Starts the three services as real processes on this machine and ends exactly what it started.

Ports are chosen by the operating system unless given; a service tells its own in its "serving" log
event. Used by the demo, `make serve`, the end-to-end tests and the benchmarks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

MODULES = {"scorer": "scorer_service", "target": "target_service", "gateway": "gateway"}
START_S_MAX = 180.0
STOP_S_MAX = 10.0
POLL_S = 0.05
LOG_TAIL_LINES = 15


class LaunchError(RuntimeError):
    """A service did not come up; the text says which and what it said last."""


@dataclass
class Service:
    """One child process. `port` and `metrics_port` are 0 until it serves."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    port: int = 0
    metrics_port: int = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.metrics_port}/metrics"

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What to start.

    scorer_env, target_env, gateway_env: settings without their prefix ("KEEP_BASIS_POINTS").
    draft_layers: use only the first layers of the draft's checkpoint.
    """

    target_dir: Path
    draft_dir: Path
    log_dir: Path
    draft_layers: int | None = None
    gateway_port: int = 0
    scorer_env: Mapping[str, str] = field(default_factory=dict)
    target_env: Mapping[str, str] = field(default_factory=dict)
    gateway_env: Mapping[str, str] = field(default_factory=dict)

    def settings(self, name: str, peers: Mapping[str, Service]) -> dict[str, str]:
        """Settings of one service. The gateway's need the addresses of the other two."""
        match name:
            case "scorer":
                layers = {} if self.draft_layers is None else {"DRAFT_LAYERS": self.draft_layers}
                own = {"MODEL_DIR": self.draft_dir, **layers, **self.scorer_env}
            case "target":
                own = {"MODEL_DIR": self.target_dir, **self.target_env}
            case _:
                own = {
                    "MODEL_DIR": self.target_dir,
                    "PORT": self.gateway_port,
                    "SCORER_ADDRESS": peers["scorer"].address,
                    "TARGET_ADDRESS": peers["target"].address,
                    **self.gateway_env,
                }
        return {key: str(value) for key, value in own.items()}


class LocalServices:
    """The three services of a plan; a context manager that starts them and always ends them."""

    def __init__(self, plan: LaunchPlan, *, notify: Callable[[str], None] | None = None) -> None:
        """notify: told a line at a time what is being started."""
        self._plan = plan
        self._notify = notify or (lambda line: None)
        self.services: dict[str, Service] = {}

    def __enter__(self) -> Self:
        try:
            self.start("scorer", "target")
            self.start("gateway")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def __getitem__(self, name: str) -> Service:
        return self.services[name]

    @property
    def address(self) -> str:
        """The gateway's, for clients."""
        return self.services["gateway"].address

    def start(self, *names: str) -> None:
        """Start these side by side and wait until all take requests. Raises LaunchError."""
        for name in names:
            self._notify(f"starting the {name}")
            previous = self.services.get(name)
            assert previous is None or not previous.is_running
            self.services[name] = self._spawn(name, previous)
        deadline = time.monotonic() + START_S_MAX
        for name in names:
            self._wait(self.services[name], deadline)

    def kill(self, name: str) -> None:
        """SIGKILL: the service gets no chance to say anything."""
        self.services[name].process.kill()
        self.services[name].process.wait()

    def signal(self, name: str, number: int) -> None:
        self.services[name].process.send_signal(number)

    def stop(self) -> None:
        """SIGTERM to all that run, the gateway first; SIGKILL to what is left after STOP_S_MAX."""
        running = [s for s in reversed(self.services.values()) if s.is_running]
        for service in running:
            service.process.terminate()
        deadline = time.monotonic() + STOP_S_MAX
        for service in running:
            try:
                service.process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                service.process.kill()
                service.process.wait()

    def _spawn(self, name: str, previous: Service | None) -> Service:
        prefix = f"SPECPREFILL_{name.upper()}_"
        settings = self._plan.settings(name, self.services)
        if previous is not None:
            # A restarted service comes back where the others look for it.
            settings |= {"PORT": str(previous.port), "METRICS_PORT": str(previous.metrics_port)}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("SPECPREFILL_")}
        self._plan.log_dir.mkdir(parents=True, exist_ok=True)
        log_path = self._plan.log_dir / f"{name}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "demo.child", str(os.getpid()), MODULES[name]],
                env=inherited | {prefix + key: value for key, value in settings.items()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C is ours to handle: we end the children, in order.
                start_new_session=True,
            )
        return Service(name, process, log_path)

    def _wait(self, service: Service, deadline: float) -> None:
        while (event := _serving_event(service.log_path)) is None:
            if not service.is_running:
                code = service.process.returncode
                raise LaunchError(
                    f"the {service.name} ended with code {code}\n{_last_words(service)}"
                )
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the {service.name} did not start in {START_S_MAX:.0f} s\n"
                    f"{_last_words(service)}"
                )
            time.sleep(POLL_S)
        service.port, service.metrics_port = event["port"], event["metrics_port"]


def exit_on_sigterm() -> None:
    """Make SIGTERM leave through `finally` blocks, as Ctrl-C does."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def log_events(log_path: Path) -> list[dict[str, Any]]:
    """The JSON events of a service's log; other lines (a crash's own words) are left out."""
    events = []
    for line in log_path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def _serving_event(log_path: Path) -> dict[str, Any] | None:
    return next((e for e in log_events(log_path) if e.get("event") == "serving"), None)


def _last_words(service: Service) -> str:
    """Why a start failed, if the service could say it; otherwise the end of its log."""
    for event in log_events(service.log_path):
        if event.get("event") == "start_failed":
            return str(event.get("reason"))
    lines = service.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:]) or "(it said nothing)"
