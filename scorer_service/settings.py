"""The scorer's settings; SPECPREFILL_SCORER_<FIELD> in the environment."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from serving.model_settings import ModelServiceSettings


class ScorerSettings(ModelServiceSettings):
    """What the draft is, and how large a request may be."""

    model_config = SettingsConfigDict(env_prefix="SPECPREFILL_SCORER_")

    # The draft is the first layers of the checkpoint; unset: all of them.
    draft_layers: int | None = Field(None, ge=1, le=1024)
    lookahead_tokens_max: int = Field(64, ge=1, le=1024)
    window_tokens_max: int = Field(256, ge=1, le=4096)
