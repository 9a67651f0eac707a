from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.facts import LATE_ANSWERS_MAX, FactsWatch
from serving.errors import DeadlineExceeded, InternalError, UpstreamUnavailable


@dataclass(frozen=True)
class Facts:
    boot_id: str


def _watch(answers: Iterable[Facts | Exception]) -> FactsWatch[Facts]:
    left = iter(answers)

    async def ask() -> Facts:
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return FactsWatch(ask, service="scorer", refresh_s=60)


async def test_a_service_may_come_and_go_and_come_back() -> None:
    watch = _watch(
        [UpstreamUnavailable("x"), Facts("1"), InternalError("x"), Facts("1"), Facts("2")]
    )
    seen = []
    for _ in range(5):
        await watch.refresh()
        seen.append(watch.facts)
    assert seen == [None, Facts("1"), None, Facts("1"), Facts("2")]


async def test_late_answers_of_a_busy_service_are_borne_for_a_while() -> None:
    late = [DeadlineExceeded("x")] * LATE_ANSWERS_MAX
    watch = _watch([Facts("1"), *late[:-1], Facts("1"), *late])
    for _ in range(LATE_ANSWERS_MAX):
        await watch.refresh()
        assert watch.facts == Facts("1")
    for _ in range(LATE_ANSWERS_MAX):
        await watch.refresh()
        assert watch.facts == Facts("1")
    await watch.refresh()
    assert watch.facts is None


async def test_a_call_that_finds_nobody_has_the_service_asked_again_at_once() -> None:
    watch = _watch([Facts("1"), Facts("2")])
    running = asyncio.create_task(watch.run())
    await watch.until(lambda facts: facts is not None)
    watch.lost()
    assert watch.facts is None
    # Far sooner than the minute between two questions.
    async with asyncio.timeout(5):
        await watch.until(lambda facts: facts == Facts("2"))
    running.cancel()


async def test_a_reply_from_a_new_process_has_the_facts_asked_again() -> None:
    watch = _watch([Facts("1"), Facts("2")])
    running = asyncio.create_task(watch.run())
    await watch.until(lambda facts: facts is not None)
    watch.saw("1")
    watch.saw("2")
    async with asyncio.timeout(5):
        await watch.until(lambda facts: facts == Facts("2"))
    running.cancel()
