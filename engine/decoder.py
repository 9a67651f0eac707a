"""The contract between a model's forward, the KV cache and attention; and the lean decoder.

Tokens are packed: there is no batch axis. Positions are always passed, never derived: after a
sparse prefill they have gaps, and only the caller knows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.model_config import DecoderConfig, ModelShape
from engine.rope import Angles, Rope, rotate

__all__ = ["Attend", "Decoder", "DecoderWeights", "LayerWeights", "LeanDecoder", "ModelShape"]


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
    device: torch.device
    dtype: torch.dtype

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden state, norm applied.

        token_ids, positions: [tokens] int64. Returns [tokens, hidden].
        """
        ...

    def fill(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> None:
        """Write every layer's KV of these tokens and nothing more: nobody reads their hidden state.

        Skips the last layer's attention, output projection and MLP (attend.store is called there).
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, vocab]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Rows of `qkv`: all q heads, all k heads, all v heads; of `gate_up`: gate, up.

    input_norm, mlp_norm: [hidden]; qkv: [(q_heads + 2 kv_heads) head_dim, hidden]; qkv_bias: its
    rows; q_norm, k_norm: [head_dim]; output: [hidden, q_heads head_dim]; gate_up:
    [2 intermediate, hidden]; down: [hidden, intermediate].
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """embedding, head: [vocab, hidden] (one tensor if tied); final_norm: [hidden]."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor


class LeanDecoder:
    """Llama, Mistral without window, Qwen2 and Qwen3 dense: four matrix products a layer.

    Norms and RoPE are computed in float32, or in float64 for float64 weights.
    """

    def __init__(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        assert len(weights.layers) == config.shape.layers
        self.shape = config.shape
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self._config = config
        self._weights = weights
        self._rope = Rope(
            config.rope, head_dim=config.shape.head_dim, dtype=self.dtype, device=self.device
        )

    @torch.inference_mode()
    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden, angles = self._enter(token_ids, positions)
        for layer in range(self.shape.layers):
            self._add_layer(layer, hidden, angles, attend=attend)
        return self._norm(hidden, self._weights.final_norm)

    @torch.inference_mode()
    def fill(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> None:
        hidden, angles = self._enter(token_ids, positions)
        last = self.shape.layers - 1
        for layer in range(last):
            self._add_layer(layer, hidden, angles, attend=attend)
        attend.store(*self._qkv(self._weights.layers[last], hidden, angles), last)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self._weights.head)

    def _enter(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Angles]:
        assert token_ids.ndim == 1
        assert token_ids.shape == positions.shape
        angles = self._rope.angles(positions)
        return functional.embedding(token_ids, self._weights.embedding), angles

    def _add_layer(self, layer: int, hidden: Tensor, angles: Angles, *, attend: Attend) -> None:
        """Adds the layer's two residual branches to `hidden`, in place."""
        w = self._weights.layers[layer]
        attended = attend(*self._qkv(w, hidden, angles), layer)
        hidden += functional.linear(attended.reshape(hidden.shape[0], -1), w.output)
        gate, up = functional.linear(self._norm(hidden, w.mlp_norm), w.gate_up).chunk(2, dim=-1)
        hidden += functional.linear(functional.silu(gate).mul_(up), w.down)

    def _qkv(
        self, w: LayerWeights, hidden: Tensor, angles: Angles
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q: [tokens, q_heads, head_dim]; k, v: [tokens, kv_heads, head_dim]; q and k rotated."""
        shape = self.shape
        fused = functional.linear(self._norm(hidden, w.input_norm), w.qkv, w.qkv_bias)
        heads = fused.view(hidden.shape[0], -1, shape.head_dim)
        qk, v = heads.split((shape.q_heads + shape.kv_heads, shape.kv_heads), dim=1)
        if w.q_norm is not None and w.k_norm is not None:
            q, k = qk.split((shape.q_heads, shape.kv_heads), dim=1)
            qk = torch.cat((self._norm(q, w.q_norm), self._norm(k, w.k_norm)), dim=1)
        q, k = rotate(qk, angles).split((shape.q_heads, shape.kv_heads), dim=1)
        return q, k, v

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._config.norm_eps)
