"""Settings of the gateway: SPECPREFILL_GATEWAY_*."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator
from pydantic_settings import SettingsConfigDict

from serving.settings import ServiceSettings

Address = Annotated[str, StringConstraints(pattern=r"^[^\s/]+:\d{1,5}$")]


class GatewaySettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="SPECPREFILL_GATEWAY_")

    # The target's: its tokenizer and its chat template.
    model_dir: Path
    # host:port.
    scorer_address: Address
    target_address: Address

    # What a request gets that does not say otherwise.
    prefill_mode: Literal["auto", "dense", "sparse"] = "auto"
    threshold_tokens: int = Field(8192, ge=1, le=2**31 - 1)
    keep_basis_points: int = Field(2000, ge=1, le=10_000)
    chunk_tokens: int = Field(32, ge=1, le=4096)
    tail_tokens: int = Field(512, ge=0, le=65_536)
    pool_tokens: int = Field(13, ge=1, le=127)
    # auto: what the scorer names as its default.
    query_mode: Literal["auto", "lookahead", "tail_window"] = "auto"
    lookahead_tokens: int = Field(8, ge=1, le=1024)
    window_tokens: int = Field(16, ge=1, le=4096)
    max_tokens_default: int = Field(512, ge=1, le=2**20)
    completion_tokens_max: int = Field(8192, ge=1, le=2**20)

    # Text of one prompt, before it is tokenised.
    prompt_bytes_max: int = Field(4 * 2**20, ge=1, le=2**30)
    # A render longer than this is refused: a template may write more than it was given.
    rendered_characters_max: int = Field(16 * 2**20, ge=1, le=2**30)
    # Turns in work, and turns that wait for one of them to end.
    turns_running_max: int = Field(64, ge=1, le=65_536)
    turns_waiting_max: int = Field(256, ge=0, le=65_536)

    # The longest a turn may take, whatever the caller's deadline.
    turn_s_max: float = Field(3600.0, gt=0, le=86_400)
    # Scoring that takes longer is given up, and the turn goes dense.
    score_s_max: float = Field(600.0, gt=0, le=86_400)
    # The services' deadline is this much before the caller's, so that their error arrives in time.
    deadline_margin_s: float = Field(0.05, ge=0, le=60)
    # A message that the client does not take within this time ends its stream.
    write_s_max: float = Field(30.0, gt=0, le=86_400)
    # How often the services are asked what they are, and how long they may take to say it.
    refresh_s: float = Field(1.0, ge=0.05, le=3600)
    info_s_max: float = Field(2.0, ge=0.05, le=60)
    # Freeing a sequence after its turn; the service's lease does it if this fails.
    release_s_max: float = Field(5.0, ge=0.05, le=600)

    @model_validator(mode="after")
    def _defaults_fit_limits(self) -> Self:
        if self.max_tokens_default > self.completion_tokens_max:
            raise ValueError(
                "max_tokens_default is above completion_tokens_max: no request could use it"
            )
        if self.pool_tokens % 2 == 0:
            raise ValueError("pool_tokens must be odd")
        return self
