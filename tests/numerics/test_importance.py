"""Streamed importance against a reference that materialises everything, and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.decoder import ModelShape
from scorer_service.importance import RunningImportance
from serving.errors import NonFiniteImportance
from tests.numerics.reference_importance import reference_importance
from tests.tolerances import IMPORTANCE

CPU = torch.device("cpu")
HEAD_DIM = 8


def shape_of(q: Tensor, k: Tensor) -> ModelShape:
    return ModelShape(
        layers=q.shape[0],
        q_heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        hidden=1,
        vocab=1,
        positions_max=k.shape[1],
    )


def streamed(
    q: Tensor, k: Tensor, *, visible: list[int], pool_tokens: int = 13, pieces: int = 1
) -> np.ndarray:
    """q: [layers, queries, q_heads, head_dim]; k: [layers, tokens, kv_heads, head_dim]."""
    running = RunningImportance(
        shape_of(q, k),
        visible_tokens=visible,
        prompt_tokens=k.shape[1],
        pool_tokens=pool_tokens,
        dtype=q.dtype,
        device=CPU,
    )
    for layer in range(q.shape[0]):
        running.add_layer(q[layer], k[layer].transpose(0, 1).tensor_split(pieces, dim=1))
    return running.finish()


def drawn(
    *, layers: int, queries: int, heads: tuple[int, int], tokens: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    q_heads, kv_heads = heads
    q = torch.randn(layers, queries, q_heads, HEAD_DIM, generator=generator, dtype=torch.float64)
    k = torch.randn(layers, tokens, kv_heads, HEAD_DIM, generator=generator, dtype=torch.float64)
    return (2 * q).to(dtype), k.to(dtype)


def lookahead(queries: int, tokens: int) -> list[int]:
    return [tokens] * queries


def tail_window(queries: int, tokens: int) -> list[int]:
    return list(range(tokens - queries + 1, tokens + 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("visible_of", [lookahead, tail_window])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(("tokens", "queries", "pieces"), [(200, 8, 1), (101, 16, 5), (9, 9, 2)])
def test_streamed_importance_equals_the_reference(
    dtype: torch.dtype,
    visible_of: object,
    heads: tuple[int, int],
    tokens: int,
    queries: int,
    pieces: int,
) -> None:
    q, k = drawn(layers=3, queries=queries, heads=heads, tokens=tokens, dtype=dtype)
    visible = visible_of(queries, tokens)  # type: ignore[operator]
    found = streamed(q, k, visible=visible, pieces=pieces)
    expected = reference_importance(q, k, visible=visible, pool_tokens=13).float().numpy()
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=IMPORTANCE[dtype], atol=0)


@pytest.mark.parametrize("pool_tokens", [1, 5, 13, 31])
def test_any_odd_pool_width_equals_the_reference(pool_tokens: int) -> None:
    q, k = drawn(layers=2, queries=4, heads=(4, 2), tokens=40, dtype=torch.float64)
    visible = tail_window(4, 40)
    found = streamed(q, k, visible=visible, pool_tokens=pool_tokens)
    expected = reference_importance(q, k, visible=visible, pool_tokens=pool_tokens)
    np.testing.assert_allclose(found, expected.float().numpy(), rtol=1e-6)


def test_kv_heads_in_several_blocks_give_the_same() -> None:
    # 3 kv heads of 24 rows and 9,000 keys: more than one block's bytes, less than two heads'.
    q, k = drawn(layers=1, queries=8, heads=(9, 3), tokens=9000, dtype=torch.float32)
    visible = lookahead(8, 9000)
    expected = reference_importance(q, k, visible=visible, pool_tokens=13).float().numpy()
    found = streamed(q, k, visible=visible, pieces=3)
    np.testing.assert_allclose(found, expected, rtol=IMPORTANCE[torch.float32])


def test_one_query_of_one_head_without_a_pool_sums_to_one() -> None:
    q, k = drawn(layers=1, queries=1, heads=(1, 1), tokens=50, dtype=torch.float64)
    assert streamed(q, k, visible=[50], pool_tokens=1).sum() == pytest.approx(1.0, abs=1e-6)


def attending_to(token: int, *, tokens: int) -> tuple[Tensor, Tensor]:
    """One layer, head and query whose whole attention falls on `token`."""
    q = torch.zeros(1, 1, 1, HEAD_DIM)
    q[..., 0] = 1.0
    k = torch.zeros(1, tokens, 1, HEAD_DIM)
    k[0, token, 0, 0] = 1000.0
    return q, k


def test_attention_on_one_token_is_spread_evenly_over_the_pool() -> None:
    found = streamed(*attending_to(20, tokens=40), visible=[40])
    assert np.flatnonzero(found).tolist() == list(range(14, 27))
    np.testing.assert_allclose(found[14:27], 1 / 13, rtol=1e-6)


def test_the_pool_divides_by_its_whole_width_at_the_edges() -> None:
    found = streamed(*attending_to(0, tokens=40), visible=[40])
    assert np.flatnonzero(found).tolist() == list(range(7))
    np.testing.assert_allclose(found[:7], 1 / 13, rtol=1e-6)


def test_the_maximum_is_over_heads_and_the_mean_over_queries() -> None:
    # Two heads and two queries; of four rows only one attends to token 2, the others to token 9.
    q = torch.zeros(1, 2, 2, HEAD_DIM)
    q[..., 0] = 1.0
    q[0, 0, 1] = torch.tensor([0.0, 1.0] + [0.0] * 6)
    k = torch.zeros(1, 12, 2, HEAD_DIM)
    k[0, 9, :, 0] = 1000.0
    k[0, 2, :, 1] = 1000.0
    found = streamed(q, k, visible=[12, 12], pool_tokens=1)
    assert found[2] == 0.5
    assert found[9] == 1.0


def test_a_window_token_gets_nothing_from_the_queries_before_it() -> None:
    # Both window queries would attend to the last token wholly; the earlier one must not see it.
    q, k = attending_to(11, tokens=12)
    found = streamed(q.repeat(1, 2, 1, 1), k, visible=[11, 12], pool_tokens=1)
    assert found[11] == 0.5
    np.testing.assert_allclose(found[:11], 0.5 / 11, rtol=1e-6)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_key_that_is_not_finite_is_a_typed_error(poison: float) -> None:
    q, k = drawn(layers=2, queries=2, heads=(2, 1), tokens=30, dtype=torch.float32)
    k[1, 3, 0, 0] = poison
    with pytest.raises(NonFiniteImportance):
        streamed(q, k, visible=lookahead(2, 30))


def test_a_query_that_is_not_finite_is_a_typed_error() -> None:
    q, k = drawn(layers=2, queries=2, heads=(2, 1), tokens=30, dtype=torch.float32)
    q[0, 1, 1, 0] = float("nan")
    with pytest.raises(NonFiniteImportance):
        streamed(q, k, visible=lookahead(2, 30))
