"""Settings that both model services have; no torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from serving.settings import ServiceSettings


class ModelServiceSettings(ServiceSettings):
    """A model, its device, its key-value storage and how its jobs take turns."""

    model_dir: Path
    # auto: float32 on a CPU, bfloat16 on CUDA.
    dtype: Literal["auto", "float32", "float64", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    decoder: Literal["auto", "lean", "transformers"] = "auto"
    torch_threads: int | None = Field(None, ge=1, le=1024)

    # Unset: as many pages as hold kv_tokens.
    kv_pages: int | None = Field(None, ge=1, le=2**24)
    kv_tokens: int = Field(65_536, ge=1, le=2**30)
    page_tokens: int = Field(64, ge=1, le=4096)
    handles_max: int = Field(1024, ge=1, le=2**20)
    release_handles_max: int = Field(1024, ge=1, le=2**20)
    lease_s_max: float = Field(3600.0, ge=1, le=7 * 86_400)
    # How often states that nobody adopted are looked for while no request comes.
    expire_interval_s: float = Field(5.0, ge=0.1, le=3600)

    prefill_chunk_tokens: int = Field(2048, ge=1, le=65_536)
    # The prefill chunk while other jobs wait for their turn.
    prefill_chunk_tokens_shared: int = Field(256, ge=1, le=65_536)
    # Requests queued or running.
    jobs_max: int = Field(64, ge=1, le=4096)
    events_max: int = Field(256, ge=1, le=65_536)

    @property
    def pages(self) -> int:
        """Pages of the key-value storage."""
        return self.kv_pages or -(-self.kv_tokens // self.page_tokens)
