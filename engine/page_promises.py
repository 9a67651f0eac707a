"""Pages set aside for running jobs, so that an admitted one never runs out of them."""

from __future__ import annotations

from engine.kv_cache import PagedKvCache
from serving.errors import KvCacheFull

RETRY_AFTER_S = 1.0


class PagePromises:
    """What running jobs' sequences may still grow to. GPU thread only."""

    def __init__(self, cache: PagedKvCache) -> None:
        self._cache = cache
        # Slots that each sequence has when its job is done.
        self._slots: dict[int, int] = {}

    def promise(self, sequence: int, slots: int) -> None:
        """Set pages aside for `slots` more slots, the copy of a shared last page included.

        Raises KvCacheFull; then nothing has changed.
        """
        needed = self._cache.pages_needed(sequence, slots)
        total, free = self._cache.pages_total, self._cache.pages_free - self.pages
        if needed > free:
            raise KvCacheFull(
                f"{needed} pages are needed, {free} of {total} are free",
                metadata={"needed_pages": str(needed), "free_pages": str(free)},
                # Waiting helps only where the running jobs stand in the way.
                retry_after_s=RETRY_AFTER_S if needed <= total and self._slots else None,
            )
        self._slots[sequence] = self._cache.length(sequence) + slots

    def forget(self, sequence: int) -> None:
        """The job is over; a sequence without a promise is ignored."""
        self._slots.pop(sequence, None)

    @property
    def pages(self) -> int:
        """Pages that the jobs may still take."""
        return sum(
            self._cache.pages_needed(sequence, slots - self._cache.length(sequence))
            for sequence, slots in self._slots.items()
        )

    def __len__(self) -> int:
        return len(self._slots)

    def check_invariants(self) -> None:
        """Raise AssertionError if a promise cannot be kept or was exceeded."""
        assert self.pages <= self._cache.pages_free
        for sequence, slots in self._slots.items():
            assert self._cache.length(sequence) <= slots
