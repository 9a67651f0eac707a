"""Sampling against a distribution written down separately, in plain Python."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling import Sampler, distribution, drawn
from serving.errors import InternalError
from serving.sampling_settings import Sampling

LOGITS = torch.tensor([1.0, 3.0, 2.0, 3.0, -1.0])


def plain_distribution(logits: list[float], sampling: Sampling) -> list[float]:
    """Sort, cut, renormalise: the textbook, one token at a time."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    best = max(logits)
    mass = {t: math.exp((logits[t] - best) / sampling.temperature) for t in ranked}
    total = math.fsum(mass.values())
    kept, reached = [], 0.0
    for token in ranked:
        kept.append(token)
        reached += mass[token] / total
        if reached >= sampling.top_p:
            break
    kept_total = math.fsum(mass[t] for t in kept)
    return [mass[t] / kept_total if t in kept else 0.0 for t in range(len(logits))]


# Eighths make equal logits likely; no sum of such masses hits one of the top_p exactly.
@given(
    eighths=st.lists(st.integers(-40, 40), min_size=1, max_size=30),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.integers(0, 35),
    top_p=st.sampled_from([0.0123, 0.2371, 0.5432, 0.8765, 0.9531, 1.0]),
)
def test_the_distribution_equals_the_textbook(
    eighths: list[int], temperature: float, top_k: int, top_p: float
) -> None:
    logits = [eighth / 8 for eighth in eighths]
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    got = distribution(np.array(logits), sampling)
    assert got.tolist() == pytest.approx(plain_distribution(logits, sampling), abs=1e-12)
    assert got.sum() == pytest.approx(1.0)


def test_greedy_takes_the_largest_and_of_equals_the_lowest_id() -> None:
    assert Sampler(Sampling()).next(LOGITS) == 1


def test_greedy_ignores_the_other_settings() -> None:
    assert Sampler(Sampling(temperature=0.0, top_k=3, top_p=0.1, seed=5)).next(LOGITS) == 1


def test_top_k_one_is_greedy_at_any_temperature() -> None:
    sampler = Sampler(Sampling(temperature=5.0, top_k=1, seed=0))
    assert {sampler.next(LOGITS) for _ in range(50)} == {1}


def test_a_tiny_top_p_still_leaves_one_token() -> None:
    sampler = Sampler(Sampling(temperature=1.0, top_p=1e-9, seed=0))
    assert {sampler.next(LOGITS) for _ in range(50)} == {1}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    halves = np.log(np.array([0.125, 0.5, 0.25, 0.125]))
    for top_p, kept in ((0.5, [1]), (0.51, [1, 2]), (0.75, [1, 2]), (0.76, [0, 1, 2])):
        chances = distribution(halves, Sampling(temperature=1.0, top_p=top_p))
        assert chances.nonzero()[0].tolist() == kept


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    sampler = Sampler(Sampling(temperature=1e-308, seed=3))
    assert sampler.next(torch.tensor([-1e30, 4.0, 5.0])) == 2


def test_draws_follow_the_distribution() -> None:
    sampling = Sampling(temperature=0.8, top_k=4, top_p=0.97, seed=11)
    want = plain_distribution(LOGITS.tolist(), sampling)
    sampler, draws = Sampler(sampling), 4000
    counts = Counter(sampler.next(LOGITS) for _ in range(draws))
    for token, chance in enumerate(want):
        deviation = math.sqrt(chance * (1 - chance) / draws)
        assert abs(counts[token] / draws - chance) <= 5 * deviation


@pytest.mark.parametrize("seed", [0, 7, 2**63, 2**64 - 1])
def test_a_seed_repeats_its_draws(seed: int) -> None:
    logits = torch.randn(40, 100, generator=torch.Generator().manual_seed(1))
    runs = [
        [sampler.next(row) for row in logits]
        for sampler in (Sampler(Sampling(temperature=1.0, seed=seed)) for _ in range(2))
    ]
    assert runs[0] == runs[1]


def test_other_seeds_and_no_seed_draw_something_else() -> None:
    logits = torch.zeros(1000)
    samplers = [Sampler(Sampling(temperature=1.0, seed=seed)) for seed in (1, 2, None, None)]
    runs = {tuple(sampler.next(logits) for _ in range(10)) for sampler in samplers}
    assert len(runs) == 4


def test_a_draw_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    Sampler(Sampling(temperature=1.0, seed=1)).next(LOGITS)
    Sampler(Sampling(temperature=1.0)).next(LOGITS)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_inverse_never_selects_an_excluded_token() -> None:
    chances = np.array([0.0, 0.5, 0.0, 0.5, 0.0])
    assert [drawn(chances, u) for u in (0.0, 0.4999, 0.5, 1.0 - 2**-53)] == [1, 1, 3, 3]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad: float, temperature: float) -> None:
    with pytest.raises(InternalError):
        Sampler(Sampling(temperature=temperature)).next(torch.tensor([0.0, bad]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_any_float_dtype_is_drawn_from_in_float64(dtype: torch.dtype) -> None:
    logits = LOGITS.to(dtype)  # Exact in all of them.
    drawn_here = [Sampler(Sampling(temperature=1.0, seed=s)).next(logits) for s in range(20)]
    assert drawn_here == [
        Sampler(Sampling(temperature=1.0, seed=s)).next(LOGITS) for s in range(20)
    ]
