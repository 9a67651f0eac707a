"""What of a prompt is prefilled, in which order, and the forwards that do it.

The target executes keep plans and never reclassifies. Order: the protected head densely (restored
or computed), then the kept positions before M-1, ascending, in prefill chunks; last the kick-off:
the last prompt token alone at position M-1, whose logits give the first token. A dense prefill is
the same from its own base with every position kept.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention import begin_forward
from engine.decoder import Decoder
from engine.forward import fill_chunk
from engine.kv_cache import PagedKvCache
from serving.keep_plan import KeepPlan, kept_positions


class PrefillKind(enum.Enum):
    PROTECTED = "protected"
    SPARSE = "sparse"
    DENSE = "dense"


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """Positions that are filled one prefill chunk after the other; int64 [tokens], ascending."""

    kind: PrefillKind
    positions: np.ndarray


def prefill_parts(
    *, prompt_tokens: int, base_tokens: int, plan: KeepPlan | None
) -> tuple[PrefillPart, ...]:
    """Parts to fill before the kick-off; empty ones are left out.

    With a plan, base_tokens is 0 (no base) or the protected head's length.
    """
    kick_off = prompt_tokens - 1
    assert 0 <= base_tokens <= kick_off
    if plan is None:
        parts = [PrefillPart(PrefillKind.DENSE, np.arange(base_tokens, kick_off, dtype=np.int64))]
    else:
        head = plan.protected_head_tokens
        assert base_tokens in (0, head)
        kept = kept_positions(plan)
        assert kept[-1] == kick_off
        parts = [
            PrefillPart(PrefillKind.PROTECTED, np.arange(base_tokens, head, dtype=np.int64)),
            PrefillPart(PrefillKind.SPARSE, kept[:-1]),
        ]
    return tuple(part for part in parts if part.positions.size)


def fill(
    decoder: Decoder,
    cache: PagedKvCache,
    sequence: int,
    *,
    token_ids: np.ndarray,
    positions: np.ndarray,
    chunk_tokens: Callable[[], int],
) -> Iterator[int]:
    """Write the KV of these positions; one prefill chunk a step, yields how many tokens are done.

    token_ids: [prompt_tokens], the whole prompt; positions: int64 [tokens], ascending, the part to
    fill. chunk_tokens is asked before every step: a prefill takes smaller steps while others wait.
    """
    done = 0
    while done < positions.size:
        step = positions[done : done + chunk_tokens()]
        fill_chunk(decoder, cache, sequence, token_ids=token_ids[step], positions=step)
        done += step.size
        yield done


@torch.inference_mode()
def forward_token(
    decoder: Decoder, cache: PagedKvCache, sequence: int, *, token_id: int, position: int
) -> Tensor:
    """Run one token (the kick-off, or a decode step) and return its logits [vocab]."""
    ids = torch.tensor([token_id], dtype=torch.int64, device=decoder.device)
    at = torch.tensor([position], dtype=torch.int64, device=decoder.device)
    hidden = decoder(ids, at, begin_forward(cache, [(sequence, at)]))
    return decoder.logits(hidden)[0]
