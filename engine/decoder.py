"""The contract between a model's forward, the KV cache and attention; and the lean decoder behind it.

Tokens are packed: there is no batch axis. Positions are always passed, never derived: after a sparse
prefill they have gaps, and only the caller knows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    positions_max: int


class Attend(Protocol):
    """Attention of one forward. Owns KV writes, causality and taps; one object per forward."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Store k and v of these tokens, then attend.

        q: [tokens, q_heads, head_dim]; k, v: [tokens, kv_heads, head_dim]; all post-RoPE.
        Returns [tokens, q_heads, head_dim] in q's dtype.
        """
        ...

    def store(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> None:
        """The same writes and taps, without the attention: for the last layer of a fill."""
        ...


class Decoder(Protocol):
    shape: ModelShape

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids, positions: [tokens] int64. Returns hidden [tokens, hidden], final norm applied."""
        ...

    def fill(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> None:
        """Write every layer's KV of these tokens and nothing more: nobody will read their hidden state.

        Skips the last layer's attention, output projection and MLP (attend.store is called there).
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, vocab]."""
        ...
