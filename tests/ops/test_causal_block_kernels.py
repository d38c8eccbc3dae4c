"""Kernels of blockwise causal calls, compared with the references; interpreted without a GPU."""

from functools import partial

import pytest
import torch
from kernel_calls import assert_near, narrowed, outputs_and_gradients, rounded
from kernel_device import MARKS, SINGLE
from test_causal_blocks import CASES

pytest.importorskip("triton")

pytestmark = MARKS


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "name", [slow("additive"), slow("diagonal decay"), "scalar decay", slow("gated delta rule")]
)
def test_kernels_match_the_reference(name):
    op, reference, _, inputs, options = CASES[name]
    tokens, state = inputs()
    named = {key: rounded(x[:1, :7, :1]) for key, x in tokens.items()}
    named["keep"] = torch.rand(1, 7) < 0.8
    named["state"] = type(state)(*(rounded(x[:1, :1]) for x in state))
    options = options | {"causal_block": 3}
    want = outputs_and_gradients(partial(reference, **options), named)
    kernels = partial(op, form="chunk", backend="triton", **options)
    got = outputs_and_gradients(kernels, narrowed(named, SINGLE))
    assert_near(got[0] + got[1], want[0] + want[1], 5e-5)
