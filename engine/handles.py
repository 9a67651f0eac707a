"""Sequences a service keeps between calls, under the gateway's handles. GPU thread only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from engine.kv_cache import PagedKvCache
from serving.errors import AlreadyExists, BaseMismatch, KvEvicted, ResourceExhausted
from serving.keep_plan import KeepPlan


@dataclass(slots=True, kw_only=True)
class HeldState:
    """One kept sequence.

    token_ids: uint32 [positions], all ids up to its last position, those that a plan dropped
    included. lease_s: time it stays without being used; `put` bounds it and sets expires_at. plan:
    set if sparse.
    """

    sequence: int
    token_ids: np.ndarray
    instance_id: str
    lease_s: float
    expires_at: float = 0.0
    plan: KeepPlan | None = None
    dense: bool = True

    @property
    def positions(self) -> int:
        """Tokens covered: the last position + 1."""
        return self.token_ids.size


class HandleStore:
    """Handle -> kept state; owns the states' sequences, which are forked, never appended to."""

    def __init__(
        self,
        cache: PagedKvCache,
        *,
        clock: Callable[[], float],
        handles_max: int,
        lease_s_max: float,
    ) -> None:
        self._cache = cache
        self._clock = clock
        self._handles_max = handles_max
        self._lease_s_max = lease_s_max
        self._states: dict[str, HeldState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, handle: str) -> bool:
        return handle in self._states

    def claim(self, instance_id: str) -> int:
        """Release what any other gateway instance left here; returns how many states that were.

        Called first in every request, so it also catches what an old instance's last request
        published.
        """
        return self._release_where(lambda state: state.instance_id != instance_id)

    def put(self, handle: str, state: HeldState) -> None:
        """Keep `state` under `handle` and own its sequence from now on.

        Raises AlreadyExists, or ResourceExhausted if handles_max are held; then the caller still
        owns it.
        """
        assert state.lease_s > 0
        assert state.sequence in self._cache
        self.check_free(handle)
        state.lease_s = min(state.lease_s, self._lease_s_max)
        self._renew(state)
        self._states[handle] = state

    def check_free(self, handle: str) -> None:
        """Raise now what `put` would raise for this handle: before the work that fills it."""
        self.expire()
        if handle in self._states:
            raise AlreadyExists("the handle is taken")
        if len(self._states) >= self._handles_max:
            raise ResourceExhausted(f"{self._handles_max} states are held, the limit")

    def get(self, handle: str) -> HeldState:
        """The state, its lease renewed. Raises KvEvicted if it is unknown, released or expired."""
        self.expire()
        state = self._states.get(handle)
        if state is None:
            raise KvEvicted("no state is held under this handle: prefill again")
        self._renew(state)
        return state

    def base(self, handle: str, tokens: int, prompt_ids: np.ndarray) -> HeldState:
        """The state to start a prompt from, its lease renewed.

        tokens: the length in positions that the caller believes it has. prompt_ids: uint32
        [prompt]. Raises KvEvicted; BaseMismatch if the length differs or its tokens do not start
        the prompt.
        """
        state = self.get(handle)
        if state.positions != tokens:
            raise BaseMismatch(
                f"the base holds {state.positions} tokens, the request says {tokens}",
                metadata={"held_tokens": str(state.positions), "declared_tokens": str(tokens)},
            )
        if not np.array_equal(state.token_ids, prompt_ids[:tokens]):
            raise BaseMismatch("the prompt does not start with the base's tokens")
        return state

    def release(self, handles: Iterable[str]) -> tuple[int, int]:
        """Drop these states, ignore unknown ones: (states released, bytes really freed)."""
        released, pages = 0, 0
        for handle in handles:
            state = self._states.pop(handle, None)
            if state is not None:
                released += 1
                pages += self._cache.release(state.sequence)
        return released, pages * self._cache.page_bytes

    def expire(self) -> int:
        """Drop the states whose lease is over; returns how many. To be called when idle, too."""
        now = self._clock()
        return self._release_where(lambda state: state.expires_at <= now)

    def check_invariants(self) -> None:
        """Raise AssertionError if states and sequences disagree, or two states share one."""
        sequences = [state.sequence for state in self._states.values()]
        assert len(set(sequences)) == len(sequences)
        assert len(self._states) <= self._handles_max
        latest = self._clock() + self._lease_s_max
        for state in self._states.values():
            assert state.sequence in self._cache
            assert state.expires_at <= latest
            assert state.token_ids.dtype == np.uint32
            positions = self._cache.positions(state.sequence)
            assert positions.size > 0
            covered = int(positions.max()) + 1
            # A sparse state may have been cut where its plan dropped tokens.
            assert covered == state.positions if state.dense else covered <= state.positions
        self._cache.check_invariants()

    def _renew(self, state: HeldState) -> None:
        state.expires_at = self._clock() + state.lease_s

    def _release_where(self, leaves: Callable[[HeldState], bool]) -> int:
        released, _ = self.release([h for h, state in self._states.items() if leaves(state)])
        return released
