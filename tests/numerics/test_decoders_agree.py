"""The lean decoder against transformers, with and without gaps in the positions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.decoder import Decoder
from engine.model_config import UnsupportedModel
from engine.weights import load_decoder
from tests.numerics.plain_attend import PlainAttend
from tests.numerics.transformers_models import (
    double_adapter,
    eager_logits,
    plain_eager_logits,
)
from tests.tiny_models import write_tiny_model
from tests.tolerances import LOGITS

TOKENS = 40
# Past the 64 positions that the scaled kinds of RoPE were "trained" on.
POSITIONS_MAX = 1024
CASES: dict[str, tuple[str, str | None, bool]] = {
    "llama": ("llama", None, True),
    "llama-untied": ("llama", None, False),
    "llama-llama3": ("llama", "llama3", True),
    "llama-linear": ("llama", "linear", True),
    "llama-yarn": ("llama", "yarn", False),
    "mistral": ("mistral", None, False),
    "qwen2-tied": ("qwen2", None, True),
    "qwen3": ("qwen3", None, False),
    "qwen3-yarn": ("qwen3", "yarn", True),
}


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    arch, rope, tied = CASES[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    return write_tiny_model(
        directory, arch, rope=rope, tied=tied, layers=3, positions_max=POSITIONS_MAX
    )


def prompt(decoder: Decoder, *, pruned: bool = True) -> tuple[Tensor, Tensor]:
    """Token ids and positions; pruned ones ascend with gaps, as after a sparse prefill."""
    generator = torch.Generator().manual_seed(5)
    token_ids = torch.randint(decoder.shape.vocab, (TOKENS,), generator=generator)
    if not pruned:
        return token_ids, torch.arange(TOKENS)
    kept = torch.randperm(POSITIONS_MAX, generator=generator)[:TOKENS]
    return token_ids, kept.sort().values


def logits_of(decoder: Decoder, token_ids: Tensor, positions: Tensor, *, chunk: int) -> Tensor:
    """Prefill in chunks through one plain KV store; logits of every token."""
    attend = PlainAttend()
    parts = zip(token_ids.split(chunk), positions.split(chunk), strict=True)
    return torch.cat([decoder.logits(decoder(ids, at, attend)) for ids, at in parts])


def lean(directory: Path, dtype: torch.dtype, layers: int | None = None) -> Decoder:
    return load_decoder(directory, dtype=dtype, device="cpu", layers=layers)


def adapter(directory: Path, layers: int | None = None) -> Decoder:
    return load_decoder(
        directory, dtype=torch.float32, device="cpu", layers=layers, kind="transformers"
    )


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=LOGITS[found.dtype])


def test_lean_equals_a_stock_model_on_a_full_prompt(checkpoint: Path) -> None:
    decoder = lean(checkpoint, torch.float32)
    token_ids, positions = prompt(decoder, pruned=False)
    found = logits_of(decoder, token_ids, positions, chunk=TOKENS)
    assert_close(found, plain_eager_logits(checkpoint, token_ids))


def test_lean_equals_eager_transformers_with_pruned_positions(checkpoint: Path) -> None:
    decoder = lean(checkpoint, torch.float32)
    token_ids, positions = prompt(decoder)
    found = logits_of(decoder, token_ids, positions, chunk=TOKENS)
    assert_close(found, eager_logits(checkpoint, token_ids, positions))


def test_the_adapter_equals_eager_transformers_with_pruned_positions(checkpoint: Path) -> None:
    decoder = adapter(checkpoint)
    token_ids, positions = prompt(decoder)
    found = logits_of(decoder, token_ids, positions, chunk=TOKENS)
    assert_close(found, eager_logits(checkpoint, token_ids, positions))


@pytest.mark.parametrize("chunk", [TOKENS, 16, 1])
def test_lean_and_adapter_agree_in_float64_for_any_prefill_chunk(
    checkpoint: Path, chunk: int
) -> None:
    one, other = lean(checkpoint, torch.float64), double_adapter(checkpoint)
    token_ids, positions = prompt(one)
    expected = logits_of(other, token_ids, positions, chunk=TOKENS)
    assert_close(logits_of(one, token_ids, positions, chunk=chunk), expected)
    assert expected.argmax(-1).unique().numel() > 3, "flat logits would prove nothing"


def test_positions_matter(checkpoint: Path) -> None:
    decoder = lean(checkpoint, torch.float64)
    token_ids, positions = prompt(decoder)
    found = logits_of(decoder, token_ids, positions, chunk=TOKENS)
    closed_up = logits_of(decoder, token_ids, torch.arange(TOKENS), chunk=TOKENS)
    assert (found - closed_up).abs().max() > 1e-2


@pytest.mark.parametrize("layers", [1, 2])
def test_the_first_layers_are_a_decoder_of_their_own(checkpoint: Path, layers: int) -> None:
    one, other = lean(checkpoint, torch.float32, layers), adapter(checkpoint, layers)
    assert one.shape == other.shape
    assert one.shape.layers == layers
    token_ids, positions = prompt(one)
    expected = logits_of(other, token_ids, positions, chunk=TOKENS)
    assert_close(logits_of(one, token_ids, positions, chunk=TOKENS), expected)


def test_both_decoders_state_the_same_shape(checkpoint: Path) -> None:
    assert lean(checkpoint, torch.float32).shape == adapter(checkpoint).shape


@pytest.mark.parametrize("load", [lambda d: lean(d, torch.float64), double_adapter])
def test_fill_then_one_token_equals_a_full_forward(
    checkpoint: Path, load: Callable[[Path], Decoder]
) -> None:
    decoder = load(checkpoint)
    token_ids, positions = prompt(decoder)
    attend = PlainAttend()
    decoder.fill(token_ids[:-1], positions[:-1], attend)
    last = decoder.logits(decoder(token_ids[-1:], positions[-1:], attend))
    expected = logits_of(decoder, token_ids, positions, chunk=TOKENS)[-1:]
    torch.testing.assert_close(last, expected, rtol=0, atol=1e-12)
    assert attend.stored == [decoder.shape.layers - 1], "the last layer's attention was not skipped"


def test_bfloat16_stays_near_float32(checkpoint: Path) -> None:
    exact, rounded = lean(checkpoint, torch.float32), lean(checkpoint, torch.bfloat16)
    token_ids, positions = prompt(exact)
    expected = logits_of(exact, token_ids, positions, chunk=TOKENS)
    found = logits_of(rounded, token_ids, positions, chunk=TOKENS)
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() < 0.05 * expected.norm()


def test_decoders_take_their_dtype_and_need_no_gradients(checkpoint: Path) -> None:
    decoder = lean(checkpoint, torch.float64)
    assert (decoder.dtype, decoder.device) == (torch.float64, torch.device("cpu"))
    token_ids, positions = prompt(decoder)
    hidden = decoder(token_ids, positions, PlainAttend())
    assert hidden.dtype == torch.float64
    assert not hidden.requires_grad
    assert hidden.shape == (TOKENS, decoder.shape.hidden)


def test_an_architecture_lean_does_not_know_runs_through_transformers(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "olmo2", layers=2, positions_max=POSITIONS_MAX)
    with pytest.raises(UnsupportedModel, match="model_type='olmo2'"):
        load_decoder(tmp_path, dtype=torch.float32, device="cpu", kind="lean")
    decoder = load_decoder(tmp_path, dtype=torch.float32, device="cpu", kind="auto")
    token_ids, positions = prompt(decoder)
    found = logits_of(decoder, token_ids, positions, chunk=16)
    assert_close(found, eager_logits(tmp_path, token_ids, positions))


@pytest.mark.parametrize(
    ("arch", "fields", "named"),
    [
        ("mistral", {"sliding_window": 16}, "sliding_window=16"),
        ("gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8}, "softcap=50.0"),
        ("granite", {"attention_multiplier": 0.5}, "scaling=0.5"),
        ("cohere", {"logit_scale": 0.25}, "logits after the head"),
        ("bloom", {}, "forward is not of this kind|attention ran in layers"),
    ],
)
def test_the_adapter_refuses_what_its_attention_would_ignore(
    tmp_path: Path, arch: str, fields: dict[str, object], named: str
) -> None:
    write_tiny_model(tmp_path, arch, positions_max=POSITIONS_MAX, fields=fields)
    with pytest.raises(UnsupportedModel, match=named):
        adapter(tmp_path)


def test_the_adapter_leaves_no_mark_on_models_built_beside_it(checkpoint: Path) -> None:
    decoder = adapter(checkpoint)
    token_ids, positions = prompt(decoder)
    before = logits_of(decoder, token_ids, positions, chunk=TOKENS)
    eager_logits(checkpoint, token_ids, positions)
    after = logits_of(decoder, token_ids, positions, chunk=TOKENS)
    assert torch.equal(before, after)
