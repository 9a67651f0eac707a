"""A Scorer service without a model, whose requests say how it shall behave; runs as a process, too.

`instance_id` of a Score or Release names an error class of serving.errors, or a word below.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import grpc
from pydantic_settings import SettingsConfigDict

from serving import errors
from serving.errors import ServiceError
from serving.server import ServiceServer, serve
from serving.settings import ServiceSettings, load_settings_or_exit
from serving.telemetry import configure_logging, make_registry
from specprefill.v1 import scorer_pb2, scorer_pb2_grpc, types_pb2

NAME = "specprefill.v1.Scorer"
SECRET = "the prompt of a user"
FIELD = "settings.keep_basis_points"


class FakeSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="SPECPREFILL_FAKE_")


class FakeScorer(scorer_pb2_grpc.ScorerServicer):
    """gate: what a "wait" waits for. streams_closed: Score generators whose finally ran."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.streams_closed = asyncio.Semaphore(0)
        self.request_ids: list[str] = []

    async def Score(
        self, request: scorer_pb2.ScoreRequest, context: Any
    ) -> AsyncIterator[scorer_pb2.ScoreResponse]:
        self.request_ids.append(request.request_id)
        try:
            yield scorer_pb2.ScoreResponse(progress=types_pb2.Progress(done_tokens=1))
            await self._behave(request.instance_id, context)
            if request.instance_id == "flood":
                while True:
                    yield scorer_pb2.ScoreResponse(
                        result=scorer_pb2.ScoreResult(chunk_importance=bytes(4000))
                    )
            yield scorer_pb2.ScoreResponse(progress=types_pb2.Progress(done_tokens=2))
        finally:
            self.streams_closed.release()

    async def Release(
        self, request: scorer_pb2.ScorerReleaseRequest, context: Any
    ) -> scorer_pb2.ScorerReleaseResponse:
        await self._behave(request.instance_id, context)
        if request.instance_id == "None":
            return None  # type: ignore[return-value]
        return scorer_pb2.ScorerReleaseResponse(released=len(request.handles))

    async def _behave(self, word: str, context: Any) -> None:
        cls = getattr(errors, word, None)
        if cls is not None and issubclass(cls, ServiceError):
            raise cls("not today", field=FIELD, metadata={"limit": "7"}, retry_after_s=0.25)
        if word == "wait":
            await self.gate.wait()
        elif word == "abort":
            context.set_trailing_metadata((("x-own", "1"),))
            await context.abort(grpc.StatusCode.ABORTED, "own words", (("x-own", "1"),))
        elif word == "trailing":
            context.set_trailing_metadata((("x-own", "1"),))
            raise errors.Conflict("not today")
        elif word == "ValueError":
            raise ValueError(SECRET)
        elif word == "NotImplementedError":
            raise NotImplementedError(SECRET)
        elif word == "AssertionError":
            raise AssertionError(SECRET)


def fake_server(servicer: FakeScorer, **settings: Any) -> ServiceServer:
    """A server of the fake, in this event loop."""
    return ServiceServer(
        settings=FakeSettings(**settings),
        service_names=[NAME],
        add_services=lambda server: scorer_pb2_grpc.add_ScorerServicer_to_server(servicer, server),
        registry=make_registry("fake"),
    )


async def run(settings: FakeSettings, **how: Any) -> int:
    """The fake as serve() runs it; streams that wait end as soon as it drains."""
    servicer = FakeScorer()

    async def open_gate() -> None:
        servicer.gate.set()

    return await serve(
        settings=settings,
        service_name="fake",
        service_names=[NAME],
        add_services=lambda server: scorer_pb2_grpc.add_ScorerServicer_to_server(servicer, server),
        registry=make_registry("fake"),
        **{"on_drain": open_gate, **how},
    )


def main() -> None:
    settings = load_settings_or_exit(FakeSettings, os.environ)
    configure_logging("fake", settings.log_level)
    raise SystemExit(asyncio.run(run(settings)))


if __name__ == "__main__":
    main()
