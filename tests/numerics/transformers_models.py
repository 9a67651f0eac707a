"""Stock transformers models of a checkpoint directory: the oracle of the decoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.hf_decoder import ATTENTION, HfDecoder
from engine.rope import Rope
from engine.weights import read_checkpoint


def eager_logits(directory: Path, token_ids: Tensor, positions: Tensor) -> Tensor:
    """[tokens, vocab] float32 of transformers' own eager attention, with an explicit 4-D mask.

    Without it, gaps in the positions would be taken for boundaries between packed sequences.
    """
    model = _stock(directory, dtype=torch.float32, attention="eager")
    tokens = len(token_ids)
    later = torch.ones(tokens, tokens).triu(diagonal=1)
    mask = torch.zeros(tokens, tokens).masked_fill(later.bool(), torch.finfo(torch.float32).min)
    with torch.inference_mode():
        return model(
            input_ids=token_ids[None],
            attention_mask=mask[None, None],
            position_ids=positions[None],
            use_cache=False,
        ).logits[0]


def plain_eager_logits(directory: Path, token_ids: Tensor) -> Tensor:
    """[tokens, vocab] float32 of a stock model that derives mask and positions itself."""
    model = _stock(directory, dtype=torch.float32, attention="eager")
    with torch.inference_mode():
        return model(input_ids=token_ids[None]).logits[0]


def double_adapter(directory: Path) -> HfDecoder:
    """The adapter over a float64 model whose norms and RoPE are float64, too.

    transformers computes both in float32 whatever the model's dtype is.
    """
    model = _stock(directory, dtype=torch.float64, attention=ATTENTION)
    config = read_checkpoint(directory)[0]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(
                    child.weight.shape, eps=child.variance_epsilon, dtype=torch.float64
                )
                norm.weight = child.weight
                setattr(parent, name, norm)
    model.model.rotary_emb = _DoubleRope(
        Rope(
            config.rope,
            head_dim=config.shape.head_dim,
            dtype=torch.float64,
            device=torch.device("cpu"),
        )
    )
    return HfDecoder(model)


class _DoubleRope(torch.nn.Module):
    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self._rope = rope

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rope.angles(position_ids[0])
        cos, sin = (x[:, 0].repeat(1, 2)[None] for x in (cos, sin))
        return cos, sin


def _stock(directory: Path, *, dtype: torch.dtype, attention: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation=attention, local_files_only=True
    ).eval()
