"""Paged key/value storage of all sequences of one model, used on the GPU thread only.

A slot is a place in storage, a position a place in the token stream: after a sparse prefill a
sequence has fewer slots than its last position says, so every slot stores its position. Pages of
`page_tokens` slots are reference-counted and shared by forks. The allocator hands out physically
adjacent pages where it can, so that a sequence is a few runs of slots and attention reads views of
the pool, not copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.decoder import ModelShape
from engine.page_pool import PagePool
from serving.errors import KvCacheFull

POSITIONS_CAPACITY_MIN = 256


@dataclass(slots=True)
class _Sequence:
    """pages: int64 [pages]; positions: int64 [capacity], the first `slots` of them are valid."""

    pages: np.ndarray
    positions: np.ndarray
    slots: int
    is_monotone: bool

    def held_positions(self) -> np.ndarray:
        return self.positions[: self.slots]


class PagedKvCache:
    """k, v: [layers, kv_heads, pages * page_tokens, head_dim].

    Storage starts uninitialised and untouched (the system hands out its memory when it is written):
    no method returns a slot past a sequence's end, so what lies there is never read.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
        layers: int | None = None,
    ) -> None:
        assert pages > 0
        assert page_tokens > 0
        self.page_tokens = page_tokens
        self.pages_total = pages
        self.layers = shape.layers if layers is None else layers
        self.kv_heads = shape.kv_heads
        self.head_dim = shape.head_dim
        dims = (self.layers, shape.kv_heads, pages * page_tokens, shape.head_dim)
        self.k = torch.empty(dims, dtype=dtype, device=device)
        self.v = torch.empty(dims, dtype=dtype, device=device)
        self._pool = PagePool(pages)
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 0

    @property
    def pages_free(self) -> int:
        return self._pool.free

    @property
    def page_bytes(self) -> int:
        """Bytes of one page's keys and values in all layers."""
        per_slot = self.layers * self.kv_heads * self.head_dim * self.k.element_size()
        return 2 * per_slot * self.page_tokens

    @property
    def sequences(self) -> int:
        return len(self._sequences)

    def new_sequence(self) -> int:
        """Id of a new, empty sequence. Ids are never used again."""
        empty = np.empty(0, dtype=np.int64)
        return self._join(_Sequence(empty, empty, slots=0, is_monotone=True))

    def append(self, sequence: int, positions: Tensor | np.ndarray) -> Tensor:
        """Reserve one slot for each of `positions` (int64 [tokens]) at the sequence's end.

        Returns the physical slots, int64 [tokens], on the cache's device; their content is
        undefined until `write`. A partial last page that is shared is copied first. Raises
        KvCacheFull; then nothing has changed. Positions that do not rise strictly clear the
        sequence's monotone flag.
        """
        state = self._sequences[sequence]
        new = np.asarray(positions, dtype=np.int64)
        assert new.ndim == 1
        assert new.size == 0 or new.min() >= 0
        needed = self.pages_needed(sequence, new.size)
        if needed > self.pages_free:
            raise KvCacheFull(f"{needed} pages are needed, {self.pages_free} are free")
        if new.size and self._tail_is_shared(state):
            self._copy_tail(state)
        self._extend_table(state, new.size)
        first = state.slots
        self._store_positions(state, new)
        slots = self._physical(state, first, state.slots)
        return torch.from_numpy(slots).to(self.k.device)

    def fork(self, sequence: int, position: int) -> int:
        """A new sequence that holds the slots whose position is below `position`; pages are shared.

        Of a sequence that is not monotone the surviving slots may not be its first ones: those
        behind the first dropped slot are copied to pages of the fork's own, which can raise
        KvCacheFull.
        """
        source = self._sequences[sequence]
        keep = source.held_positions() < position
        prefix = keep.size if keep.all() else int(keep.argmin())
        child = self._share(source, prefix)
        scattered = prefix + np.flatnonzero(keep[prefix:])
        if scattered.size == 0:
            return child
        try:
            target = self.append(child, source.positions[scattered])
        except KvCacheFull:
            self.release(child)
            raise
        self._copy_slots(self._slots_at(source, scattered), target)
        return child

    def truncate(self, sequence: int, position: int) -> None:
        """Drop the slots whose position is `position` or above.

        A sequence that is not monotone is compacted by way of a fork, which can raise KvCacheFull;
        then nothing has changed.
        """
        state = self._sequences[sequence]
        if state.is_monotone:
            self.keep_slots(sequence, int(np.searchsorted(state.held_positions(), position)))
            return
        child = self.fork(sequence, position)
        self._sequences[sequence], self._sequences[child] = self._sequences[child], state
        self.release(child)

    def keep_slots(self, sequence: int, slots: int) -> None:
        """Drop all but the first `slots` slots, in slot order: takes back the newest appends."""
        state = self._sequences[sequence]
        assert 0 <= slots <= state.slots
        pages = self._pages_for(slots)
        self._pool.release(state.pages[pages:])
        state.pages = state.pages[:pages].copy()
        state.slots = slots
        if not state.is_monotone:
            state.is_monotone = _rises(state.held_positions())

    def release(self, sequence: int) -> int:
        """Forget the sequence; returns the pages this really freed (shared pages stay)."""
        return self._pool.release(self._sequences.pop(sequence).pages)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._sequences

    def length(self, sequence: int) -> int:
        """Slots held."""
        return self._sequences[sequence].slots

    def positions(self, sequence: int) -> np.ndarray:
        """Position of each slot in slot order, int64 [slots]; a copy."""
        return self._sequences[sequence].held_positions().copy()

    def is_monotone(self, sequence: int) -> bool:
        """True if positions rise strictly with the slots, so that slot order is causal order."""
        return self._sequences[sequence].is_monotone

    def pages_held(self, sequence: int) -> int:
        """Pages in the sequence's table, shared ones included."""
        return self._sequences[sequence].pages.size

    def pages_needed(self, sequence: int, tokens: int) -> int:
        """Free pages that appending `tokens` takes now, the copy of a shared last page included."""
        state = self._sequences[sequence]
        added = self._pages_for(state.slots + tokens) - state.pages.size
        return added + int(tokens > 0 and self._tail_is_shared(state))

    def runs(self, sequence: int) -> list[tuple[int, int]]:
        """Physically contiguous runs (first slot, slots) of the sequence, in slot order."""
        state = self._sequences[sequence]
        if state.slots == 0:
            return []
        breaks = np.flatnonzero(np.diff(state.pages) != 1) + 1
        starts = np.concatenate(([0], breaks))
        ends = np.append(breaks * self.page_tokens, state.slots)
        firsts = state.pages[starts] * self.page_tokens
        counts = ends - starts * self.page_tokens
        return list(zip(firsts.tolist(), counts.tolist(), strict=True))

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store keys and values of one layer. slots: int64 [tokens], from `append`.

        k, v: [tokens, kv_heads, head_dim] in the cache's dtype.
        """
        assert k.shape == v.shape == (slots.numel(), self.kv_heads, self.head_dim)
        assert k.dtype == v.dtype == self.k.dtype
        self.k[layer].index_copy_(1, slots, k.transpose(0, 1))
        self.v[layer].index_copy_(1, slots, v.transpose(0, 1))

    def gather(self, layer: int, sequence: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [kv_heads, slots, head_dim]; views if it is one run."""
        state = self._sequences[sequence]
        runs = self.runs(sequence)
        if len(runs) <= 1:
            first, slots = runs[0] if runs else (0, 0)
            return self.run(layer, first, slots)
        pages = torch.from_numpy(state.pages).to(self.k.device)
        return self._pages_of(self.k[layer], pages, state.slots), self._pages_of(
            self.v[layer], pages, state.slots
        )

    def run(self, layer: int, first: int, slots: int) -> tuple[Tensor, Tensor]:
        """Views of one physical run of one layer's keys and values, [kv_heads, slots, head_dim]."""
        return self.k[layer, :, first : first + slots], self.v[layer, :, first : first + slots]

    def check_invariants(self) -> None:
        """Raise AssertionError if the page tables, the pool and the positions disagree."""
        tables = [state.pages for state in self._sequences.values()]
        self._pool.check_invariants(tables)
        for state in self._sequences.values():
            assert state.pages.size == self._pages_for(state.slots)
            assert state.positions.size >= state.slots
            held = state.held_positions()
            assert held.size == 0 or held.min() >= 0
            assert state.is_monotone == _rises(held)

    def _join(self, state: _Sequence) -> int:
        sequence = self._next_id
        self._next_id += 1
        self._sequences[sequence] = state
        return sequence

    def _share(self, source: _Sequence, slots: int) -> int:
        """A new sequence on the first `slots` slots of another one's pages."""
        pages = source.pages[: self._pages_for(slots)].copy()
        self._pool.share(pages)
        held = source.positions[:slots].copy()
        monotone = source.is_monotone or _rises(held)
        return self._join(_Sequence(pages, held, slots, monotone))

    def _pages_for(self, slots: int) -> int:
        return -(-slots // self.page_tokens)

    def _tail_is_shared(self, state: _Sequence) -> bool:
        is_partial = state.slots % self.page_tokens != 0
        return is_partial and self._pool.is_shared(int(state.pages[-1]))

    def _copy_tail(self, state: _Sequence) -> None:
        """Give the sequence its own copy of its partial last page."""
        before = int(state.pages[-2]) if state.pages.size > 1 else None
        (own,) = self._pool.take(1, after=before)
        shared = state.pages[-1:]
        state.pages = np.append(state.pages[:-1], own)
        used = state.slots % self.page_tokens
        source, target = int(shared[0]) * self.page_tokens, int(own) * self.page_tokens
        for pool in (self.k, self.v):
            pool[:, :, target : target + used] = pool[:, :, source : source + used]
        self._pool.release(shared)

    def _extend_table(self, state: _Sequence, tokens: int) -> None:
        added = self._pages_for(state.slots + tokens) - state.pages.size
        if added:
            after = int(state.pages[-1]) if state.pages.size else None
            state.pages = np.concatenate((state.pages, self._pool.take(added, after=after)))

    def _store_positions(self, state: _Sequence, new: np.ndarray) -> None:
        """Amortised constant per position: the buffer doubles."""
        needed = state.slots + new.size
        if needed > state.positions.size:
            grown = np.empty(max(needed, 2 * state.slots, POSITIONS_CAPACITY_MIN), dtype=np.int64)
            grown[: state.slots] = state.held_positions()
            state.positions = grown
        last_and_new = max(state.slots - 1, 0)
        state.positions[state.slots : needed] = new
        state.slots = needed
        state.is_monotone = state.is_monotone and _rises(state.positions[last_and_new:needed])

    def _physical(self, state: _Sequence, start: int, end: int) -> np.ndarray:
        return self._slots_at(state, np.arange(start, end, dtype=np.int64))

    def _slots_at(self, state: _Sequence, index: np.ndarray) -> np.ndarray:
        """Physical slots of the sequence's slots number `index`."""
        page, offset = np.divmod(index, self.page_tokens)
        return state.pages[page] * self.page_tokens + offset

    def _copy_slots(self, source: np.ndarray, target: Tensor) -> None:
        index = torch.from_numpy(source).to(self.k.device)
        for pool in (self.k, self.v):
            pool.index_copy_(2, target, pool.index_select(2, index))

    def _pages_of(self, pool: Tensor, pages: Tensor, slots: int) -> Tensor:
        """Copy whole pages: [kv_heads, pool slots, head_dim] -> [kv_heads, slots, head_dim]."""
        paged = pool.unflatten(1, (self.pages_total, self.page_tokens))
        return paged.index_select(1, pages).flatten(1, 2)[:, :slots]


def _rises(positions: np.ndarray) -> bool:
    return bool((positions[1:] > positions[:-1]).all())
