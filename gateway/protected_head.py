"""Which leading tokens of a prompt are its protected head: leading system messages and tools.

Templates put them wherever they like, so the head is found by rendering. Two conversations that
differ only in their user turn share exactly what comes before it: the token common prefix of both
renders, as far as the real prompt agrees with it, is the head. Tools alone are found as well. With
neither, the prefix is what the template itself puts first (a default system block, the opening of
the user turn), and that is protected, too.

Where a template puts tools behind earlier turns, the real prompt disagrees before them and they are
ranked like any other text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

LEADING_ROLES = frozenset({"system", "developer"})
# They share no character, so that no tokenizer begins both with one token.
PROBE_USER_TURNS = ("a", "7")


def leading_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The system and developer messages before anything else."""
    return list(takewhile(lambda message: message["role"] in LEADING_ROLES, messages))


def probe_conversations(messages: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Two conversations: the leading messages, then user turns that share nothing."""
    leading = leading_messages(messages)
    return [[*leading, {"role": "user", "content": turn}] for turn in PROBE_USER_TURNS]


def protected_head_tokens(prompt_ids: np.ndarray, probes: Sequence[np.ndarray]) -> int:
    """Leading tokens that all of them share, but never the whole prompt.

    prompt_ids and each probe: uint32 [tokens].
    """
    shared = prompt_ids[:-1]
    for probe in probes:
        shared = shared[: common_prefix(shared, probe)]
    return int(shared.size)


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Length of the longest common prefix of two id arrays."""
    length = min(one.size, other.size)
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if different.size else length
