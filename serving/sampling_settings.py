"""How a reply is drawn and when it ends, as values. serving/limits.py checks them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. temperature 0 is greedy, top_k 0 is off, top_p 1 is off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """When the reply ends, besides the model's own end tokens and its last position."""

    max_tokens: int
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_end_tokens: bool = False
