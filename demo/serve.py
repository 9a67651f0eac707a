"""Starts the three services and stays up: `python -m demo.serve [--target DIR] [--draft DIR]`."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from demo.launcher import LaunchError, LocalServices, Service, exit_on_sigterm
from demo.models import default_plan, plan_for

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
            console.print(_how_to_call(services, log_dir), markup=False, highlight=False)
            _watch(services)


def _how_to_call(services: LocalServices, log_dir: Path) -> str:
    address = services.address
    metrics = "\n".join(f"  {name:8}{s.metrics_url}" for name, s in services.services.items())
    return (
        f"\nThe gateway listens on {address}. Try\n\n"
        f"  .venv/bin/specprefill info --address {address}\n"
        f"  .venv/bin/specprefill generate --address {address} --mode sparse --file README.md "
        '--ask "What is this?"\n\n'
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
        app(standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("stopped\n")
    except typer.BadParameter as error:
        sys.stderr.write(f"{error.message}\n")
        raise SystemExit(2) from None
    except (LaunchError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(EXIT_FAILED) from None


if __name__ == "__main__":
    main()
