"""An Attend that is obviously right and shares nothing with the engine's: lists and a softmax."""

from __future__ import annotations

import torch
from torch import Tensor


class PlainAttend:
    """Keeps keys and values of one sequence, every forward's after the last one's.

    `stored`: layers whose attention was skipped.
    """

    def __init__(self) -> None:
        self.keys: dict[int, list[Tensor]] = {}
        self.values: dict[int, list[Tensor]] = {}
        self.stored: list[int] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """A token attends to the slots of its layer up to its own."""
        self._append(k, v, layer)
        keys, values = torch.stack(self.keys[layer]), torch.stack(self.values[layer])
        first = len(keys) - len(q)
        rows = [
            _attend_one(row, keys[: first + index + 1], values[: first + index + 1])
            for index, row in enumerate(q)
        ]
        return torch.stack(rows)

    def store(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> None:
        self._append(k, v, layer)
        self.stored.append(layer)

    def _append(self, k: Tensor, v: Tensor, layer: int) -> None:
        self.keys.setdefault(layer, []).extend(k)
        self.values.setdefault(layer, []).extend(v)


def _attend_one(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q: [q_heads, head_dim]; keys, values: [slots, kv_heads, head_dim]."""
    group = q.shape[0] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("hd,shd->hs", q, keys) / q.shape[1] ** 0.5
    return torch.einsum("hs,shd->hd", scores.softmax(dim=-1), values)
