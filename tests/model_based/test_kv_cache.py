"""The paged cache against a dict of lists, under any order of operations."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.decoder import ModelShape
from engine.kv_cache import PagedKvCache
from serving.errors import KvCacheFull

SHAPE = ModelShape(
    layers=2, q_heads=2, kv_heads=2, head_dim=2, hidden=4, vocab=8, positions_max=1000
)


@dataclass
class NaiveCache:
    """Each sequence is a list of (position, value)."""

    sequences: dict[int, list[tuple[int, float]]] = field(default_factory=dict)

    def append(self, sequence: int, positions: list[int], values: list[float]) -> None:
        self.sequences[sequence] += zip(positions, values, strict=True)

    def below(self, sequence: int, position: int) -> list[tuple[int, float]]:
        return [entry for entry in self.sequences[sequence] if entry[0] < position]


class CacheMachine(RuleBasedStateMachine):
    """Values are unique per slot, and differ per layer, head and between K and V."""

    @initialize(pages=st.integers(1, 12), page_tokens=st.sampled_from([1, 2, 3, 4, 8]))
    def open(self, pages: int, page_tokens: int) -> None:
        self.cache = PagedKvCache(
            SHAPE, pages=pages, page_tokens=page_tokens, dtype=torch.float64, device="cpu"
        )
        self.naive = NaiveCache()
        self.next_value = 1.0

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.naive.sequences)))

    def some_position(self, data: st.DataObject, sequence: int) -> int:
        return data.draw(st.integers(0, self.end(sequence) + 1))

    def end(self, sequence: int) -> int:
        return max((p for p, _ in self.naive.sequences[sequence]), default=-1) + 1

    @rule()
    def new_sequence(self) -> None:
        self.naive.sequences[self.cache.new_sequence()] = []

    @precondition(lambda self: self.naive.sequences)
    @rule(data=st.data(), gaps=st.lists(st.integers(1, 3), max_size=14))
    def append_rising(self, data: st.DataObject, gaps: list[int]) -> None:
        sequence = self.pick(data)
        positions = self.end(sequence) - 1 + np.cumsum(gaps, dtype=np.int64)
        self.append(sequence, positions)

    @precondition(lambda self: self.naive.sequences)
    @rule(data=st.data(), positions=st.lists(st.integers(0, 30), max_size=6))
    def append_anywhere(self, data: st.DataObject, positions: list[int]) -> None:
        self.append(self.pick(data), np.array(positions, dtype=np.int64))

    def append(self, sequence: int, positions: np.ndarray) -> None:
        needed = self.cache.pages_needed(sequence, positions.size)
        free = self.cache.pages_free
        if needed > free:
            with pytest.raises(KvCacheFull):
                self.cache.append(sequence, positions)
            assert self.cache.pages_free == free
            return
        slots = self.cache.append(sequence, torch.from_numpy(positions))
        assert self.cache.pages_free == free - needed
        values = [self.next_value + i for i in range(positions.size)]
        self.next_value += positions.size
        self.naive.append(sequence, positions.tolist(), values)
        for layer in range(SHAPE.layers):
            k = expected(values, layer).transpose(0, 1)
            self.cache.write(layer, slots, k, -k)

    @precondition(lambda self: self.naive.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source = self.pick(data)
        position = self.some_position(data, source)
        free, sequences = self.cache.pages_free, self.cache.sequences
        try:
            child = self.cache.fork(source, position)
        except KvCacheFull:
            assert not self.cache.is_monotone(source)
            assert (self.cache.pages_free, self.cache.sequences) == (free, sequences)
            return
        self.naive.sequences[child] = self.naive.below(source, position)

    @precondition(lambda self: self.naive.sequences)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        position = self.some_position(data, sequence)
        try:
            self.cache.truncate(sequence, position)
        except KvCacheFull:
            assert not self.cache.is_monotone(sequence)
            return
        self.naive.sequences[sequence] = self.naive.below(sequence, position)

    @precondition(lambda self: self.naive.sequences)
    @rule(data=st.data())
    def keep_slots(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        slots = data.draw(st.integers(0, self.cache.length(sequence)))
        self.cache.keep_slots(sequence, slots)
        del self.naive.sequences[sequence][slots:]

    @precondition(lambda self: self.naive.sequences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        free = self.cache.pages_free
        freed = self.cache.release(sequence)
        assert self.cache.pages_free == free + freed
        del self.naive.sequences[sequence]
        assert sequence not in self.cache

    @invariant()
    def the_cache_is_sound(self) -> None:
        self.cache.check_invariants()
        if not self.naive.sequences:
            assert self.cache.pages_free == self.cache.pages_total

    @invariant()
    def every_sequence_holds_what_was_written(self) -> None:
        for sequence, entries in self.naive.sequences.items():
            positions = [position for position, _ in entries]
            assert self.cache.positions(sequence).tolist() == positions
            assert self.cache.length(sequence) == len(entries)
            assert self.cache.is_monotone(sequence) == all(a < b for a, b in pairwise(positions))
            assert sum(slots for _, slots in self.cache.runs(sequence)) == len(entries)
            for layer in range(SHAPE.layers):
                want = expected([value for _, value in entries], layer)
                k, v = self.cache.gather(layer, sequence)
                assert torch.equal(k, want)
                assert torch.equal(v, -want)
                assert torch.equal(by_runs(self.cache, layer, sequence), want)


def expected(values: list[float], layer: int) -> torch.Tensor:
    """Keys of a sequence whose slots hold these values: [kv_heads, slots, head_dim] float64."""
    value = torch.tensor(values, dtype=torch.float64)
    head = torch.arange(SHAPE.kv_heads * SHAPE.head_dim, dtype=torch.float64) + 10 * layer
    return (value[None, :, None] * 100 + head.view(SHAPE.kv_heads, 1, SHAPE.head_dim)).clone()


def by_runs(cache: PagedKvCache, layer: int, sequence: int) -> torch.Tensor:
    """Keys read run by run, as attention does."""
    parts = [cache.run(layer, first, slots)[0] for first, slots in cache.runs(sequence)]
    return torch.cat(parts, dim=1) if parts else expected([], layer)


TestKvCache = CacheMachine.TestCase
TestKvCache.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def cache_of(pages: int, page_tokens: int = 4) -> PagedKvCache:
    return PagedKvCache(
        SHAPE, pages=pages, page_tokens=page_tokens, dtype=torch.float32, device="cpu"
    )


def test_a_lone_sequence_is_one_run_whatever_its_appends() -> None:
    cache = cache_of(pages=16)
    sequence = cache.new_sequence()
    for start, end in ((0, 3), (3, 4), (4, 30), (30, 31)):
        cache.append(sequence, np.arange(start, end))
    assert cache.runs(sequence) == [(0, 31)]
    assert cache.gather(0, sequence)[0].data_ptr() == cache.k.data_ptr()


def test_two_sequences_that_grow_in_turns_stay_one_run_each() -> None:
    cache = cache_of(pages=64)
    first, second = cache.new_sequence(), cache.new_sequence()
    for start in range(0, 64, 8):
        for sequence in (first, second):
            cache.append(sequence, np.arange(start, start + 8))
    assert len(cache.runs(first)) == 1
    assert len(cache.runs(second)) == 1


def test_a_request_larger_than_any_extent_takes_the_largest_ones() -> None:
    cache = cache_of(pages=8, page_tokens=1)
    singles = [cache.new_sequence() for _ in range(8)]
    for sequence in singles:
        cache.append(sequence, np.array([0]))
    by_slot = {cache.runs(sequence)[0][0]: sequence for sequence in singles}
    for slot in (1, 3, 4, 5, 7):
        cache.release(by_slot[slot])
    fitting, wide = cache.new_sequence(), cache.new_sequence()
    cache.append(fitting, np.arange(3))
    assert cache.runs(fitting) == [(3, 3)]
    cache.release(fitting)
    cache.append(wide, np.arange(4))
    assert cache.runs(wide) == [(3, 3), (1, 1)]


def test_pages_taken_behind_the_last_one_are_not_taken_twice() -> None:
    cache = cache_of(pages=6, page_tokens=1)
    growing, fence, rest = (cache.new_sequence() for _ in range(3))
    cache.append(growing, np.arange(4))
    cache.append(fence, np.arange(1))
    cache.keep_slots(growing, 2)
    assert cache.runs(fence) == [(4, 1)]
    cache.append(growing, np.arange(2, 5))  # Pages 2 and 3, then 5 behind the fence.
    assert cache.runs(growing) == [(0, 4), (5, 1)]
    with pytest.raises(KvCacheFull):
        cache.append(rest, np.arange(1))
    cache.check_invariants()


def full_cache_with_scattered_survivors() -> tuple[PagedKvCache, int]:
    """No page is free, and what lies below position 7 are the slots 0, 1 and 3 of a sequence."""
    cache = cache_of(pages=2, page_tokens=2)
    sequence = cache.new_sequence()
    cache.append(sequence, np.array([0, 1, 8, 2]))
    return cache, sequence


def test_a_fork_that_finds_no_page_to_compact_into_leaves_nothing_behind() -> None:
    cache, sequence = full_cache_with_scattered_survivors()
    with pytest.raises(KvCacheFull):
        cache.fork(sequence, 7)
    assert cache.sequences == 1
    cache.check_invariants()


def test_a_truncate_that_finds_no_page_to_compact_into_changes_nothing() -> None:
    cache, sequence = full_cache_with_scattered_survivors()
    with pytest.raises(KvCacheFull):
        cache.truncate(sequence, 7)
    assert cache.positions(sequence).tolist() == [0, 1, 8, 2]
    cache.check_invariants()


def test_fork_shares_pages_until_the_first_append() -> None:
    cache = cache_of(pages=8)
    parent = cache.new_sequence()
    cache.append(parent, np.arange(6))
    child = cache.fork(parent, 6)
    assert cache.pages_free == 6
    assert cache.pages_needed(child, 1) == 1
    cache.append(child, np.array([6]))
    assert cache.pages_free == 5  # Its own copy of the half-full page; the full one stays shared.
    assert cache.pages_needed(parent, 1) == 0
    assert cache.runs(parent) == [(0, 6)]
    assert cache.release(child) == 1


def test_page_bytes_counts_keys_and_values_of_all_layers() -> None:
    assert cache_of(pages=1).page_bytes == 2 * 2 * 2 * 4 * 2 * 4
    assert cache_of(pages=3).k.nbytes + cache_of(pages=3).v.nbytes == 3 * cache_of(1).page_bytes


def test_a_draft_may_hold_fewer_layers_than_the_model() -> None:
    cache = PagedKvCache(SHAPE, pages=1, page_tokens=4, dtype=torch.float32, device="cpu", layers=1)
    assert cache.k.shape == (1, 2, 4, 2)


def test_negative_positions_are_a_bug_of_the_caller() -> None:
    cache = cache_of(pages=1)
    sequence = cache.new_sequence()
    with pytest.raises(AssertionError):
        cache.append(sequence, np.array([-1]))
