"""What became of every chunk of a prompt, from its keep plan."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from serving.keep_plan import KeepPlan, Run, run_members


class ChunkState(enum.Enum):
    """The numbers are those of ChunkState in gateway.proto."""

    PROTECTED_HEAD = 1
    FORCED = 2
    RANKED = 3
    DROPPED = 4


@dataclass(frozen=True, slots=True)
class Chunk:
    """positions: what it covers of the prompt; the last chunk may be short."""

    index: int
    positions: Run
    state: ChunkState


def chunks_of(plan: KeepPlan) -> list[Chunk]:
    """All chunks of the plan's prompt, in order."""
    kept, forced = set(run_members(plan.kept)), set(run_members(plan.forced))
    size = plan.settings.chunk_tokens
    head_chunks = plan.protected_head_tokens // size

    def state(chunk: int) -> ChunkState:
        if chunk < head_chunks:
            return ChunkState.PROTECTED_HEAD
        if chunk in forced:
            return ChunkState.FORCED
        return ChunkState.RANKED if chunk in kept else ChunkState.DROPPED

    return [
        Chunk(
            chunk,
            Run(chunk * size, min((chunk + 1) * size, plan.prompt_tokens)),
            state(chunk),
        )
        for chunk in range(plan.chunks_total)
    ]
