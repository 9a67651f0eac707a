"""Why a reply ended. The numbers are those of FinishReason in types.proto."""

from __future__ import annotations

import enum


class FinishReason(enum.Enum):
    END_TOKEN = 1
    STOP_TOKEN = 2
    STOP_STRING = 3
    MAX_TOKENS = 4
    CONTEXT_END = 5
