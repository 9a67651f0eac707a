"""The next token from one row of logits: greedy, or drawn by temperature, top-k and top-p."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from serving.errors import InternalError
from serving.sampling_settings import Sampling


class Sampler:
    """Draws the tokens of one reply; the same seed and logits give the same tokens."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator(device="cpu")
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def next(self, logits: Tensor) -> int:
        """logits: [vocab], any float dtype and device. InternalError if one is not finite."""
        assert logits.ndim == 1
        values = logits.detach().to(device="cpu", dtype=torch.float64).numpy()
        if not np.isfinite(values).all():
            raise InternalError("the model produced logits that are not finite")
        if self._sampling.temperature == 0.0:
            return int(values.argmax())
        chances = distribution(values, self._sampling)
        uniform = torch.rand((), generator=self._generator, dtype=torch.float64).item()
        return drawn(chances, uniform)


def distribution(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Probability of each token, float64 [vocab]: temperature, then top-k, then top-p.

    logits: float64 [vocab], finite. temperature > 0. At equal logits lower ids are kept. top-p
    keeps the smallest set of the likeliest tokens whose probability is at least top_p, and at least
    one.
    """
    with np.errstate(
        over="ignore"
    ):  # A tiny temperature pushes all but the best to -inf, which is right.
        scaled = (logits - logits.max()) / sampling.temperature
    chances = np.exp(scaled)
    if 0 < sampling.top_k < chances.size:
        chances[_outside_largest(logits, sampling.top_k)] = 0.0
    chances /= chances.sum()
    if sampling.top_p < 1.0:
        chances[_outside_nucleus(chances, sampling.top_p)] = 0.0
        chances /= chances.sum()
    return chances


def drawn(chances: np.ndarray, uniform: float) -> int:
    """The token that a uniform number in [0, 1) selects: the cumulative sum's inverse, by id."""
    cumulative = chances.cumsum()
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))


def _outside_largest(values: np.ndarray, count: int) -> np.ndarray:
    """Mask of all but the `count` largest values; of equals at the cut the lower indices stay."""
    cut = np.partition(values, values.size - count)[values.size - count]
    outside = values < cut
    equal = np.flatnonzero(values == cut)
    above = values.size - int(outside.sum()) - equal.size
    outside[equal[count - above :]] = True
    return outside


def _outside_nucleus(chances: np.ndarray, top_p: float) -> np.ndarray:
    """Mask of the tokens that the smallest set with probability top_p does without.

    Tokens below (1 - top_p) / vocab hold less than 1 - top_p together and come last, so only the
    others are sorted.
    """
    candidates = np.flatnonzero(chances >= (1.0 - top_p) / chances.size)
    ranked = candidates[np.argsort(-chances[candidates], kind="stable")]
    needed = int(np.searchsorted(chances[ranked].cumsum(), top_p, side="left")) + 1
    outside = np.ones(chances.size, dtype=bool)
    outside[ranked[:needed]] = False
    return outside
