"""Rotary position embedding: inverse frequencies of each kind, and the rotation.

Formulas: RoPE (arXiv 2104.09864), linear interpolation (arXiv 2306.15595), YaRN (arXiv 2309.00071)
and the smoothed scaling of Llama 3.1. The order of operations is that of transformers, so that
float32 tables are equal to its tables bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

RopeKind = Literal["default", "linear", "llama3", "yarn", "divided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Which frequencies to use.

    original_positions: positions the model was first trained on (llama3, yarn).
    attention_factor: multiplies cos and sin (yarn).
    divisors: one per frequency (divided: GGUF files of Llama 3 carry the scaling as a tensor).
    """

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    divisors: tuple[float, ...] = ()


class Angles(NamedTuple):
    """Of the tokens of one forward: [tokens, 1, head_dim / 2] float32, or float64."""

    cos: Tensor
    sin: Tensor


class Rope:
    """cos and sin of any positions, in float32, or in float64 for a float64 model."""

    def __init__(
        self, config: RopeConfig, *, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._frequencies = inverse_frequencies(config, head_dim, wide).to(device)
        self._attention_factor = config.attention_factor

    def angles(self, positions: Tensor) -> Angles:
        """positions: [tokens] int64."""
        angles = positions.to(self._frequencies.dtype)[:, None, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._attention_factor != 1.0:
            cos, sin = cos * self._attention_factor, sin * self._attention_factor
        return Angles(cos, sin)


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """x: [tokens, heads, head_dim]. Returns like x, computed in the angles' dtype.

    The first half of a head's dimensions pairs with the second half.
    """
    cos, sin = angles
    wide = x.to(cos.dtype)
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.empty(wide.shape, dtype=wide.dtype, device=wide.device)
    low, high = rotated.chunk(2, dim=-1)
    torch.mul(first, cos, out=low).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=high).addcmul_(first, sin)
    return rotated.to(x.dtype)


def inverse_frequencies(config: RopeConfig, head_dim: int, dtype: torch.dtype) -> Tensor:
    """[head_dim / 2] dtype, on the CPU: radians per position."""
    wavelengths = config.theta ** (torch.arange(0, head_dim, 2, dtype=dtype) / head_dim)
    plain = 1.0 / wavelengths
    match config.kind:
        case "default":
            return plain
        case "linear":
            return plain / config.factor
        case "llama3":
            return _llama3(config, plain)
        case "yarn":
            return _yarn(config, wavelengths)
        case "divided":
            return plain / torch.tensor(config.divisors, dtype=dtype)


def yarn_attention_factor(
    factor: float, *, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """The temperature of YaRN's attention, as a factor on cos and sin."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Short waves stay, long waves are stretched, those between are blended."""
    wavelengths = 2 * math.pi / plain
    longest_kept = config.original_positions / config.high_freq_factor
    shortest_stretched = config.original_positions / config.low_freq_factor
    scaled = torch.where(wavelengths > shortest_stretched, plain / config.factor, plain)
    smooth = (config.original_positions / wavelengths - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    blended = (1 - smooth) * scaled / config.factor + smooth * scaled
    between = (wavelengths >= longest_kept) & (wavelengths <= shortest_stretched)
    return torch.where(between, blended, scaled)


def _yarn(config: RopeConfig, wavelengths: Tensor) -> Tensor:
    """Dimensions that turn often keep their frequency, those that turn rarely are interpolated."""
    half = wavelengths.shape[0]
    low, high = _yarn_range(config, head_dim=2 * half)
    ramp = torch.arange(half, dtype=wavelengths.dtype)
    kept = 1 - ((ramp - low) / (high - low)).clamp(0, 1)
    interpolated = 1.0 / (config.factor * wavelengths)
    return interpolated * (1 - kept) + (1.0 / wavelengths) * kept


def _yarn_range(config: RopeConfig, *, head_dim: int) -> tuple[float, float]:
    """First and last dimension of the ramp between kept and interpolated frequencies."""

    def dimension(turns: float) -> float:
        ratio = config.original_positions / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high + 0.001 if low == high else high
