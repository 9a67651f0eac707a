"""How much a few queries attend to each prompt token, streamed layer by layer.

Softmax over the prompt's keys, average-pool along tokens, maximum over (layer, head), mean over
queries: the order is fixed. Only one block of one layer's probabilities exists at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.decoder import ModelShape
from serving.errors import NonFiniteImportance

# Probabilities of one block of kv heads: they fit a CPU's cache, or fill a GPU.
BLOCK_BYTES_MAX = {"cpu": 2**20, "cuda": 2**28}


class RunningImportance:
    """The running maximum over the layers added so far, for one prompt and one set of queries."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        visible_tokens: Sequence[int],
        prompt_tokens: int,
        pool_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """visible_tokens: for each query, how many leading prompt tokens it may attend to.

        dtype: the model's; sums are float32, or float64 for a float64 model.
        """
        assert pool_tokens % 2 == 1
        assert all(1 <= visible <= prompt_tokens for visible in visible_tokens)
        self._shape = shape
        self._queries = len(visible_tokens)
        self._tokens = prompt_tokens
        self._pool_tokens = pool_tokens
        self._dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._maximum = torch.zeros(self._queries, prompt_tokens, dtype=self._dtype, device=device)
        self._first_hidden = min(visible_tokens)
        columns = torch.arange(self._first_hidden, prompt_tokens)
        self._hidden = (columns >= torch.tensor(visible_tokens)[:, None]).to(device)
        self._heads_per_block = self._block_heads(device)
        half = pool_tokens // 2
        rows = shape.q_heads // shape.kv_heads * self._queries
        block = (self._heads_per_block, rows)
        self._scores = torch.empty(*block, prompt_tokens, dtype=self._dtype, device=device)
        self._pooled = torch.empty_like(self._scores)
        # The zero padding of the pool on both sides of the probabilities.
        self._padded = torch.zeros(
            *block, prompt_tokens + 2 * half, dtype=self._dtype, device=device
        )

    def add_layer(self, q: Tensor, keys: Sequence[Tensor]) -> None:
        """Take one layer's heads into the maximum.

        q: [queries, q_heads, head_dim]; keys: pieces [kv_heads, tokens, head_dim] that together
        are the prompt's keys in order; both post-RoPE, in the model's dtype.
        """
        shape = self._shape
        assert q.shape == (self._queries, shape.q_heads, shape.head_dim)
        assert sum(piece.shape[1] for piece in keys) == self._tokens
        # Rows of a kv head are its group's heads times the queries, so that its keys are read once.
        rows = q.to(self._dtype).transpose(0, 1) * shape.head_dim**-0.5
        rows = rows.reshape(shape.kv_heads, -1, shape.head_dim)
        for heads in self._blocks():
            block = heads.stop - heads.start
            self._attend(rows[heads], [piece[heads] for piece in keys], block)
            self._pool(block)
            by_query = self._pooled[:block].view(-1, self._queries, self._tokens)
            torch.maximum(self._maximum, by_query.amax(dim=0), out=self._maximum)

    def finish(self) -> np.ndarray:
        """Mean over the queries: float32 [tokens]. Raises NonFiniteImportance."""
        importance = self._maximum.mean(dim=0).to(torch.float32).cpu().numpy()
        if not np.isfinite(importance).all():
            raise NonFiniteImportance("the draft model's attention has a NaN or infinite value")
        return importance

    def _block_heads(self, device: torch.device) -> int:
        shape = self._shape
        rows = shape.q_heads // shape.kv_heads * self._queries
        head_bytes = rows * self._tokens * self._dtype.itemsize
        budget = BLOCK_BYTES_MAX.get(device.type, BLOCK_BYTES_MAX["cpu"])
        return min(max(budget // head_bytes, 1), shape.kv_heads)

    def _blocks(self) -> Iterator[slice]:
        heads = self._shape.kv_heads
        for start in range(0, heads, self._heads_per_block):
            yield slice(start, min(start + self._heads_per_block, heads))

    def _attend(self, rows: Tensor, keys: Sequence[Tensor], block: int) -> None:
        """Probabilities of some kv heads into the padded buffer. rows: [block, rows, head_dim]."""
        scores, start = self._scores[:block], 0
        for piece in keys:
            end = start + piece.shape[1]
            scores[:, :, start:end] = rows @ piece.to(self._dtype).transpose(1, 2)
            start = end
        tail = scores.view(-1, self._queries, self._tokens)[:, :, self._first_hidden :]
        tail.masked_fill_(self._hidden, -torch.inf)
        half = self._pool_tokens // 2
        self._padded[:block, :, half : half + self._tokens] = torch.softmax(scores, dim=-1)

    def _pool(self, block: int) -> None:
        """Centred mean of pool_tokens, the padding counted: 5 times avg_pool1d's speed on a CPU."""
        pooled = self._pooled[:block]
        pooled.copy_(self._padded[:block, :, : self._tokens])
        for shift in range(1, self._pool_tokens):
            pooled += self._padded[:block, :, shift : shift + self._tokens]
        pooled /= self._pool_tokens
