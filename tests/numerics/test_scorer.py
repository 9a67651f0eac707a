"""A whole scoring: equal to the reference, and equal however the prompt's KV came about."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention import RUNS_MAX
from engine.decoder import Decoder
from engine.kv_cache import PagedKvCache
from engine.weights import load_decoder
from scorer_service.keep import mean_per_chunk
from scorer_service.scoring import Phase, Scored, ScoreProgress
from serving.errors import AlreadyExists, KvCacheFull, NonFiniteImportance, ServiceError
from serving.keep_plan import KeepPlan, QueryMode, Run, run_members
from tests.numerics.plain_attend import PlainAttend
from tests.numerics.reference_importance import reference_importance
from tests.numerics.scorer_rig import ScorerRig, Turns, job_for, prompt
from tests.tiny_models import write_tiny_model
from tests.tolerances import PLAN_CUT

LOOKAHEAD, TAIL_WINDOW = QueryMode.LOOKAHEAD, QueryMode.TAIL_WINDOW
MODES = pytest.mark.parametrize("mode", [LOOKAHEAD, TAIL_WINDOW])
LAYERS = 3


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        arch: write_tiny_model(root / arch, arch, layers=LAYERS, positions_max=512)
        for arch in ("llama", "qwen3")
    }


@pytest.fixture(scope="module")
def decoders(model_dirs: dict[str, Path]) -> object:
    @cache
    def load(
        dtype: torch.dtype = torch.float64, arch: str = "llama", layers: int = LAYERS
    ) -> Decoder:
        return load_decoder(model_dirs[arch], dtype=dtype, device="cpu", layers=layers)

    return load


@pytest.fixture
def draft(decoders) -> Decoder:
    return decoders()


class RecordingAttend(PlainAttend):
    """Keeps every query, too: layer -> rows [q_heads, head_dim]."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: dict[int, list[Tensor]] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        self.queries.setdefault(layer, []).extend(q)
        return super().__call__(q, k, v, layer)


def run_plainly(decoder: Decoder, ids: list[int]) -> tuple[RecordingAttend, int]:
    """One dense forward of everything; returns what it saw and the greedy next token."""
    attend = RecordingAttend()
    hidden = decoder(torch.tensor(ids), torch.arange(len(ids)), attend)
    return attend, int(decoder.logits(hidden[-1:]).argmax())


def plain_lookahead(decoder: Decoder, ids: list[int], tokens: int) -> list[int]:
    decoded: list[int] = []
    for _ in range(tokens):
        decoded.append(run_plainly(decoder, ids + decoded)[1])
    return decoded


def plain_importance(
    decoder: Decoder, prompt_ids: np.ndarray, mode: QueryMode, *, queries: int
) -> np.ndarray:
    ids, tokens = prompt_ids.tolist(), prompt_ids.size
    decoded = plain_lookahead(decoder, ids, queries - 1) if mode is LOOKAHEAD else []
    attend, _ = run_plainly(decoder, ids + decoded)
    layers = range(decoder.shape.layers)
    q = torch.stack([torch.stack(attend.queries[layer][-queries:]) for layer in layers])
    k = torch.stack([torch.stack(attend.keys[layer][:tokens]) for layer in layers])
    visible = [min(tokens + len(decoded) - queries + 1 + i, tokens) for i in range(queries)]
    return reference_importance(q, k, visible=visible, pool_tokens=13).float().numpy()


def assert_same_plan(found: Scored, expected: Scored, dtype: torch.dtype) -> None:
    """Equal in float64; in float32 chunks within PLAN_CUT of the cut may have changed sides."""
    if dtype is torch.float64:
        np.testing.assert_array_equal(found.importance, expected.importance)
        assert found.plan == expected.plan
        return
    np.testing.assert_allclose(found.importance, expected.importance, rtol=PLAN_CUT)
    changed = kept(found.plan) ^ kept(expected.plan)
    by_chunk = expected.chunk_importance
    cut = min(by_chunk[list(kept(expected.plan))])
    assert all(abs(by_chunk[chunk] - cut) <= 2 * PLAN_CUT * cut for chunk in changed)


def kept(plan: KeepPlan) -> set[int]:
    return set(run_members(plan.kept))


@MODES
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("layers", [1, LAYERS])
def test_a_cold_scoring_equals_the_reference(
    decoders, mode: QueryMode, arch: str, layers: int
) -> None:
    decoder = decoders(arch=arch, layers=layers)
    ids = prompt(61, vocab=decoder.shape.vocab)
    job = job_for(ids, mode, lookahead_tokens=5, window_tokens=11)
    scored = ScorerRig(decoder, prefill_chunk_tokens=16).score(job)
    queries = 5 if mode is LOOKAHEAD else 11
    expected = plain_importance(decoder, ids, mode, queries=queries)
    np.testing.assert_allclose(scored.importance, expected, rtol=1e-6)
    assert scored.queries == queries
    best = np.argsort(-mean_per_chunk(expected, 4), kind="stable")[: scored.plan.kept_chunks]
    assert kept(scored.plan) == set(best.tolist())


@MODES
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("base_tokens", [1, 8, 50, 77, 89, 90])
def test_warm_equals_cold(decoders, mode: QueryMode, dtype: torch.dtype, base_tokens: int) -> None:
    decoder = decoders(dtype)
    ids = prompt(90, vocab=decoder.shape.vocab)
    rig = ScorerRig(decoder)
    cold = rig.score(job_for(ids, mode))
    rig.score(job_for(ids[:base_tokens], mode, keep_handle="base", keep_basis_points=10000))
    warm = rig.score(job_for(ids, mode, base=("base", base_tokens)))
    leave = 1 if mode is LOOKAHEAD else 16
    assert warm.restored_tokens == min(base_tokens, 90 - leave)
    assert warm.prefilled_tokens == 90 - warm.restored_tokens
    assert cold.restored_tokens == 0
    assert cold.prefilled_tokens == 90
    assert_same_plan(warm, cold, dtype)


@MODES
def test_a_kept_sequence_grows_from_prompt_to_longer_prompt(draft, mode: QueryMode) -> None:
    ids = prompt(120, vocab=draft.shape.vocab)
    rig = ScorerRig(draft)
    rig.score(job_for(ids[:40], mode, keep_handle="a"))
    rig.score(job_for(ids[:83], mode, base=("a", 40), keep_handle="b"))
    warm = rig.score(job_for(ids, mode, base=("b", 83)))
    assert warm.restored_tokens == 83
    assert_same_plan(warm, rig.score(job_for(ids, mode)), torch.float64)


@MODES
@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 89, 90, 4096])
def test_the_prefill_chunk_changes_nothing(draft, mode: QueryMode, chunk_tokens: int) -> None:
    ids = prompt(90, vocab=draft.shape.vocab)
    found = ScorerRig(draft, prefill_chunk_tokens=chunk_tokens).score(job_for(ids, mode))
    assert_same_plan(found, ScorerRig(draft).score(job_for(ids, mode)), torch.float64)


@MODES
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_a_prompt_shorter_than_its_window_is_scored(draft, mode: QueryMode, tokens: int) -> None:
    ids = prompt(tokens, vocab=draft.shape.vocab)
    scored = ScorerRig(draft).score(job_for(ids, mode, keep_basis_points=10000))
    queries = 8 if mode is LOOKAHEAD else tokens
    assert scored.queries == queries
    expected = plain_importance(draft, ids, mode, queries=queries)
    np.testing.assert_allclose(scored.importance, expected, rtol=1e-6)
    assert kept(scored.plan) == set(range(-(-tokens // 4)))


@pytest.mark.parametrize("end_at", [1, 3, 7])
def test_an_end_token_ends_the_queries_that_count(draft, end_at: int) -> None:
    ids = prompt(50, vocab=draft.shape.vocab)
    decoded = plain_lookahead(draft, ids.tolist(), 7)
    ends = frozenset({decoded[end_at - 1]})
    first = decoded.index(decoded[end_at - 1]) + 1
    scored = ScorerRig(draft, end_token_ids=ends).score(job_for(ids, LOOKAHEAD))
    assert scored.queries == first
    expected = plain_importance(draft, ids, LOOKAHEAD, queries=first)
    np.testing.assert_allclose(scored.importance, expected, rtol=1e-6)


def test_a_seeded_lookahead_draws_the_same_again(draft) -> None:
    ids = prompt(60, vocab=draft.shape.vocab)

    def importance(seed: int) -> np.ndarray:
        job = job_for(ids, LOOKAHEAD, lookahead_temperature=5.0, lookahead_seed=seed)
        return ScorerRig(draft).score(job).importance

    np.testing.assert_array_equal(importance(1), importance(1))
    assert not np.array_equal(importance(1), importance(2))


@MODES
def test_a_scoring_leaves_the_pages_of_its_base_as_they_were(draft, mode: QueryMode) -> None:
    ids = prompt(90, vocab=draft.shape.vocab)
    rig = ScorerRig(draft)
    rig.score(job_for(ids[:85], mode, keep_handle="base"))
    sequence = rig.handles.get("base").sequence
    before = held(rig.cache, sequence)
    rig.score(job_for(ids, mode, base=("base", 85), keep_handle="longer"))
    assert all(map(torch.equal, before, held(rig.cache, sequence)))
    assert rig.cache.positions(sequence).tolist() == list(range(85))
    longer = rig.handles.get("longer").sequence
    assert rig.cache.positions(longer).tolist() == list(range(90))


def held(cache: PagedKvCache, sequence: int) -> list[Tensor]:
    return [x.clone() for layer in range(cache.layers) for x in cache.gather(layer, sequence)]


@MODES
@pytest.mark.parametrize(("stride", "is_gathered"), [(5, False), (2, True)])
def test_scattered_pages_change_nothing(
    draft, mode: QueryMode, stride: int, is_gathered: bool
) -> None:
    ids = prompt(180, vocab=draft.shape.vocab)
    rig = ScorerRig(draft, pages=50)
    fillers = [rig.cache.new_sequence() for _ in range(50)]
    for filler in fillers:
        rig.cache.append(filler, np.arange(8))
    for filler in fillers:
        ((first_slot, _),) = rig.cache.runs(filler)
        if first_slot // 8 % stride:
            rig.cache.release(filler)
    *_, scored = rig.steps(job_for(ids, mode, keep_handle="kept"))
    runs = len(rig.cache.runs(rig.handles.get("kept").sequence))
    assert runs > 1
    assert (runs > RUNS_MAX) is is_gathered
    assert_same_plan(scored, ScorerRig(draft).score(job_for(ids, mode)), torch.float64)


@MODES
def test_a_scoring_that_is_closed_after_any_step_leaves_nothing(draft, mode: QueryMode) -> None:
    ids = prompt(70, vocab=draft.shape.vocab)
    rig = ScorerRig(draft, prefill_chunk_tokens=16)
    rig.score(job_for(ids[:30], mode, keep_handle="base"))
    pages = rig.pages_used
    job = job_for(ids, mode, base=("base", 30))
    seen = set()
    for taken in range(1, len(list(rig.steps(job)))):
        steps = rig.steps(job)
        seen |= {
            event.phase for _ in range(taken) if isinstance(event := next(steps), ScoreProgress)
        }
        steps.close()
        assert rig.pages_used == pages
        rig.handles.check_invariants()
    assert seen == set(Phase) - (set() if mode is LOOKAHEAD else {Phase.QUERIES})


@MODES
def test_progress_counts_what_is_run_and_never_goes_back(draft, mode: QueryMode) -> None:
    ids = prompt(70, vocab=draft.shape.vocab)
    events = list(ScorerRig(draft, prefill_chunk_tokens=16).steps(job_for(ids, mode)))
    prefill = [event.done_tokens for event in events[:-1] if event.phase is Phase.PREFILL]
    last = 69 if mode is LOOKAHEAD else 70
    assert prefill == [0, 16, 32, 48, 64, last]
    queries = [event.done_tokens for event in events[:-1] if event.phase is Phase.QUERIES]
    assert queries == (list(range(1, 9)) if mode is LOOKAHEAD else [])


def test_the_prefill_takes_small_chunks_while_others_wait(draft) -> None:
    rig = ScorerRig(draft)
    job = job_for(prompt(20, vocab=draft.shape.vocab), TAIL_WINDOW)
    turns = Turns()
    steps = rig.scorer.steps(job, rig.scorer.budget(job), turns)
    turns.others_waiting = True
    assert [next(steps).done_tokens for _ in range(3)] == [0, 4, 8]
    turns.others_waiting = False
    assert next(steps).done_tokens == 20
    assert isinstance(list(steps)[-1], Scored)


def test_a_prompt_that_does_not_fit_is_refused_before_its_prefill(draft) -> None:
    rig = ScorerRig(draft, pages=8)
    ids = prompt(64, vocab=draft.shape.vocab)
    assert_refused_at_once(rig, job_for(ids, LOOKAHEAD), KvCacheFull)  # 64 and 7 more: 9 pages
    assert rig.pages_used == 0
    assert rig.score(job_for(ids, TAIL_WINDOW)).prefilled_tokens == 64


def test_pages_promised_to_a_running_scoring_are_not_promised_again(draft) -> None:
    rig = ScorerRig(draft, pages=12, prefill_chunk_tokens=8)
    ids = prompt(64, vocab=draft.shape.vocab)
    running = rig.steps(job_for(ids, TAIL_WINDOW))
    next(running)
    assert_refused_at_once(rig, job_for(ids, TAIL_WINDOW), KvCacheFull)
    assert isinstance(list(running)[-1], Scored)
    assert rig.score(job_for(ids, TAIL_WINDOW)).prefilled_tokens == 64


def test_a_handle_that_is_taken_is_refused_before_any_work(draft) -> None:
    rig = ScorerRig(draft)
    ids = prompt(40, vocab=draft.shape.vocab)
    rig.score(job_for(ids, TAIL_WINDOW, keep_handle="taken"))
    pages = rig.pages_used
    assert_refused_at_once(rig, job_for(ids, TAIL_WINDOW, keep_handle="taken"), AlreadyExists)
    assert rig.pages_used == pages


def assert_refused_at_once(rig: ScorerRig, job, error: type[ServiceError]) -> None:
    with pytest.raises(error):
        next(rig.steps(job))


def test_a_draft_that_overflows_is_a_typed_error_and_keeps_nothing(model_dirs) -> None:
    decoder = load_decoder(model_dirs["llama"], dtype=torch.float32, device="cpu")
    decoder._weights.layers[1].qkv.fill_(torch.nan)
    rig = ScorerRig(decoder)
    job = job_for(prompt(40, vocab=decoder.shape.vocab), TAIL_WINDOW, keep_handle="kept")
    with pytest.raises(NonFiniteImportance):
        list(rig.steps(job))
    assert rig.pages_used == 0
    assert len(rig.handles) == 0


def test_another_gateway_instance_frees_what_the_first_one_kept(draft) -> None:
    rig = ScorerRig(draft)
    ids = prompt(40, vocab=draft.shape.vocab)
    rig.score(job_for(ids, TAIL_WINDOW, keep_handle="old"))
    job = job_for(ids, TAIL_WINDOW)
    job.instance_id = "another gateway"
    rig.score(job)
    assert rig.pages_used == 0


def test_protected_parts_are_forced_into_the_plan(draft) -> None:
    ids = prompt(100, vocab=draft.shape.vocab)
    spans = (Run(50, 53),)
    job = job_for(ids, TAIL_WINDOW, head=10, spans=spans, tail_tokens=4)
    plan = ScorerRig(draft).score(job).plan
    assert set(run_members(plan.forced)) == {2, 12, 13, 24}
    assert kept(plan) >= {2, 12, 13, 24}
    assert min(kept(plan)) == 2
    assert plan.kept_chunks == 7  # 30 % of the 23 chunks from the head's end on


def test_the_stages_add_up_to_the_time_of_the_steps(draft) -> None:
    times = iter(range(10_000))
    rig = ScorerRig(draft)
    rig.scorer.time_s = lambda: float(next(times))
    ids = prompt(40, vocab=draft.shape.vocab)
    scored = rig.score(job_for(ids, LOOKAHEAD))
    reads = next(times)
    # The clock ticks once at every reading: from the first one to the last, nothing is lost.
    assert sum(scored.stages_s.values()) == reads - 1
