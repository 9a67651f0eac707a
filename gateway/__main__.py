"""python -m gateway: builds the gateway's objects and serves them."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import uuid
from datetime import datetime

from gateway.chat_template import load_chat_template
from gateway.metrics import GatewayMetrics
from gateway.prompt import PromptEncoder
from gateway.readiness import Readiness
from gateway.releases import Releases
from gateway.servicer import SERVICE_NAME, GatewayServicer
from gateway.settings import GatewaySettings
from gateway.tokenizer import PromptTokenizer
from gateway.turn import TurnServices
from gateway.upstream import GrpcScorer, GrpcTarget, UpstreamTerms
from serving.channel import channel_options
from serving.model_dir import ModelDirError, end_token_ids
from serving.server import EXIT_FAILED, fatal_reporter, serve
from serving.settings import load_settings_or_exit
from serving.telemetry import configure_logging, make_registry


async def run(settings: GatewaySettings) -> int:
    """Serve until stopped; returns the exit code. Raises ModelDirError."""
    template = load_chat_template(
        settings.model_dir, characters_max=settings.rendered_characters_max
    )
    tokenizer = PromptTokenizer(
        settings.model_dir, template_literals=template.literals if template else ()
    )
    # A new process is a new owner: its first call frees what the one before it left.
    instance_id = str(uuid.uuid4())
    terms = UpstreamTerms(
        instance_id=instance_id,
        options=channel_options(settings),
        refresh_s=settings.refresh_s,
        info_s_max=settings.info_s_max,
    )
    scorer = GrpcScorer(settings.scorer_address, terms)
    target = GrpcTarget(settings.target_address, terms)
    fatal = asyncio.Event()
    readiness = Readiness(
        scorer, target, tokenizer_digest=tokenizer.digest, on_fatal=fatal_reporter(fatal)
    )
    releases = Releases(target, timeout_s=settings.release_s_max)
    registry = make_registry("gateway")
    services = TurnServices(
        scorer=scorer,
        target=target,
        encoder=PromptEncoder(
            tokenizer, template, bytes_max=settings.prompt_bytes_max, now=datetime.now
        ),
        tokenizer=tokenizer.plain,
        end_token_ids=end_token_ids(settings.model_dir),
        releases=releases,
        clock=time.monotonic,
        score_s_max=settings.score_s_max,
        deadline_margin_s=settings.deadline_margin_s,
    )
    servicer = GatewayServicer(
        settings,
        services,
        GatewayMetrics(registry),
        tokenizer_digest=tokenizer.digest,
        instance_id=instance_id,
    )

    async def stop() -> None:
        await releases.settled()
        await readiness.close()

    return await serve(
        settings=settings,
        service_name="gateway",
        service_names=[SERVICE_NAME],
        add_services=servicer.add_to,
        registry=registry,
        on_start=readiness.start,
        on_stop=stop,
        fatal=fatal,
    )


def main() -> None:
    """Read the settings, set up logging, serve, exit with serve's code."""
    settings = load_settings_or_exit(GatewaySettings, os.environ)
    configure_logging("gateway", settings.log_level)
    try:
        code = asyncio.run(run(settings))
    except ModelDirError as error:
        sys.stderr.write(f"{error}\n")
        code = EXIT_FAILED
    raise SystemExit(code)


if __name__ == "__main__":
    main()
