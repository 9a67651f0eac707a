"""Held states: who owns them, when they go, and that a base is what the caller believes it is."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from engine.decoder import ModelShape
from engine.handles import HandleStore, HeldState
from engine.kv_cache import PagedKvCache
from serving.errors import AlreadyExists, BaseMismatch, KvEvicted, ResourceExhausted

SHAPE = ModelShape(layers=1, q_heads=1, kv_heads=1, head_dim=2, hidden=2, vocab=9, positions_max=99)
LEASE_S_MAX = 60.0


@dataclass
class Bench:
    """A store over a real cache, with a clock that the test turns."""

    now_s: float = 100.0
    cache: PagedKvCache = field(
        default_factory=lambda: PagedKvCache(
            SHAPE, pages=16, page_tokens=4, dtype=torch.float32, device="cpu"
        )
    )

    def __post_init__(self) -> None:
        self.store = HandleStore(
            self.cache, clock=lambda: self.now_s, handles_max=3, lease_s_max=LEASE_S_MAX
        )

    def state(self, tokens: int = 6, *, owner: str = "gw-1", lease_s: float = 10.0) -> HeldState:
        sequence = self.cache.new_sequence()
        self.cache.append(sequence, np.arange(tokens))
        ids = np.arange(tokens, dtype=np.uint32)
        return HeldState(sequence=sequence, token_ids=ids, instance_id=owner, lease_s=lease_s)

    def put(self, handle: str, tokens: int = 6, **kwargs: object) -> HeldState:
        state = self.state(tokens, **kwargs)  # type: ignore[arg-type]
        self.store.put(handle, state)
        self.store.check_invariants()
        return state


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_what_was_put_is_got(bench: Bench) -> None:
    state = bench.put("a")
    assert bench.store.get("a") is state
    assert state.positions == 6
    assert "a" in bench.store
    assert len(bench.store) == 1


def test_an_unknown_handle_is_evicted_state(bench: Bench) -> None:
    with pytest.raises(KvEvicted):
        bench.store.get("never")


def test_a_taken_handle_is_refused_and_the_caller_keeps_its_sequence(bench: Bench) -> None:
    first = bench.put("a")
    second = bench.state()
    with pytest.raises(AlreadyExists):
        bench.store.put("a", second)
    assert bench.store.get("a") is first
    assert second.sequence in bench.cache


def test_the_number_of_handles_is_bounded(bench: Bench) -> None:
    for handle in "abc":
        bench.put(handle)
    with pytest.raises(ResourceExhausted):
        bench.store.put("d", bench.state())
    bench.now_s += 10.0  # The three leases end, which makes room.
    bench.put("d")
    assert len(bench.store) == 1


def test_whether_a_handle_is_free_is_known_before_the_work_that_fills_it(bench: Bench) -> None:
    bench.put("a")
    with pytest.raises(AlreadyExists):
        bench.store.check_free("a")
    bench.store.check_free("b")
    bench.put("b")
    bench.put("c")
    with pytest.raises(ResourceExhausted):
        bench.store.check_free("d")


def test_release_is_idempotent_and_counts_what_really_became_free(bench: Bench) -> None:
    bench.put("a", tokens=6)  # two pages
    assert bench.store.release(["a", "a", "unknown"]) == (1, 2 * bench.cache.page_bytes)
    assert bench.store.release(["a"]) == (0, 0)
    assert bench.cache.pages_free == 16
    bench.store.check_invariants()


def test_pages_that_a_running_fork_shares_are_not_counted_as_freed(bench: Bench) -> None:
    state = bench.put("a", tokens=6)
    fork = bench.cache.fork(state.sequence, 4)
    assert bench.store.release(["a"]) == (1, bench.cache.page_bytes)
    assert bench.cache.release(fork) == 1


def test_a_lease_ends_exactly_at_its_time(bench: Bench) -> None:
    bench.put("a", lease_s=10.0)
    bench.now_s = 109.999
    assert bench.store.expire() == 0
    bench.now_s = 110.0
    assert bench.store.expire() == 1
    assert bench.cache.pages_free == 16


def test_an_expired_state_is_not_given_out_though_nobody_called_expire(bench: Bench) -> None:
    bench.put("a", lease_s=10.0)
    bench.now_s += 10.0
    with pytest.raises(KvEvicted):
        bench.store.get("a")
    assert bench.cache.pages_free == 16


def test_every_use_renews_the_lease(bench: Bench) -> None:
    bench.put("a", lease_s=10.0)
    for _ in range(5):
        bench.now_s += 9.0
        bench.store.get("a")
    bench.now_s += 9.0
    bench.store.base("a", 6, np.arange(9, dtype=np.uint32))
    bench.now_s += 9.0
    assert bench.store.expire() == 0


def test_a_lease_is_bounded_by_the_service(bench: Bench) -> None:
    bench.put("a", lease_s=1e9)
    bench.now_s += LEASE_S_MAX
    assert bench.store.expire() == 1


def test_a_new_instance_frees_what_the_old_one_left(bench: Bench) -> None:
    bench.put("a", owner="gw-1")
    bench.put("b", owner="gw-1")
    assert bench.store.claim("gw-1") == 0
    assert bench.store.claim("gw-2") == 2
    assert bench.store.claim("gw-2") == 0
    assert bench.cache.pages_free == 16
    with pytest.raises(KvEvicted):
        bench.store.get("a")


def test_a_state_that_an_old_instance_publishes_late_goes_at_the_next_claim(bench: Bench) -> None:
    bench.store.claim("gw-2")
    bench.put("late", owner="gw-1")
    kept = bench.put("kept", owner="gw-2")
    assert bench.store.claim("gw-2") == 1
    assert bench.store.get("kept") is kept


def test_a_base_is_given_out_if_length_and_tokens_agree(bench: Bench) -> None:
    state = bench.put("a", tokens=6)
    assert bench.store.base("a", 6, np.arange(8, dtype=np.uint32)) is state
    assert bench.store.base("a", 6, np.arange(6, dtype=np.uint32)) is state


@pytest.mark.parametrize("declared", [0, 5, 7])
def test_a_base_of_another_length_is_refused(bench: Bench, declared: int) -> None:
    bench.put("a", tokens=6)
    with pytest.raises(BaseMismatch) as caught:
        bench.store.base("a", declared, np.arange(8, dtype=np.uint32))
    assert caught.value.metadata == {"held_tokens": "6", "declared_tokens": str(declared)}


@pytest.mark.parametrize("differs_at", [0, 3, 5])
def test_a_base_with_other_tokens_is_refused(bench: Bench, differs_at: int) -> None:
    bench.put("a", tokens=6)
    prompt = np.arange(8, dtype=np.uint32)
    prompt[differs_at] += 1
    with pytest.raises(BaseMismatch):
        bench.store.base("a", 6, prompt)


def test_a_base_longer_than_the_prompt_is_refused(bench: Bench) -> None:
    bench.put("a", tokens=6)
    with pytest.raises(BaseMismatch):
        bench.store.base("a", 6, np.arange(5, dtype=np.uint32))


def test_an_unknown_base_is_evicted_state(bench: Bench) -> None:
    with pytest.raises(KvEvicted):
        bench.store.base("a", 6, np.arange(8, dtype=np.uint32))


def test_a_sparse_state_counts_positions_not_slots(bench: Bench) -> None:
    sequence = bench.cache.new_sequence()
    bench.cache.append(sequence, np.array([0, 1, 6, 7]))
    ids = np.arange(8, dtype=np.uint32)
    state = HeldState(sequence=sequence, token_ids=ids, instance_id="gw", lease_s=5.0, dense=False)
    bench.store.put("sparse", state)
    bench.store.check_invariants()
    assert bench.store.base("sparse", 8, ids).positions == 8


def test_the_invariants_catch_a_sequence_released_behind_the_stores_back(bench: Bench) -> None:
    state = bench.put("a")
    bench.cache.release(state.sequence)
    with pytest.raises(AssertionError):
        bench.store.check_invariants()


def test_the_invariants_catch_a_sequence_appended_to_after_publishing(bench: Bench) -> None:
    state = bench.put("a")
    bench.cache.append(state.sequence, np.array([6]))
    with pytest.raises(AssertionError):
        bench.store.check_invariants()
