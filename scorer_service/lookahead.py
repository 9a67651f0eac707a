"""Queries that score a prompt: tapped out of forwards, and the lookahead that makes them.

Lookahead tokens are thrown away: their keys lie behind the prompt's in the draft sequence only
while the lookahead runs, and never in a page that anybody shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention import SequenceAttend, Tap, begin_forward
from engine.decoder import Decoder
from engine.kv_cache import PagedKvCache
from engine.sampling import Sampler
from serving.keep_plan import PlanSettings
from serving.sampling_settings import Sampling

Choose = Callable[[Tensor], Tensor]


class QueryTap:
    """Collects queries, layer by layer, over any number of forwards."""

    def __init__(self, layers: int) -> None:
        self._pieces: list[list[Tensor]] = [[] for _ in range(layers)]

    def from_row(self, first: int) -> Tap:
        """A tap for one forward that takes its rows from `first` on."""

        def tap(q: Tensor, layer: int) -> None:
            # A copy: the rows must not keep the whole prefill chunk's queries alive.
            self._pieces[layer].append(q[first:].clone())

        return tap

    def layer(self, layer: int) -> Tensor:
        """One layer's queries in order: [queries, q_heads, head_dim], post-RoPE."""
        return torch.cat(self._pieces[layer])


class Lookahead:
    """The last prompt token and the tokens decoded after it, for their queries."""

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedKvCache,
        sequence: int,
        *,
        last_token_id: int,
        settings: PlanSettings,
    ) -> None:
        """sequence: holds all prompt tokens but the last one, whose id is `last_token_id`."""
        self._decoder = decoder
        self._cache = cache
        self._sequence = sequence
        self._prompt_tokens = cache.length(sequence) + 1
        self._next = torch.tensor([last_token_id], dtype=torch.int64, device=decoder.device)
        self._queries_max = settings.lookahead_tokens
        self._choose = _chooser(settings)
        self._decoded: list[Tensor] = []
        self.tap = QueryTap(decoder.shape.layers)

    def steps(self) -> Iterator[int]:
        """One token a step; yields the queries there are. Afterwards the sequence is the prompt.

        Tokens stay on the device, and no step waits for them: `queries` finds an end token.
        """
        try:
            for done in range(1, self._queries_max):
                self._decode()
                yield done
            self._fill()
        finally:
            self._cache.truncate(self._sequence, self._prompt_tokens)
        assert self._cache.length(self._sequence) == self._prompt_tokens
        yield self._queries_max

    def queries(self, end_token_ids: frozenset[int]) -> int:
        """Queries that count: j if decoded token j (from 1) is an end token, else all of them."""
        decoded = torch.cat(self._decoded).tolist() if self._decoded else []
        return effective_queries(decoded, end_token_ids)

    def _decode(self) -> None:
        """Run the next token and choose the one after it."""
        ids, positions, attend = self._forward()
        hidden = self._decoder(ids, positions, attend)
        self._next = self._choose(self._decoder.logits(hidden))
        self._decoded.append(self._next)

    def _fill(self) -> None:
        """Run the last token: only its queries are wanted."""
        self._decoder.fill(*self._forward())

    def _forward(self) -> tuple[Tensor, Tensor, SequenceAttend]:
        position = np.array([self._cache.length(self._sequence)], dtype=np.int64)
        attend = begin_forward(self._cache, [(self._sequence, position)], tap=self.tap.from_row(0))
        return self._next, torch.from_numpy(position).to(self._decoder.device), attend


def effective_queries(decoded: Sequence[int], end_token_ids: frozenset[int]) -> int:
    """Queries that count if these tokens were decoded after the last prompt token."""
    for number, token_id in enumerate(decoded, start=1):
        if token_id in end_token_ids:
            return number
    return len(decoded) + 1


def _chooser(settings: PlanSettings) -> Choose:
    """logits [1, vocab] -> token id int64 [1], on the logits' device."""
    if settings.lookahead_temperature == 0.0:
        return lambda logits: logits.argmax(dim=-1)
    sampler = Sampler(
        Sampling(temperature=settings.lookahead_temperature, seed=settings.lookahead_seed)
    )
    return lambda logits: torch.tensor([sampler.next(logits[0])], device=logits.device)
