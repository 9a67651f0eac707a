"""Stages of a scoring."""

from __future__ import annotations

import enum


class Stage(enum.Enum):
    # Before the first step, and while other jobs take their turns.
    QUEUE = "queue"
    RESTORE = "restore"
    PREFILL = "prefill"
    LOOKAHEAD = "lookahead"
    K_PASS = "k_pass"
    SELECT = "select"
