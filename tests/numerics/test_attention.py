"""Attention over the paged cache against plain float64 attention over lists of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention import (
    RUNS_MAX,
    Segment,
    SequenceAttend,
    attend_all,
    attend_causal,
    begin_forward,
    blocked_part,
    merge,
    reference_attention,
)
from engine.decoder import ModelShape
from engine.kv_cache import PagedKvCache
from serving.errors import KvCacheFull
from tests.tolerances import ATTENTION

PAGE_TOKENS = 16
HEAD_DIM = 8
LAYER = 1
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@dataclass
class Tokens:
    """q: [tokens, q_heads, head_dim]; k, v: [tokens, kv_heads, head_dim]; positions with gaps."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor

    def part(self, start: int, end: int) -> Tokens:
        rows = slice(start, end)
        return Tokens(self.q[rows], self.k[rows], self.v[rows], self.positions[rows])

    def reference(self) -> Tensor:
        return reference_attention(self.q, self.k, self.v, self.positions, self.positions)


def random_tokens(
    tokens: int, *, kv_heads: int, group: int, dtype: torch.dtype, seed: int = 0
) -> Tokens:
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> Tensor:
        shape = (tokens, heads, HEAD_DIM)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    gaps = torch.randint(1, 4, (tokens,), generator=generator)
    return Tokens(draw(kv_heads * group), draw(kv_heads), draw(kv_heads), gaps.cumsum(0))


def cache_for(
    *, kv_heads: int, dtype: torch.dtype, pages: int = 64, page_tokens: int = PAGE_TOKENS
) -> PagedKvCache:
    shape = ModelShape(
        layers=2, q_heads=8, kv_heads=kv_heads, head_dim=HEAD_DIM, hidden=8, vocab=8,
        positions_max=4096,
    )  # fmt: skip
    cache = PagedKvCache(shape, pages=pages, page_tokens=page_tokens, dtype=dtype, device="cpu")
    cache.k.fill_(torch.nan)  # What was never written must never be read.
    cache.v.fill_(torch.nan)
    return cache


def attended(cache: PagedKvCache, parts: Sequence[tuple[int, Tokens]]) -> list[Tensor]:
    """One forward over several sequences; each one's output."""
    attend = begin_forward(cache, [(sequence, t.positions) for sequence, t in parts])
    packed = [torch.cat([getattr(t, name) for _, t in parts]) for name in ("q", "k", "v")]
    out = attend(*packed, LAYER)
    assert out.dtype == packed[0].dtype
    return list(out.split([t.positions.numel() for _, t in parts]))


def in_steps(cache: PagedKvCache, sequence: int, tokens: Tokens, ends: Sequence[int]) -> Tensor:
    starts = [0, *ends[:-1]]
    steps = zip(starts, ends, strict=True)
    return torch.cat([attended(cache, [(sequence, tokens.part(*step))])[0] for step in steps])


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape
    assert (got.double() - want).abs().max().item() <= ATTENTION[dtype]


def test_reference_is_the_average_of_the_values_when_all_keys_are_equal() -> None:
    q, k = torch.ones(2, 1, 4), torch.ones(3, 1, 4)
    v = torch.tensor([1.0, 2.0, 6.0]).view(3, 1, 1).expand(3, 1, 4)
    out = reference_attention(q, k, v, torch.tensor([5, 9]), torch.tensor([2, 5, 9]))
    assert out[:, 0, 0].tolist() == pytest.approx([1.5, 3.0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "group"), [(3, 1), (3, 3), (2, 4), (1, 8)])
@pytest.mark.parametrize("tokens", [1, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, 53])
def test_a_prefill_then_a_decode_equal_the_reference(
    tokens: int, kv_heads: int, group: int, dtype: torch.dtype
) -> None:
    sample = random_tokens(tokens + 1, kv_heads=kv_heads, group=group, dtype=dtype)
    cache = cache_for(kv_heads=kv_heads, dtype=dtype)
    got = in_steps(cache, cache.new_sequence(), sample, [tokens, tokens + 1])
    assert_close(got, sample.reference(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ends", [[101], [40, 101], [1, 2, 3, 60, 61, 101], list(range(1, 102))])
def test_any_prefill_chunks_give_the_same(ends: list[int], dtype: torch.dtype) -> None:
    sample = random_tokens(101, kv_heads=2, group=3, dtype=dtype)
    cache = cache_for(kv_heads=2, dtype=dtype)
    got = in_steps(cache, cache.new_sequence(), sample, ends)
    assert_close(got, sample.reference(), dtype)


@pytest.mark.parametrize("page_tokens", [PAGE_TOKENS, 3])  # 3: more runs than RUNS_MAX
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_physical_runs_equal_the_reference(page_tokens: int, dtype: torch.dtype) -> None:
    cache = cache_for(kv_heads=3, dtype=dtype, pages=240 // page_tokens, page_tokens=page_tokens)
    one, two = cache.new_sequence(), cache.new_sequence()
    scatter(cache)
    samples = [random_tokens(50, kv_heads=3, group=3, dtype=dtype, seed=s) for s in (1, 2)]
    outs: list[list[Tensor]] = [[], []]
    for start, end in ((0, 20), (20, 21), (21, 48), (48, 50)):
        parts = [(seq, s.part(start, end)) for seq, s in zip((one, two), samples, strict=True)]
        for out, got in zip(outs, attended(cache, parts), strict=True):
            out.append(got)
    assert len(cache.runs(one)) > (RUNS_MAX if page_tokens == 3 else 1)
    for out, sample in zip(outs, samples, strict=True):
        assert_close(torch.cat(out), sample.reference(), dtype)


def fill(cache: PagedKvCache) -> dict[int, int]:
    """Take every page; the sequence that holds each page."""
    holders = {}
    for _ in range(cache.pages_total):
        sequence = cache.new_sequence()
        cache.append(sequence, np.arange(cache.page_tokens))
        holders[cache.runs(sequence)[0][0] // cache.page_tokens] = sequence
    return holders


def scatter(cache: PagedKvCache) -> None:
    """Leave only every other page free, so that every run is one page."""
    for page, sequence in fill(cache).items():
        if page % 2 == 0:
            cache.release(sequence)


@pytest.mark.parametrize("order", [[5, 0, 3, 1, 4, 2], [5, 4, 3, 2, 1, 0]])
def test_pages_permuted_in_the_pool_change_nothing(order: list[int]) -> None:
    sample = random_tokens(6 * PAGE_TOKENS, kv_heads=3, group=3, dtype=torch.float64)
    ends = range(PAGE_TOKENS, 6 * PAGE_TOKENS + 1, PAGE_TOKENS)
    straight, permuted = (cache_for(kv_heads=3, dtype=torch.float64, pages=6) for _ in range(2))
    want = in_steps(straight, straight.new_sequence(), sample, ends)
    holders, sequence, got = fill(permuted), permuted.new_sequence(), []
    for page, end in zip(order, ends, strict=True):
        permuted.release(holders[page])  # The only free page, so the next step takes it.
        got += attended(permuted, [(sequence, sample.part(end - PAGE_TOKENS, end))])
    assert [first // PAGE_TOKENS for first, _ in permuted.runs(sequence)] == order
    assert (torch.cat(got) - want).abs().max().item() <= ATTENTION[torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_segments_do_not_see_each_other(dtype: torch.dtype) -> None:
    cache = cache_for(kv_heads=2, dtype=dtype)
    lengths = [(17, 1), (0, 5), (1, 40), (33, 7)]
    parts, wants = [], []
    for seed, (earlier, new) in enumerate(lengths):
        sample = random_tokens(earlier + new, kv_heads=2, group=4, dtype=dtype, seed=seed)
        sequence = cache.new_sequence()
        if earlier:
            attended(cache, [(sequence, sample.part(0, earlier))])
        parts.append((sequence, sample.part(earlier, earlier + new)))
        wants.append(sample.reference()[earlier:])
    for got, want in zip(attended(cache, parts), wants, strict=True):
        assert_close(got, want, dtype)


def test_a_fork_attends_like_a_sequence_of_its_own() -> None:
    cache = cache_for(kv_heads=2, dtype=torch.float64)
    sample = random_tokens(30, kv_heads=2, group=2, dtype=torch.float64)
    parent = cache.new_sequence()
    attended(cache, [(parent, sample.part(0, 25))])
    child = cache.fork(parent, int(sample.positions[20]))
    both = [(parent, sample.part(25, 30)), (child, sample.part(20, 30))]
    for got, start in zip(attended(cache, both), (25, 20), strict=True):
        assert_close(got, sample.reference()[start:], torch.float64)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_plain_path_for_other_devices_equals_the_flash_path(
    dtype: torch.dtype, is_causal: bool
) -> None:
    sample = random_tokens(37, kv_heads=2, group=3, dtype=dtype)
    q = sample.q.unflatten(1, (2, 3)).permute(1, 2, 0, 3)
    k, v = sample.k.transpose(0, 1), sample.v.transpose(0, 1)
    plain = blocked_part(q, k, v, is_causal=is_causal, scores_max=5 * 2 * 3 * 37)
    flash = (attend_causal if is_causal else attend_all)(q, k, v)
    for got, want in zip(plain, flash, strict=True):
        assert got.shape == want.shape
        assert_close(got, want.double(), dtype)


def test_merging_parts_equals_one_part() -> None:
    sample = random_tokens(40, kv_heads=1, group=2, dtype=torch.float64)
    q = sample.q.unflatten(1, (1, 2)).permute(1, 2, 0, 3)
    k, v = (100 * sample.k).transpose(0, 1), sample.v.transpose(0, 1)
    parts = [attend_all(q, k[:, s : s + 10], v[:, s : s + 10]) for s in (20, 0, 30, 10)]
    whole, _ = attend_all(q, k, v)
    assert (merge(parts) - whole).abs().max().item() <= ATTENTION[torch.float64]


def test_the_tap_sees_every_query_of_every_layer_in_call_and_store() -> None:
    cache = cache_for(kv_heads=2, dtype=torch.float64)
    sample = random_tokens(6, kv_heads=2, group=2, dtype=torch.float64)
    seen: list[tuple[Tensor, int]] = []
    parts = [(cache.new_sequence(), sample.positions)]
    attend = begin_forward(cache, parts, tap=lambda q, layer: seen.append((q, layer)))
    attend(sample.q, sample.k, sample.v, 0)
    attend.store(sample.q, sample.k, sample.v, 1)
    assert [layer for _, layer in seen] == [0, 1]
    assert all(torch.equal(q, sample.q) for q, _ in seen)
    assert torch.equal(cache.gather(1, parts[0][0])[0], sample.k.transpose(0, 1))


def test_a_forward_that_does_not_fit_leaves_every_sequence_as_it_was() -> None:
    cache = cache_for(kv_heads=2, dtype=torch.float64, pages=3)
    one, two = cache.new_sequence(), cache.new_sequence()
    cache.append(one, np.arange(5))
    with pytest.raises(KvCacheFull):
        begin_forward(cache, [(one, np.arange(5, 30)), (two, np.arange(40))])
    assert (cache.length(one), cache.length(two)) == (5, 0)
    assert cache.pages_free == 2
    cache.check_invariants()


def test_slot_order_is_refused_where_it_is_not_causal_order() -> None:
    cache = cache_for(kv_heads=2, dtype=torch.float64)
    sequence = cache.new_sequence()
    slots = cache.append(sequence, np.array([3, 1]))
    with pytest.raises(AssertionError):
        SequenceAttend(cache, [Segment(sequence, 2)], slots)
