"""Which pages are free, how often each is referenced, and which one to hand out next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class PagePool:
    """Reference counts of `pages` pages. Knows neither sequences nor tensors."""

    def __init__(self, pages: int) -> None:
        self._references = np.zeros(pages, dtype=np.int64)
        self.free = pages

    def is_shared(self, page: int) -> bool:
        return bool(self._references[page] > 1)

    def take(self, pages: int, *, after: int | None) -> np.ndarray:
        """`pages` free pages, referenced once each, int64 [pages]; as few runs as the pool allows.

        First those that follow page `after` physically. The rest comes from the largest free
        extent, and further ones only if that is too small. The caller has checked that enough are
        free.
        """
        assert pages <= self.free
        parts = [self._following(after, pages)]
        missing = pages - parts[0].size
        extents = self._extents(excluding=parts[0]) if missing else []
        for start, length in extents:
            taken = min(missing, length)
            first = start + _room_before(start, length - taken)
            parts.append(np.arange(first, first + taken, dtype=np.int64))
            missing -= taken
            if missing == 0:
                break
        chosen = np.concatenate(parts)
        assert chosen.size == pages
        self._references[chosen] = 1
        self.free -= pages
        return chosen

    def share(self, pages: np.ndarray) -> None:
        """One more reference to each of `pages` (distinct, in use)."""
        self._references[pages] += 1

    def release(self, pages: np.ndarray) -> int:
        """One reference less to each of `pages` (distinct); returns how many became free."""
        self._references[pages] -= 1
        freed = int((self._references[pages] == 0).sum())
        self.free += freed
        return freed

    def check_invariants(self, tables: Sequence[np.ndarray]) -> None:
        """Raise AssertionError unless the counts are exactly those of the given page tables."""
        referenced = np.zeros_like(self._references)
        for table in tables:
            assert np.unique(table).size == table.size
            referenced[table] += 1
        assert np.array_equal(referenced, self._references)
        assert self.free + np.count_nonzero(referenced) == referenced.size

    def _following(self, after: int | None, pages: int) -> np.ndarray:
        """Up to `pages` free pages directly behind page `after`."""
        if after is None:
            return np.empty(0, dtype=np.int64)
        used = np.flatnonzero(self._references[after + 1 : after + 1 + pages])
        room = min(pages, self._references.size - after - 1)
        length = int(used[0]) if used.size else room
        return np.arange(after + 1, after + 1 + length, dtype=np.int64)

    def _extents(self, *, excluding: np.ndarray) -> list[tuple[int, int]]:
        """Free extents (start, length), largest first, ties by start."""
        is_free = np.zeros(self._references.size + 2, dtype=np.int8)
        is_free[1:-1] = self._references == 0
        is_free[1 + excluding] = 0
        edges = np.flatnonzero(np.diff(is_free))
        starts, ends = edges[0::2], edges[1::2]
        order = np.argsort(starts - ends, kind="stable")
        return list(zip(starts[order].tolist(), (ends - starts)[order].tolist(), strict=True))


def _room_before(start: int, spare: int) -> int:
    """Pages left free in front: half of what is spare.

    The sequence that ends in front may grow, too; at the pool's start there is none.
    """
    return spare // 2 if start > 0 else 0
