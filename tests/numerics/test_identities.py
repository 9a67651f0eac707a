"""What must not change a reply, in float64 with equal tokens, for every supported architecture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention import RUNS_MAX
from engine.decoder import Decoder
from engine.kv_cache import PagedKvCache
from engine.weights import load_decoder
from serving.keep_plan import KeepPlan, kept_positions
from serving.sampling_settings import Sampling, Stops
from target_service.events import Finished
from target_service.prefill import PrefillKind, fill, forward_token, prefill_parts
from tests.numerics.transformers_models import eager_logits
from tests.target_rig import (
    PAGE_TOKENS,
    TargetRig,
    generate_call,
    keep_all,
    keep_plan,
    random_prompt,
)
from tests.tiny_models import write_tiny_model
from tests.tolerances import LOGITS

# 13 chunks of 8, the last one of 4 tokens; past the 64 positions the scaled RoPEs were made for.
PROMPT_TOKENS = 100
HEAD_TOKENS = 19
KEPT_CHUNKS = (2, 3, 6, 9, 11, 12)
CASES: dict[str, tuple[str, str | None, bool]] = {
    "llama": ("llama", None, True),
    "llama-linear": ("llama", "linear", True),
    "llama-llama3": ("llama", "llama3", False),
    "llama-yarn": ("llama", "yarn", True),
    "mistral": ("mistral", None, False),
    "qwen2": ("qwen2", None, True),
    "qwen3": ("qwen3", None, False),
}


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    arch, rope, tied = CASES[request.param]
    return write_tiny_model(tmp_path_factory.mktemp(request.param), arch, rope=rope, tied=tied)


@pytest.fixture(scope="module")
def decoder(checkpoint: Path) -> Decoder:
    return load_decoder(checkpoint, dtype=torch.float64, device="cpu")


@pytest.fixture(scope="module")
def prompt(decoder: Decoder) -> np.ndarray:
    return random_prompt(decoder, PROMPT_TOKENS)


@pytest.fixture
def sparse_plan() -> KeepPlan:
    return keep_plan(PROMPT_TOKENS, KEPT_CHUNKS, head=HEAD_TOKENS)


def prefilled(
    decoder: Decoder,
    cache: PagedKvCache,
    prompt: np.ndarray,
    *,
    plan: KeepPlan | None = None,
    chunk: int = 32,
) -> tuple[int, Tensor]:
    """A new sequence with the whole prompt in it, and the kick-off's logits [vocab]."""
    sequence = cache.new_sequence()
    extend(decoder, cache, sequence, prompt, start=0, plan=plan, chunk=chunk)
    return sequence, kick_off(decoder, cache, sequence, prompt)


def extend(
    decoder: Decoder,
    cache: PagedKvCache,
    sequence: int,
    prompt: np.ndarray,
    *,
    start: int,
    plan: KeepPlan | None = None,
    chunk: int = 32,
) -> None:
    """Fill all but the last token from position `start` on."""
    for part in prefill_parts(prompt_tokens=prompt.size, base_tokens=start, plan=plan):
        for _ in fill(
            decoder,
            cache,
            sequence,
            token_ids=prompt,
            positions=part.positions,
            chunk_tokens=lambda: chunk,
        ):
            pass


def kick_off(decoder: Decoder, cache: PagedKvCache, sequence: int, prompt: np.ndarray) -> Tensor:
    last = prompt.size - 1
    return forward_token(decoder, cache, sequence, token_id=int(prompt[last]), position=last)


def decoded(
    decoder: Decoder, cache: PagedKvCache, sequence: int, tokens: Iterable[int], *, first: int
) -> list[Tensor]:
    """Logits after each of these tokens, run one by one from position `first` on."""
    return [
        forward_token(decoder, cache, sequence, token_id=token, position=first + index)
        for index, token in enumerate(tokens)
    ]


def new_cache(decoder: Decoder, *, pages: int = 64) -> PagedKvCache:
    return PagedKvCache(
        decoder.shape,
        pages=pages,
        page_tokens=PAGE_TOKENS,
        dtype=decoder.dtype,
        device=decoder.device,
    )


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=LOGITS[found.dtype])


@pytest.mark.parametrize("head", [0, HEAD_TOKENS])
def test_keeping_all_through_the_sparse_path_equals_dense(
    decoder: Decoder, prompt: np.ndarray, head: int
) -> None:
    dense = TargetRig(decoder).run(generate_call(prompt))
    sparse = TargetRig(decoder).run(generate_call(prompt, plan=keep_all(PROMPT_TOKENS, head=head)))
    expected_kinds = {PrefillKind.SPARSE} | ({PrefillKind.PROTECTED} if head else set())
    assert sparse.finished.sparse
    assert sparse.kinds == expected_kinds
    assert dense.kinds == {PrefillKind.DENSE}
    assert sparse.tokens == dense.tokens
    assert sparse.finished.slots == dense.finished.slots == dense.finished.positions


def test_dropping_chunks_changes_the_reply(
    decoder: Decoder, prompt: np.ndarray, sparse_plan: KeepPlan
) -> None:
    """Otherwise equality with dense would prove nothing."""
    dense = prefilled(decoder, new_cache(decoder), prompt)[1]
    sparse = prefilled(decoder, new_cache(decoder), prompt, plan=sparse_plan)[1]
    assert (dense - sparse).abs().max() > 1e-3


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_the_prefill_chunk_size_changes_nothing(
    decoder: Decoder, prompt: np.ndarray, sparse_plan: KeepPlan, chunk: int, is_sparse: bool
) -> None:
    call = generate_call(prompt, plan=sparse_plan if is_sparse else None)
    expected = TargetRig(decoder, chunk_tokens=32).run(call)
    found = TargetRig(decoder, chunk_tokens=chunk).run(call)
    assert found.tokens == expected.tokens
    assert len(found.steps) != len(expected.steps)


def test_decoding_tokens_equals_prefilling_them(decoder: Decoder, prompt: np.ndarray) -> None:
    reply = TargetRig(decoder).run(generate_call(prompt)).tokens
    cache = new_cache(decoder)
    sequence, _ = prefilled(decoder, cache, prompt)
    logits = decoded(decoder, cache, sequence, reply[:-1], first=PROMPT_TOKENS)
    longer = np.append(prompt, reply[:-1]).astype(np.uint32)
    _, expected = prefilled(decoder, new_cache(decoder), longer)
    assert_close(logits[-1], expected)
    assert TargetRig(decoder).run(generate_call(longer)).tokens[0] == reply[-1]


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_fork_and_its_origin_decode_as_two_fresh_sequences(
    decoder: Decoder, prompt: np.ndarray, sparse_plan: KeepPlan, is_sparse: bool
) -> None:
    plan = sparse_plan if is_sparse else None
    replies = [[5, 6, 7, 8, 9], [100, 90, 80, 70, 60]]
    cache = new_cache(decoder)
    origin, _ = prefilled(decoder, cache, prompt, plan=plan)
    fork = cache.fork(origin, PROMPT_TOKENS)
    found: list[list[Tensor]] = [[], []]
    for step in range(len(replies[0])):
        for branch, sequence in enumerate((origin, fork)):
            token = replies[branch][step : step + 1]
            found[branch] += decoded(decoder, cache, sequence, token, first=PROMPT_TOKENS + step)
    cache.check_invariants()
    for branch, reply in enumerate(replies):
        fresh = new_cache(decoder)
        sequence, _ = prefilled(decoder, fresh, prompt, plan=plan)
        expected = decoded(decoder, fresh, sequence, reply, first=PROMPT_TOKENS)
        assert_close(torch.stack(found[branch]), torch.stack(expected))
    assert (found[0][-1] - found[1][-1]).abs().max() > 1e-3


def test_two_requests_on_one_base_equal_two_fresh_ones(
    decoder: Decoder, prompt: np.ndarray
) -> None:
    rig = TargetRig(decoder)
    base = rig.run(generate_call(prompt, handle="base", retain=True))
    state = np.append(prompt, base.tokens[:-1]).astype(np.uint32)
    prompts = [np.append(state, random_prompt(decoder, 11, seed=seed)) for seed in (1, 2)]
    together = rig.run_together(
        *(generate_call(each, base=("base", state.size)) for each in prompts)
    )
    for each, found in zip(prompts, together, strict=True):
        assert found.restored_tokens == state.size
        assert found.finished.counts.executed == 11
        assert found.tokens == TargetRig(decoder).run(generate_call(each)).tokens


@pytest.mark.parametrize("is_sparse", [False, True])
def test_what_was_truncated_leaves_no_trace(
    decoder: Decoder, prompt: np.ndarray, sparse_plan: KeepPlan, is_sparse: bool
) -> None:
    plan = sparse_plan if is_sparse else None
    reply = [5, 6, 7]
    cache = new_cache(decoder)
    sequence, _ = prefilled(decoder, cache, prompt, plan=plan)
    decoded(decoder, cache, sequence, range(200, 220), first=PROMPT_TOKENS)
    cache.truncate(sequence, PROMPT_TOKENS)
    found = decoded(decoder, cache, sequence, reply, first=PROMPT_TOKENS)
    untouched = new_cache(decoder)
    sequence, _ = prefilled(decoder, untouched, prompt, plan=plan)
    expected = decoded(decoder, untouched, sequence, reply, first=PROMPT_TOKENS)
    assert_close(torch.stack(found), torch.stack(expected))


def test_a_prompt_truncated_in_its_middle_can_go_on_differently(
    decoder: Decoder, prompt: np.ndarray
) -> None:
    cut = 45
    other = np.append(prompt[:cut], random_prompt(decoder, 30, seed=9)).astype(np.uint32)
    cache = new_cache(decoder)
    sequence, _ = prefilled(decoder, cache, prompt)
    cache.truncate(sequence, cut)
    extend(decoder, cache, sequence, other, start=cut)
    _, expected = prefilled(decoder, new_cache(decoder), other)
    assert_close(kick_off(decoder, cache, sequence, other), expected)


@pytest.mark.parametrize("scattered", ["few runs", "many runs"])
def test_where_the_pages_lie_changes_nothing(
    decoder: Decoder, prompt: np.ndarray, scattered: str
) -> None:
    cache = new_cache(decoder)
    fragment(cache, every=2 if scattered == "many runs" else 5)
    sequence, found = prefilled(decoder, cache, prompt)
    runs = len(cache.runs(sequence))
    assert runs > RUNS_MAX if scattered == "many runs" else 1 < runs <= RUNS_MAX
    contiguous = new_cache(decoder)
    sequence, expected = prefilled(decoder, contiguous, prompt)
    assert len(contiguous.runs(sequence)) == 1
    assert_close(found, expected)


def fragment(cache: PagedKvCache, *, every: int) -> None:
    """Leave extents of every - 1 pages free, filled with large values, between pages of others."""
    blockers = []
    for _ in range(cache.pages_total):
        sequence = cache.new_sequence()
        slots = cache.append(sequence, np.arange(cache.page_tokens))
        for layer in range(cache.layers):
            shape = (cache.page_tokens, cache.kv_heads, cache.head_dim)
            noise = torch.full(shape, 1e3, dtype=cache.k.dtype)
            cache.write(layer, slots, noise, noise)
        blockers.append(sequence)
    for sequence in blockers:
        first_slot, _ = cache.runs(sequence)[0]
        if first_slot // cache.page_tokens % every:
            cache.release(sequence)


def test_a_sparse_reply_equals_transformers_on_the_kept_tokens(
    checkpoint: Path, prompt: np.ndarray, sparse_plan: KeepPlan
) -> None:
    """Eager attention, pruned position_ids, an explicit mask: nothing of ours in it, in float32."""
    decoder = load_decoder(checkpoint, dtype=torch.float32, device="cpu")
    reply = TargetRig(decoder).run(generate_call(prompt, plan=sparse_plan)).tokens
    cache = new_cache(decoder)
    sequence, first = prefilled(decoder, cache, prompt, plan=sparse_plan, chunk=16)
    logits = [first, *decoded(decoder, cache, sequence, reply[:-1], first=PROMPT_TOKENS)]

    kept = np.concatenate((np.arange(HEAD_TOKENS), kept_positions(sparse_plan)))
    assert kept.size < PROMPT_TOKENS
    positions = np.append(kept, PROMPT_TOKENS + np.arange(len(reply) - 1))
    token_ids = np.append(prompt[kept], reply[:-1]).astype(np.int64)
    expected = eager_logits(checkpoint, torch.from_numpy(token_ids), torch.from_numpy(positions))
    expected = expected[kept.size - 1 :]
    assert_close(torch.stack(logits), expected)
    assert reply == expected.argmax(dim=-1).tolist()


def test_beside_other_requests_a_reply_is_what_it_is_alone(
    decoder: Decoder, prompt: np.ndarray, sparse_plan: KeepPlan
) -> None:
    calls = [
        generate_call(prompt[:30], stops=Stops(max_tokens=20)),
        generate_call(prompt, plan=sparse_plan),
        generate_call(prompt[::-1].copy()),
        generate_call(prompt[:50], sampling=Sampling(temperature=0.9, top_p=0.9, seed=3)),
    ]
    together = TargetRig(decoder).run_together(*calls)
    for call, found in zip(calls, together, strict=True):
        alone = TargetRig(decoder).run(call)
        assert found.tokens == alone.tokens
        assert found.finished.counts == alone.finished.counts
        # Beside others the prefill took more and smaller steps.
        assert len(found.steps) > len(alone.steps)


def test_resuming_a_sparse_state_equals_decoding_on(
    decoder: Decoder, prompt: np.ndarray, sparse_plan: KeepPlan
) -> None:
    """The next turn's tokens run densely behind the dropped ones, at their own positions."""
    rig = TargetRig(decoder)
    first = rig.run(generate_call(prompt, plan=sparse_plan, handle="turn-1", retain=True))
    suffix = random_prompt(decoder, 9, seed=4)
    state = np.append(prompt, first.tokens[:-1]).astype(np.uint32)
    longer = np.append(state, suffix).astype(np.uint32)
    found = rig.run(generate_call(longer, base=("turn-1", state.size)))
    cache = new_cache(decoder)
    sequence, _ = prefilled(decoder, cache, prompt, plan=sparse_plan)
    ids = [*first.tokens[:-1], *suffix.tolist()]
    logits = decoded(decoder, cache, sequence, ids, first=PROMPT_TOKENS)
    assert found.tokens[0] == int(logits[-1].argmax())
    finished: Finished = found.finished
    assert finished.counts.sparse_restored == state.size
    assert finished.counts.dense_restored == 0
    assert finished.counts.executed == suffix.size
    assert not finished.sparse
