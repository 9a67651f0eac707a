"""Starts the three services and stays up: `python -m demo.serve [--target DIR] [--draft DIR]`."""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from client.client import DEFAULT_ADDRESS
from demo.launcher import LaunchError, LocalServices, Service, exit_on_sigterm
from demo.models import default_plan, plan_for
from demo.prepare import PrepareError

POLL_S = 0.5
DEFAULT_PORT = 50050
EXIT_FAILED = 1

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    target: Annotated[Path | None, typer.Option(help="Directory of the target model.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Directory of the draft model.")] = None,
    draft_layers: Annotated[int | None, typer.Option(help="Use its first layers only.")] = None,
    port: Annotated[int, typer.Option(help="Port of the gateway; 0 lets the system choose.")] = (
        DEFAULT_PORT
    ),
) -> None:
    """Serve until Ctrl-C. Without directories: the demo's own pair."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="specprefill-serve-") as logs:
        log_dir = Path(logs)
        if target is None and draft is None:
            plan = default_plan(log_dir, console, gateway_port=port)
        elif target is None:
            raise typer.BadParameter("a draft needs a target: --target DIR")
        else:
            # A target alone scores with itself: slow, but a way to try a model out.
            plan = plan_for(
                target,
                draft or target,
                log_dir=log_dir,
                draft_layers=draft_layers,
                gateway_port=port,
            )
        with LocalServices(plan, notify=lambda line: console.print(line, style="dim")) as services:
            how_to = _how_to_call(services, log_dir)
            console.print(how_to, markup=False, highlight=False, soft_wrap=True)
            # Ctrl-C is how this command ends well.
            with suppress(KeyboardInterrupt):
                _watch(services)
    console.print("all three have ended")


def _how_to_call(services: LocalServices, log_dir: Path) -> str:
    address = services.address
    where = "" if address == DEFAULT_ADDRESS else f" --address {address}"
    metrics = "\n".join(f"  {name:8}{s.metrics_url}" for name, s in services.services.items())
    return (
        f"\nThe gateway listens on {address}. In another terminal:\n\n"
        f"  .venv/bin/specprefill info{where}\n"
        f"  .venv/bin/specprefill generate{where} --ask 'What is the capital of France?'\n"
        f"  .venv/bin/specprefill explain{where} --file demo/handbook.txt "
        "--ask 'Question: Who is the warden of Skerrow?'\n\n"
        f"Metrics\n\n{metrics}\n\nLogs are in {log_dir}. Ctrl-C ends all three.\n"
    )


def _watch(services: LocalServices) -> None:
    """Return never; raise LaunchError if a service ends by itself."""
    while True:
        for service in services.services.values():
            _check(service)
        time.sleep(POLL_S)


def _check(service: Service) -> None:
    if not service.is_running:
        code = service.process.returncode
        raise LaunchError(f"the {service.name} ended by itself with code {code}")


def main() -> None:
    exit_on_sigterm()
    try:
        app()
    except (LaunchError, PrepareError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(EXIT_FAILED) from None


if __name__ == "__main__":
    main()
