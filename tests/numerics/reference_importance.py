"""Importance in the obvious order, everything materialised in float64; shares nothing with ours."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_importance(q: Tensor, k: Tensor, *, visible: list[int], pool_tokens: int) -> Tensor:
    """q: [layers, queries, q_heads, head_dim]; k: [layers, tokens, kv_heads, head_dim].

    visible: prompt tokens that each query sees. Returns float64 [tokens].
    """
    group = q.shape[2] // k.shape[2]
    keys = k.double().repeat_interleave(group, dim=2)
    scores = torch.einsum("lqhd,lthd->lhqt", q.double(), keys) / q.shape[3] ** 0.5
    for query, seen in enumerate(visible):
        scores[:, :, query, seen:] = -torch.inf
    probabilities = scores.softmax(dim=-1)
    half = pool_tokens // 2
    padded = torch.nn.functional.pad(probabilities, (half, half))
    pooled = padded.unfold(-1, pool_tokens, 1).sum(dim=-1) / pool_tokens
    best = pooled.flatten(0, 1).amax(dim=0)
    return best.mean(dim=0)
