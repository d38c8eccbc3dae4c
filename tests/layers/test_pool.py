"""Pools read real tokens only, in any precision."""

import pytest
import torch

from onescan.layers.tokens import AttentionPool, first_token, max_pool, mean_pool

WIDTH = 12


def tokens(*shape):
    return torch.randn(*shape, WIDTH, dtype=torch.float64)


def test_pools_read_real_tokens_only():
    x = tokens(3, 6)
    keep = torch.tensor([[1, 1, 0, 1, 0, 0], [1] * 6, [0] * 6], dtype=torch.bool)
    attention = AttentionPool(WIDTH).double()
    torch.nn.init.normal_(attention.query)
    for pool in (mean_pool, max_pool, attention, first_token):
        pooled = pool(x, keep)
        torch.testing.assert_close(pooled[:1], pool(x[:1, keep[0]]))
        torch.testing.assert_close(pooled[1:2], pool(x[1:2]))
        assert (pooled[2] == 0).all()
    attention(x, keep).sum().backward()
    assert torch.isfinite(attention.query.grad).all()


def test_attention_pooling_starts_as_the_mean():
    x = tokens(2, 6)
    torch.testing.assert_close(AttentionPool(WIDTH).double()(x), mean_pool(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pools_of_many_half_precision_tokens_neither_overflow_nor_drift(dtype):
    x = torch.full((1, 70_000, 1), 30.0, dtype=dtype)
    keep = torch.ones(1, 70_000, dtype=torch.bool)
    assert mean_pool(x, keep).item() == 30
    assert mean_pool(x, keep).dtype == dtype
    one = torch.zeros(1, 3, dtype=torch.bool)
    one[:, 1] = True
    assert mean_pool(torch.tensor([[[1.0], [5.0], [torch.nan]]]), one).item() == 5
    assert AttentionPool(1)(torch.tensor([[[1.0], [5.0], [torch.nan]]]), one).item() == 5
