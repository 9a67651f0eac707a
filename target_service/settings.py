"""The target's settings; SPECPREFILL_TARGET_<FIELD> in the environment."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from serving.model_settings import ModelServiceSettings


class TargetSettings(ModelServiceSettings):
    """How long a reply may be and how it is sent. Forks and releases do not count as jobs."""

    model_config = SettingsConfigDict(env_prefix="SPECPREFILL_TARGET_")

    completion_tokens_max: int = Field(4096, ge=1, le=2**20)
    # Tokens after the first are gathered this long into one message.
    flush_interval_s: float = Field(0.015, ge=0.0, le=1.0)
