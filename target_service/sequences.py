"""Sequences of running requests and of kept handles, and the pages promised to them.

GPU thread only. A running request owns its sequence until it ends or keeps it under its handle.
Kept states are never appended to: a request forks its base. Pages are promised before any work, for
the prompt and for the longest reply, so that an admitted request never runs out of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.handles import HandleStore, HeldState
from engine.kv_cache import PagedKvCache
from engine.page_promises import PagePromises
from serving.errors import (
    AlreadyExists,
    BaseMismatch,
    ResourceExhausted,
    WrongState,
)
from target_service.request import ForkCall, GenerateCall


@dataclass(slots=True)
class OpenSequence:
    """A running request's sequence. base: what it was forked from; it may be released by now."""

    sequence: int
    base: HeldState | None
    restored_slots: int
    is_kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    pages_total: int
    pages_free: int
    page_tokens: int
    page_bytes: int
    handles: int


class Sequences:
    """Opens, keeps, forks and releases. Every method but `usage` belongs to the GPU thread."""

    def __init__(self, cache: PagedKvCache, store: HandleStore, *, handles_max: int) -> None:
        self._cache = cache
        self._store = store
        self._handles_max = handles_max
        self._promises = PagePromises(cache)
        self._handles_promised: set[str] = set()

    @contextlib.contextmanager
    def opened(self, call: GenerateCall, *, slots: int) -> Iterator[OpenSequence]:
        """The request's own sequence, its base restored; released at the end unless it was kept.

        slots: what it appends at most. Raises KvEvicted, BaseMismatch, AlreadyExists, KvCacheFull
        or ResourceExhausted, before any work.
        """
        if call.instance_id:
            self._store.claim(call.instance_id)
        self._store.expire()
        if call.retain:
            self._check_new(call.handle)
        base = self._base_of(call)
        sequence = self._forked(base)
        opened = OpenSequence(sequence, base, self._cache.length(sequence))
        try:
            self._promises.promise(opened.sequence, slots)
            if call.retain:
                self._handles_promised.add(call.handle)
            yield opened
        finally:
            self._promises.forget(opened.sequence)
            if call.retain:
                self._handles_promised.discard(call.handle)
            if not opened.is_kept:
                self._cache.release(opened.sequence)

    def keep(self, opened: OpenSequence, call: GenerateCall, token_ids: np.ndarray) -> None:
        """Publish a running request's sequence under its handle. token_ids: uint32 [positions]."""
        plan = opened.base.plan if opened.base and opened.base.plan else call.plan
        self._store.put(
            call.handle,
            HeldState(
                sequence=opened.sequence,
                token_ids=token_ids,
                instance_id=call.instance_id,
                lease_s=call.lease_s,
                plan=plan,
                dense=plan is None,
            ),
        )
        opened.is_kept = True

    def fork(self, call: ForkCall) -> tuple[int, int]:
        """Publish the first positions of a kept state under a new handle: its (positions, slots).

        Raises KvEvicted, BaseMismatch, AlreadyExists, ResourceExhausted, or WrongState where the
        keep plan dropped everything below the position.
        """
        self._store.claim(call.instance_id)
        self._check_new(call.handle)
        state = self._store.get(call.base.handle)
        self._store.base(call.base.handle, call.base.tokens, state.token_ids)
        assert call.position <= state.positions
        sequence = self._cache.fork(state.sequence, call.position)
        is_kept = False
        try:
            slots = self._cache.length(sequence)
            if slots == 0:
                raise WrongState("the keep plan dropped every token below this position")
            # The head was prefilled densely, so a state cut inside it is a dense one.
            head = state.plan.protected_head_tokens if state.plan else 0
            plan = state.plan if call.position > head else None
            self._store.put(
                call.handle,
                HeldState(
                    sequence=sequence,
                    token_ids=state.token_ids[: call.position].copy(),
                    instance_id=call.instance_id,
                    lease_s=call.lease_s,
                    plan=plan,
                    dense=plan is None,
                ),
            )
            is_kept = True
        finally:
            if not is_kept:
                self._cache.release(sequence)
        return call.position, slots

    def release(self, instance_id: str, handles: tuple[str, ...]) -> tuple[int, int]:
        """Drop kept states, ignore unknown ones: (states released, bytes really freed)."""
        self._store.claim(instance_id)
        return self._store.release(handles)

    def expire(self) -> int:
        """Drop the states whose lease is over; returns how many."""
        return self._store.expire()

    def usage(self) -> Usage:
        """Occupancy. Plain counters: any thread may read them."""
        return Usage(
            pages_total=self._cache.pages_total,
            pages_free=self._cache.pages_free,
            page_tokens=self._cache.page_tokens,
            page_bytes=self._cache.page_bytes,
            handles=len(self._store),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError if the books do not match the cache."""
        assert len(self._store) + len(self._handles_promised) <= self._handles_max
        assert len(self._promises) + len(self._store) == self._cache.sequences
        self._promises.check_invariants()
        self._store.check_invariants()

    def _base_of(self, call: GenerateCall) -> HeldState | None:
        if call.base is None:
            return None
        state = self._store.base(call.base.handle, call.base.tokens, call.prompt_ids)
        if call.plan is not None and not state.dense:
            raise BaseMismatch("the base is a sparse state, a keep plan needs the dense head")
        return state

    def _forked(self, base: HeldState | None) -> int:
        if base is None:
            return self._cache.new_sequence()
        return self._cache.fork(base.sequence, base.positions)

    def _check_new(self, handle: str) -> None:
        if handle in self._store or handle in self._handles_promised:
            raise AlreadyExists("the handle is taken", field="handle")
        if len(self._store) + len(self._handles_promised) >= self._handles_max:
            raise ResourceExhausted(
                f"{self._handles_max} states are held, the limit: release some",
                metadata={"limit": str(self._handles_max)},
            )
