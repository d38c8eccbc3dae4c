"""Linear attention in the encoders of transformers, each with a small random config."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from other_encoders import CASES, DIM, build, first_output, inputs, replace
from torch import nn

from onescan.nn.replace import is_replacement
from onescan.nn.softmax_parts import RELATIVE, ROTARY, projects_queries_keys_and_values

MASKED = [name for name, case in CASES.items() if case.inputs == "text"]
RUN = [name for name, case in CASES.items() if case.inputs]


@pytest.mark.parametrize("name", CASES)
def test_all_attention_is_replaced(name):
    case = CASES[name]
    model = build(case)
    names = replace(case, model)
    assert len(names) == case.replaced
    kept = tuple(case.options.get("exclude", ()))
    for path, module in model.named_modules():
        is_softmax = isinstance(module, nn.MultiheadAttention) or projects_queries_keys_and_values(
            module
        )
        assert not is_softmax or path.startswith(kept or "nothing"), path
    assert all(is_replacement(model.get_submodule(each)) for each in names)
    if case.inputs:
        assert first_output(model(**inputs(case.inputs))).isfinite().all()


@pytest.mark.parametrize("name", CASES)
def test_weights_are_copied(name):
    """Softmax attention with the replacement's projections equals the original attention."""
    case = CASES[name]
    original, model = build(case).double(), build(case).double()
    for each in replace(case, model):
        source, mixer = original.get_submodule(each), model.get_submodule(each).attention.mixer
        x = torch.randn(2, 6, DIM, dtype=torch.float64)
        q, k, v = mixer.in_proj(x).split(mixer.in_widths, dim=-1)[:3]
        heads = mixer.config.num_heads
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        scale = 1.0 if RELATIVE in case.losses and "T5" in name else None
        tolerance = 1e-6 if ROTARY in case.losses else 1e-9  # angles are rotated in float32
        causal = case.options.get("causal", False)
        o = F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=causal)
        o = mixer.out_proj(o.transpose(1, 2).flatten(2))
        torch.testing.assert_close(
            o, first_output(source(x, **neutral(source, q, causal))), rtol=tolerance, atol=tolerance
        )


def neutral(source: nn.Module, q: torch.Tensor, causal: bool) -> dict[str, Any]:
    """Return arguments with which positions and biases have no effect."""
    head_dim, tokens = q.shape[-1], q.shape[-2]
    names = type(source).forward.__annotations__ | dict.fromkeys(
        type(source).forward.__code__.co_varnames
    )
    given: dict[str, Any] = {}
    if "position_embeddings" in names:
        shape = (tokens, head_dim) if "DINO" in type(source).__name__ else (1, tokens, head_dim)
        given["position_embeddings"] = (q.new_ones(shape), q.new_zeros(shape))
    if type(source).__name__ == "T5Attention":
        given["position_bias"] = q.new_zeros(1, q.shape[1], tokens, tokens)
    if causal:
        mask = q.new_full((tokens, tokens), -torch.inf).triu(1)
        given["attention_mask"] = mask.expand(1, 1, -1, -1)
    return given


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MASKED)
def test_padding_has_no_effect(name, implementation):
    case = CASES[name]
    model = build(case)
    model.config._attn_implementation = implementation
    replace(case, model)
    data = inputs(case.inputs, length=20)  # longer than a window
    data["attention_mask"] = torch.ones_like(data["input_ids"])
    data["attention_mask"][1, 13:] = 0
    data["input_ids"][1, 13:] = 0
    o = first_output(model(**data))
    torch.testing.assert_close(o[:1], first_output(model(input_ids=data["input_ids"][:1])))
    torch.testing.assert_close(
        o[1:, :13], first_output(model(input_ids=data["input_ids"][1:, :13]))
    )


def test_padding_of_sounds_has_no_effect():
    case = CASES["wav2vec 2.0"]
    model = build(case)
    replace(case, model)
    values, mask = inputs("audio")["input_values"], torch.ones(2, 200, dtype=torch.long)
    values[1, 120:] = 0
    mask[1, 120:] = 0
    changed = values.clone()
    changed[1, 130:] = 1.0
    before, after = (
        first_output(model(input_values=x, attention_mask=mask)) for x in (values, changed)
    )
    torch.testing.assert_close(before[1, :10], after[1, :10])
    assert not torch.equal(first_output(model(input_values=values))[1, :10], before[1, :10])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", RUN)
def test_it_trains(name):
    case = CASES[name]
    model = build(case)
    names = replace(case, model)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data, losses = inputs(case.inputs), []
    for _ in range(8):
        output = first_output(model(**data))
        loss = (output - output.detach().roll(1, 0)).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        grads = {
            n: p.grad for each in names for n, p in model.get_submodule(each).named_parameters()
        }
        assert all(grad is not None and grad.isfinite().all() for grad in grads.values())
        optimizer.step()
    assert losses[-1] < losses[0]
