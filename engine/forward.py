"""Forwards that both model services run."""

from __future__ import annotations

import numpy as np
import torch

from engine.attention import Tap, begin_forward
from engine.decoder import Decoder
from engine.kv_cache import PagedKvCache


@torch.inference_mode()
def fill_chunk(
    decoder: Decoder,
    cache: PagedKvCache,
    sequence: int,
    *,
    token_ids: np.ndarray,
    positions: np.ndarray,
    tap: Tap | None = None,
) -> None:
    """Write the KV of one prefill chunk. token_ids: uint32 [tokens]; positions: int64 [tokens]."""
    ids = torch.from_numpy(token_ids.astype(np.int64)).to(decoder.device)
    at = torch.from_numpy(positions).to(decoder.device)
    decoder.fill(ids, at, begin_forward(cache, [(sequence, positions)], tap=tap))
    settle(decoder)


def settle(decoder: Decoder) -> None:
    """A step is over when its work is: fairness, cancellation and stage times depend on it."""
    if decoder.device.type == "cuda":
        torch.cuda.synchronize(decoder.device)
