"""When the gateway may serve: the target is there and has the same tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import structlog

from gateway.facts import FactsWatch
from gateway.ports import ScorerFacts, TargetFacts

log = structlog.get_logger()


class Watched(Protocol):
    """A service whose facts are watched."""

    async def close(self) -> None: ...


class WatchedScorer(Watched, Protocol):
    @property
    def watch(self) -> FactsWatch[ScorerFacts]: ...


class WatchedTarget(Watched, Protocol):
    @property
    def watch(self) -> FactsWatch[TargetFacts]: ...


class Readiness:
    """Runs the watches of both services from start() to close()."""

    def __init__(
        self,
        scorer: WatchedScorer,
        target: WatchedTarget,
        *,
        tokenizer_digest: str,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """tokenizer_digest: the gateway's own. on_fatal: told if a watch dies of a bug of ours."""
        self._scorer = scorer
        self._target = target
        self._tokenizer_digest = tokenizer_digest
        self._on_fatal = on_fatal
        self._tasks: list[asyncio.Task[None]] = []
        self._refused_boot_id: str | None = None

    async def start(self) -> None:
        """Returns when the target is there with the gateway's tokenizer; the scorer may come later.

        A target with another tokenizer is logged and waited out: it may be replaced.
        """
        # The first answer of the scorer, so that the first requests find it if it is there.
        await self._scorer.watch.refresh()
        self._keep(self._scorer.watch.run())
        self._keep(self._target.watch.run())
        self._keep(self._report_drafts())
        await self._target.watch.until(self._target_fits)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._scorer.close()
        await self._target.close()

    def _keep(self, watching: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(watching)
        task.add_done_callback(self._check_end)
        self._tasks.append(task)

    def _check_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_fatal(error)

    def _target_fits(self, facts: TargetFacts | None) -> bool:
        if facts is None:
            return False
        if facts.model.tokenizer_digest == self._tokenizer_digest:
            return True
        if facts.boot_id != self._refused_boot_id:
            self._refused_boot_id = facts.boot_id
            log.error(
                "target_tokenizer_mismatch",
                effect="not ready: the target has another tokenizer than the gateway's model_dir",
                gateway_digest=self._tokenizer_digest,
                target_digest=facts.model.tokenizer_digest,
            )
        return False

    async def _report_drafts(self) -> None:
        """Log for every scorer that starts whether its draft can be used."""
        reported: str | None = None

        def is_new(facts: ScorerFacts | None) -> bool:
            return facts is not None and facts.boot_id != reported

        while True:
            await self._scorer.watch.until(is_new)
            facts = self._scorer.watch.facts
            if facts is None:
                continue
            reported = facts.boot_id
            if facts.model.tokenizer_digest == self._tokenizer_digest:
                log.info("draft_fits", boot_id=facts.boot_id)
            else:
                log.error(
                    "draft_tokenizer_mismatch",
                    effect="every prompt goes dense: draft and target have different tokenizers",
                    target_digest=self._tokenizer_digest,
                    draft_digest=facts.model.tokenizer_digest,
                )
