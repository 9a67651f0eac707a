"""The embedded default pair: SmolLM2-135M-Instruct as target, its first layers as draft."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from demo.launcher import LaunchPlan
from demo.prepare import prepare_with_progress

DRAFT_LAYERS = 12
# Prompts of the demo are short beside those the service's own default is for.
THRESHOLD_TOKENS = 1024
# Two full contexts of 8,192 positions in each model service.
KV_TOKENS = 16384
# A demo should end when it is told to.
GRACE_S = 2


def default_plan(log_dir: Path, console: Console, *, gateway_port: int = 0) -> LaunchPlan:
    """Prepare the model (once, with a progress bar) and say how to start the services on it."""
    model_dir = prepare_with_progress(console)
    return plan_for(
        model_dir,
        model_dir,
        log_dir=log_dir,
        draft_layers=DRAFT_LAYERS,
        gateway_port=gateway_port,
    )


def plan_for(
    target: Path, draft: Path, *, log_dir: Path, draft_layers: int | None, gateway_port: int
) -> LaunchPlan:
    service = {"GRACE_S": str(GRACE_S)}
    model = service | {"KV_TOKENS": str(KV_TOKENS)}
    return LaunchPlan(
        target_dir=target,
        draft_dir=draft,
        draft_layers=draft_layers,
        log_dir=log_dir,
        gateway_port=gateway_port,
        scorer_env=model,
        target_env=model,
        gateway_env=service | {"THRESHOLD_TOKENS": str(THRESHOLD_TOKENS)},
    )
