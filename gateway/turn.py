"""One turn: tokenise, plan, score, generate. Events on the way, then exactly one TurnFinished.

Whatever the scorer does, the turn goes on, densely if need be. Whatever the target does, nothing is
tried twice: after the first token the client has part of an answer, and before it the client can
retry as well as we.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import structlog
from tokenizers import Tokenizer

from gateway.events import (
    Counts,
    Delta,
    Explanation,
    TurnEvent,
    TurnFinished,
    TurnPhase,
    TurnStarted,
)
from gateway.planner import Decision, Path, Reason, dense, plan_turn, reason_of
from gateway.ports import (
    GenerateCall,
    Generated,
    GenerateEvent,
    Progress,
    Restored,
    ScoreCall,
    Scored,
    Scorer,
    Target,
    TargetFacts,
    TargetTimes,
    Tokens,
)
from gateway.prompt import Prompt, PromptEncoder
from gateway.releases import Releases
from gateway.requests import TurnRequest
from gateway.timings import Timings, Walls, assemble
from serving import wire
from serving.detokenizer import Detokenizer
from serving.errors import (
    DeadlineExceeded,
    InternalError,
    PlanRejected,
    ServiceError,
    StreamInterrupted,
    Unavailable,
)
from serving.keep_plan import check_plan
from serving.sampling_settings import Stops

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnServices:
    """What turns work with."""

    scorer: Scorer
    target: Target
    encoder: PromptEncoder
    tokenizer: Tokenizer
    end_token_ids: frozenset[int]
    releases: Releases
    clock: Callable[[], float]
    score_s_max: float
    deadline_margin_s: float


@dataclass(slots=True)
class _Progressed:
    """What a turn knows so far."""

    queue_s: float = 0.0
    tokenise_s: float = 0.0
    plan_s: float = 0.0
    score_s: float = 0.0
    target_s: float = 0.0
    decision: Decision = field(default_factory=lambda: dense(Reason.DISABLED))
    scored: Scored | None = None
    first_token_at: float | None = None
    first_token_times: TargetTimes | None = None
    tokens_sent: int = 0


class Turn:
    """One turn, used once: either events() or explain()."""

    def __init__(
        self,
        request: TurnRequest,
        *,
        services: TurnServices,
        target: TargetFacts,
        arrived_at: float,
        deadline_at: float,
    ) -> None:
        """arrived_at, deadline_at: on the services' clock."""
        self.request = request
        self.deadline_at = deadline_at
        self.phase = TurnPhase.QUEUE
        self._services = services
        self._target = target
        self._arrived_at = arrived_at
        self._so_far = _Progressed()

    def admitted(self, queue_s: float) -> None:
        """The turn got its place after waiting this long."""
        self._so_far.queue_s = queue_s

    async def events(self) -> AsyncGenerator[TurnEvent, None]:
        """The turn's events, as they come. Closing the generator stops the work everywhere."""
        prompt = await self._tokenise()
        yield TurnStarted(prompt.tokens, prompt.protected_head_tokens)
        async with aclosing(self._score(prompt, include_importance=False)) as scoring:
            async for progress in scoring:
                yield progress
        async with aclosing(self._generate(prompt)) as generation:
            async for event in generation:
                yield event

    async def explain(self) -> Explanation:
        """Decide and score, nothing more."""
        prompt = await self._tokenise()
        async with aclosing(self._score(prompt, include_importance=True)) as scoring:
            async for _ in scoring:
                pass
        return Explanation(
            prompt=prompt,
            decision=self._so_far.decision,
            scored=self._so_far.scored,
            counts=self._counts(prompt, None),
            timings=self._timings(),
        )

    async def _tokenise(self) -> Prompt:
        self.phase = TurnPhase.TOKENISE
        started_at = self._services.clock()
        prompt = await asyncio.to_thread(
            self._services.encoder.encode,
            self.request.source,
            tokens_max=self._target.model.positions_max,
        )
        # Now that the prompt's length is known.
        wire.spans_from(
            self.request.protected_spans, prompt.tokens, field="prefill.protected_spans"
        )
        self._so_far.tokenise_s = self._services.clock() - started_at
        return prompt

    async def _score(
        self, prompt: Prompt, *, include_importance: bool
    ) -> AsyncGenerator[Progress, None]:
        """Decide, and score if the decision is sparse; a scorer that fails changes the decision."""
        self._plan(prompt)
        if self._so_far.decision.path is not Path.SPARSE:
            return
        self.phase = TurnPhase.SCORE
        call = ScoreCall(
            request_id=self.request.request_id,
            prompt_ids=prompt.token_ids,
            settings=self.request.plan,
            protected_head_tokens=prompt.protected_head_tokens,
            protected_spans=self.request.protected_spans,
            include_importance=include_importance,
        )
        timeout_s = min(self._timeout_s(), self._services.score_s_max)
        started_at = self._services.clock()
        try:
            async with aclosing(self._services.scorer.score(call, timeout_s=timeout_s)) as events:
                async for event in events:
                    if isinstance(event, Scored):
                        self._so_far.scored = event
                    else:
                        yield event
            self._check_plan(prompt)
        except ServiceError as error:
            self._so_far.decision = dense(reason_of(error))
            # Nothing is reported of a plan that was refused.
            self._so_far.scored = None
            log.warning(
                "scoring_failed",
                request_id=self.request.request_id,
                error=type(error).__name__,
                reason=self._so_far.decision.reason.name,
            )
        finally:
            self._so_far.score_s = self._services.clock() - started_at

    def _plan(self, prompt: Prompt) -> None:
        started_at = self._services.clock()
        self._so_far.decision = plan_turn(
            mode=self.request.mode,
            prompt_tokens=prompt.tokens,
            # The target caches no prefix yet.
            target_uncached_tokens=prompt.tokens,
            threshold_tokens=self.request.threshold_tokens,
            settings=self.request.plan,
            scorer=self._services.scorer.facts,
            target_tokenizer_digest=self._target.model.tokenizer_digest,
        )
        self._so_far.plan_s = self._services.clock() - started_at

    def _check_plan(self, prompt: Prompt) -> None:
        """The target would refuse a plan that does not fit, and then it is too late to go dense."""
        if self._so_far.scored is None:
            raise InternalError("the scorer ended without a result")
        check_plan(
            self._so_far.scored.plan,
            prompt_tokens=prompt.tokens,
            protected_head_tokens=prompt.protected_head_tokens,
            protected_spans=self.request.protected_spans,
        )
        if self._so_far.scored.plan.settings != self.request.plan:
            raise PlanRejected("the keep plan was made under other settings")

    async def _generate(self, prompt: Prompt) -> AsyncGenerator[TurnEvent, None]:
        self.phase = TurnPhase.PREFILL
        timeout_s = self._timeout_s()
        call = self._generate_call(prompt)
        started_at = self._services.clock()
        reply = _Reply(self._services, self.request.stops)
        try:
            stream = self._services.target.generate(call, timeout_s=timeout_s)
            async with aclosing(stream) as events:
                async for event in events:
                    for told in self._told(event, reply, prompt, started_at):
                        yield told
        except Unavailable as error:
            raise self._interrupted(error) from error
        finally:
            self._services.releases.release(call.handle)

    def _generate_call(self, prompt: Prompt) -> GenerateCall:
        is_sparse = self._so_far.decision.path is Path.SPARSE
        assert not is_sparse or self._so_far.scored is not None
        plan = self._so_far.scored.plan if is_sparse and self._so_far.scored else None
        return GenerateCall(
            request_id=self.request.request_id,
            handle=str(uuid.uuid4()),
            prompt_ids=prompt.token_ids,
            plan=plan,
            protected_head_tokens=prompt.protected_head_tokens,
            protected_spans=self.request.protected_spans,
            sampling=self.request.sampling,
            stops=self.request.stops,
        )

    def _told(
        self, event: GenerateEvent, reply: _Reply, prompt: Prompt, started_at: float
    ) -> Sequence[TurnEvent]:
        """What the client is told of one event of the target."""
        if isinstance(event, Restored):
            return ()
        if isinstance(event, Progress):
            return (event,)
        now = self._services.clock()
        if self._so_far.first_token_at is None:
            self._first_token(event, now, started_at)
        if isinstance(event, Tokens):
            self._so_far.tokens_sent += len(event.token_ids)
            return (reply.delta(event.token_ids, now),)
        rest = reply.rest()
        return (*rest, self._finished(event, prompt))

    def _first_token(self, event: Tokens | Generated, now: float, started_at: float) -> None:
        """A reply may end with its very first token, which is then never sent."""
        self.phase = TurnPhase.DECODE
        self._so_far.first_token_at = now
        self._so_far.target_s = now - started_at
        self._so_far.first_token_times = (
            event.first_token_times if isinstance(event, Tokens) else event.times
        )

    def _finished(self, generated: Generated, prompt: Prompt) -> TurnFinished:
        decision = self._so_far.decision
        if generated.sparse != (decision.path is Path.SPARSE):
            raise InternalError("the target did not prefill as it was told")
        scored = self._so_far.scored
        return TurnFinished(
            finish_reason=generated.finish_reason,
            matched_stop_string=generated.matched_stop_string,
            matched_stop_token_id=generated.matched_stop_token_id,
            decision=decision,
            counts=self._counts(prompt, generated),
            timings=self._timings(),
            plan=None if scored is None else scored.plan,
        )

    def _counts(self, prompt: Prompt, generated: Generated | None) -> Counts:
        counts = Counts(
            prompt_tokens=prompt.tokens, protected_head_tokens=prompt.protected_head_tokens
        )
        if (scored := self._so_far.scored) is not None:
            counts = replace(
                counts,
                draft_restored_tokens=scored.restored_tokens,
                draft_prefilled_tokens=scored.prefilled_tokens,
                scored_tokens=prompt.tokens,
                selected_tokens=scored.plan.kept_tokens,
                queries=scored.queries,
            )
        if generated is not None:
            counts = replace(
                counts,
                target_dense_restored_tokens=generated.dense_restored_tokens,
                target_sparse_restored_tokens=generated.sparse_restored_tokens,
                executed_tokens=generated.executed_tokens,
                completion_tokens=generated.completion_tokens,
            )
        return counts

    def _timings(self) -> Timings:
        """The turn so far; without a first token it counts as one that comes now."""
        so_far = self._so_far
        now = self._services.clock()
        first_token_at = now if so_far.first_token_at is None else so_far.first_token_at
        walls = Walls(
            queue_s=so_far.queue_s,
            tokenise_s=so_far.tokenise_s,
            plan_s=so_far.plan_s,
            score_s=so_far.score_s,
            target_s=so_far.target_s,
            first_token_s=first_token_at - self._arrived_at,
            total_s=now - self._arrived_at,
        )
        scored_times = None if so_far.scored is None else so_far.scored.times
        return assemble(walls, scored_times, so_far.first_token_times)

    def _timeout_s(self) -> float:
        """Seconds a service may take, so that its error still reaches our caller in time."""
        left_s = self.deadline_at - self._services.clock() - self._services.deadline_margin_s
        if left_s <= 0:
            raise DeadlineExceeded(f"the deadline expired before {self.phase.value}")
        return left_s

    def _interrupted(self, error: Unavailable) -> ServiceError:
        """Before the first token the request can be sent again; after it, the answer is torn."""
        if self._so_far.tokens_sent == 0:
            return error
        return StreamInterrupted(
            f"the target went away after {self._so_far.tokens_sent} tokens",
            metadata={"tokens_sent": str(self._so_far.tokens_sent)},
        )


class _Reply:
    """Text of the reply without what ended it, and the time since the tokens before."""

    def __init__(self, services: TurnServices, stops: Stops) -> None:
        self._detokenizer = Detokenizer(services.tokenizer, stop_strings=stops.stop_strings)
        end_ids = frozenset() if stops.ignore_end_tokens else services.end_token_ids
        self._without_text = stops.stop_token_ids | end_ids
        self._last_at: float | None = None

    def delta(self, token_ids: tuple[int, ...], now: float) -> Delta:
        gap_s = None if self._last_at is None else now - self._last_at
        self._last_at = now
        with_text = [i for i in token_ids if i not in self._without_text]
        return Delta(self._detokenizer.push(with_text), token_ids, gap_s)

    def rest(self) -> Sequence[Delta]:
        """What was held back: nothing, or one delta without tokens."""
        text = self._detokenizer.finish()
        return (Delta(text, (), None),) if text else ()
