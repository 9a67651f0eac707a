"""Who owns a sequence and its pages, when requests begin, end, keep and fork."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.decoder import ModelShape
from engine.handles import HandleStore
from engine.kv_cache import PagedKvCache
from serving.errors import AlreadyExists, KvCacheFull, ResourceExhausted
from target_service.request import BaseRef, ForkCall
from target_service.sequences import Sequences
from tests.target_rig import generate_call

SHAPE = ModelShape(
    layers=1, q_heads=1, kv_heads=1, head_dim=2, hidden=2, vocab=9, positions_max=1000
)
PAGES = 10
PAGE_TOKENS = 4
PROMPT = np.arange(8)


class Books:
    """Sequences on a cache of 10 pages of 4 slots."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cache = PagedKvCache(
            SHAPE, pages=PAGES, page_tokens=PAGE_TOKENS, dtype=torch.float32, device="cpu"
        )
        self.store = HandleStore(
            self.cache, clock=lambda: self.now, handles_max=2, lease_s_max=60.0
        )
        self.sequences = Sequences(self.cache, self.store, handles_max=2)

    def keep(self, handle: str, tokens: int = 8) -> None:
        """A request that fills its prompt and keeps it."""
        call = generate_call(PROMPT[:tokens], handle=handle, retain=True)
        with self.sequences.opened(call, slots=tokens) as opened:
            self.cache.append(opened.sequence, np.arange(tokens))
            self.sequences.keep(opened, call, call.prompt_ids)
        self.check()

    def check(self) -> None:
        self.sequences.check_invariants()

    @property
    def used(self) -> int:
        return self.cache.pages_total - self.cache.pages_free


@pytest.fixture
def books() -> Books:
    return Books()


def call(**fields: Any) -> Any:
    return generate_call(PROMPT, **fields)


def test_a_request_that_keeps_nothing_leaves_nothing(books: Books) -> None:
    with books.sequences.opened(call(), slots=8) as opened:
        books.cache.append(opened.sequence, np.arange(8))
        assert books.used == 2
        books.check()
    assert books.used == 0
    books.check()


def test_a_request_that_fails_leaves_nothing(books: Books) -> None:
    def fail() -> None:
        with books.sequences.opened(call(handle="new", retain=True), slots=8) as opened:
            books.cache.append(opened.sequence, np.arange(8))
            raise KvCacheFull("by hand")

    with pytest.raises(KvCacheFull):
        fail()
    assert books.used == 0
    books.check()
    # The handle it asked for is free again.
    books.keep("new")


def test_promised_pages_are_not_promised_again(books: Books) -> None:
    """Though nothing is written yet: 6 pages are the first one's, 4 are left."""
    with books.sequences.opened(call(), slots=24):
        assert books.used == 0
        refused = books.sequences.opened(call(), slots=17)
        with pytest.raises(KvCacheFull) as caught:
            refused.__enter__()
        assert caught.value.metadata == {"needed_pages": "5", "free_pages": "4"}
        assert caught.value.retry_after_s is not None
        with books.sequences.opened(call(), slots=16):
            books.check()
    books.check()


def test_what_is_written_is_no_longer_promised(books: Books) -> None:
    with books.sequences.opened(call(), slots=24) as first:
        books.cache.append(first.sequence, np.arange(24))
        with books.sequences.opened(call(), slots=16) as second:
            books.cache.append(second.sequence, np.arange(16))
            assert books.used == PAGES
            books.check()


def test_the_copy_of_a_shared_page_is_promised_too(books: Books) -> None:
    books.keep("base", tokens=6)
    # 8 pages are free; 30 slots behind 6 need 7 more pages and a copy of the half-filled one.
    based = call(base=("base", 6))
    with books.sequences.opened(based, slots=30) as opened:
        assert books.sequences.usage().pages_free == 8
        books.cache.append(opened.sequence, np.arange(6, 36))
        assert books.cache.pages_free == 0
        books.check()
    assert books.used == 2


def test_with_no_request_in_the_way_waiting_is_not_advised(books: Books) -> None:
    with pytest.raises(KvCacheFull) as caught:
        books.sequences.opened(call(), slots=41).__enter__()
    assert caught.value.retry_after_s is None
    assert books.used == 0


def test_a_handle_asked_for_twice_at_once_is_taken(books: Books) -> None:
    with books.sequences.opened(call(handle="new", retain=True), slots=8):
        with pytest.raises(AlreadyExists):
            books.sequences.opened(call(handle="new", retain=True), slots=8).__enter__()
        # Refusing the second did not take the first one's promise away.
        with pytest.raises(AlreadyExists):
            books.sequences.opened(call(handle="new", retain=True), slots=8).__enter__()


def test_running_requests_count_against_the_number_of_handles(books: Books) -> None:
    books.keep("one")
    with books.sequences.opened(call(handle="two", retain=True), slots=8):
        with pytest.raises(ResourceExhausted):
            books.sequences.opened(call(handle="three", retain=True), slots=8).__enter__()
        with pytest.raises(ResourceExhausted):
            books.sequences.fork(fork_of("one"))
        books.check()


def fork_of(handle: str, position: int = 5) -> ForkCall:
    return ForkCall(
        instance_id="gateway",
        base=BaseRef(handle, 8),
        position=position,
        handle="fork",
        lease_s=60.0,
    )


def test_a_fork_shares_pages_and_outlives_its_origin(books: Books) -> None:
    books.keep("one")
    assert books.sequences.fork(fork_of("one")) == (5, 5)
    assert books.used == 2
    assert books.sequences.release("gateway", ("one",)) == (1, 0)
    assert books.used == 2
    assert books.sequences.release("gateway", ("fork",)) == (1, 2 * books.cache.page_bytes)
    books.check()


def test_a_state_nobody_used_in_its_lease_makes_room_for_a_request(books: Books) -> None:
    books.keep("one")
    books.now = 61.0
    with books.sequences.opened(call(), slots=40):
        books.check()
    assert books.sequences.usage().handles == 0
