"""Decoding: one token a step at positions M, M+1, ..., and the decision when the reply is over."""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import Tokenizer

from engine.decoder import Decoder
from engine.kv_cache import PagedKvCache
from engine.sampling import Sampler
from serving.detokenizer import Detokenizer
from serving.finish import FinishReason
from serving.sampling_settings import Stops
from target_service.prefill import forward_token


class Reply:
    """The tokens sampled so far and why they end.

    An end token or stop token is the last of them, and is no part of the reply's text. Where
    several reasons hold at once, the first of FinishReason counts. tokens_max: how long it can
    get; its last token needs no position, for it is never run.
    """

    def __init__(
        self,
        stops: Stops,
        *,
        end_token_ids: frozenset[int],
        prompt_tokens: int,
        positions_max: int,
        tokenizer: Tokenizer,
    ) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.matched_token_id: int | None = None
        self._stops = stops
        self._end_token_ids = frozenset() if stops.ignore_end_tokens else end_token_ids
        self.tokens_max = min(stops.max_tokens, positions_max - prompt_tokens + 1)
        self._detokenizer = (
            Detokenizer(tokenizer, stop_strings=stops.stop_strings) if stops.stop_strings else None
        )

    @property
    def matched_stop_string(self) -> str | None:
        return self._detokenizer.matched_stop if self._detokenizer else None

    def add(self, token_id: int) -> None:
        """Take the next sampled token and decide whether it is the last."""
        assert self.finish_reason is None
        self.token_ids.append(token_id)
        self.finish_reason = self._reason_to_stop(token_id)

    def _reason_to_stop(self, token_id: int) -> FinishReason | None:
        if token_id in self._end_token_ids:
            self.matched_token_id = token_id
            return FinishReason.END_TOKEN
        if token_id in self._stops.stop_token_ids:
            self.matched_token_id = token_id
            return FinishReason.STOP_TOKEN
        if self._completes_stop_string(token_id):
            return FinishReason.STOP_STRING
        if len(self.token_ids) == self._stops.max_tokens:
            return FinishReason.MAX_TOKENS
        if len(self.token_ids) == self.tokens_max:
            return FinishReason.CONTEXT_END
        return None

    def _completes_stop_string(self, token_id: int) -> bool:
        if self._detokenizer is None:
            return False
        self._detokenizer.push([token_id])
        if len(self.token_ids) == self.tokens_max:
            # What was held back as unfinished is final now.
            self._detokenizer.finish()
        return self._detokenizer.matched_stop is not None


def decode(
    decoder: Decoder,
    cache: PagedKvCache,
    sequence: int,
    *,
    reply: Reply,
    sampler: Sampler,
    prompt_tokens: int,
) -> Iterator[int]:
    """Run the newest token, sample and add the next, until the reply is over; yields each."""
    while reply.finish_reason is None:
        token_id = next_token(
            decoder,
            cache,
            sequence,
            sampler=sampler,
            token_id=reply.token_ids[-1],
            position=prompt_tokens + len(reply.token_ids) - 1,
        )
        reply.add(token_id)
        yield token_id


def next_token(
    decoder: Decoder,
    cache: PagedKvCache,
    sequence: int,
    *,
    sampler: Sampler,
    token_id: int,
    position: int,
) -> int:
    """Run one token, the kick-off included, and sample the one after it.

    Raises InternalError for logits that are not finite: this request fails, others go on.
    """
    logits = forward_token(decoder, cache, sequence, token_id=token_id, position=position)
    return sampler.next(logits)
