from __future__ import annotations

from gateway.explain import ChunkState, chunks_of
from serving.keep_plan import KeepPlan, PlanSettings, Run


def test_every_chunk_has_its_state_and_its_positions() -> None:
    plan = KeepPlan(
        prompt_tokens=19,
        settings=PlanSettings(chunk_tokens=4),
        kept=(Run(1, 2), Run(3, 5)),
        forced=(Run(1, 2), Run(4, 5)),
        protected_head_tokens=6,
        protected_spans=(),
        settings_digest=b"",
    )
    head, first, dropped, ranked, last = chunks_of(plan)
    # The head ends inside the second chunk, which is therefore selectable.
    assert head.state is ChunkState.PROTECTED_HEAD
    assert first.state is ChunkState.FORCED
    assert dropped.state is ChunkState.DROPPED
    assert ranked.state is ChunkState.RANKED
    assert last.state is ChunkState.FORCED
    assert [chunk.index for chunk in chunks_of(plan)] == [0, 1, 2, 3, 4]
    assert head.positions == Run(0, 4)
    assert last.positions == Run(16, 19)
