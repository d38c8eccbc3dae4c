"""Packed texts: a row of several gives the numbers and gradients of each on its own."""

import pytest
import torch
from tiny_language_models import BOTH, SMALL, built, causal, ids, over_both, over_causal
from torch.nn.functional import cross_entropy

from onescan.layers.tokens import Documents
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.masked_lm import MaskedLMConfig

NUMBERS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2], [7, 5, 5, 5, 5, 5, 5, 5, 5, 7]])


def texts():
    """Row, and the places of each text in it."""
    for row, numbers in enumerate(NUMBERS.tolist()):
        first = 0
        for i in range(1, len(numbers) + 1):
            if i == len(numbers) or numbers[i] != numbers[i - 1]:
                yield row, slice(first, i)
                first = i


def masked(change, **more):
    return built(MaskedLMConfig(**{**SMALL, **change, **more}))


def scores(model, tokens, **options):
    out = model(tokens, **options)
    return out[0] if isinstance(out, tuple) else out


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_packing_changes_nothing(model, tokens):
    """Values, and gradients of a loss of which every text's tokens have a part."""
    packed = scores(model, tokens, documents=NUMBERS)
    labels, apart = tokens.flip(1), torch.zeros(())
    for row, places in texts():
        alone = scores(model, tokens[row, places][None])[0]
        torch.testing.assert_close(packed[row, places], alone, rtol=1e-9, atol=1e-9)
        apart = apart + cross_entropy(alone, labels[row, places], reduction="sum")
    together = cross_entropy(packed.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(together, apart, rtol=1e-9, atol=1e-9)
    got, want = gradients(model, together), gradients(model, apart)
    assert got.keys() == want.keys()
    for name in got:
        torch.testing.assert_close(got[name], want[name], rtol=1e-7, atol=1e-9, msg=name)


@over_causal
def test_a_causal_model_reads_each_text_alone(change):
    model = causal(change)
    tokens = ids(2, 10)
    assert_packing_changes_nothing(model, tokens)
    assert not torch.equal(scores(model, tokens), scores(model, tokens, documents=NUMBERS))


@over_both
def test_a_masked_model_reads_each_text_alone(change):
    assert_packing_changes_nothing(masked(change), ids(2, 10))


@over_both
def test_masked_tokens_stay_masked_in_packs(change):
    model, tokens = masked(change), ids(2, 10)
    keep = torch.rand(2, 10) > 0.3
    packed = scores(model, tokens, documents=NUMBERS, keep=keep)
    for row, places in texts():
        if keep[row, places].any():
            real = keep[row, places]
            alone = scores(model, tokens[row, places][None], keep=real[None])[0]
            torch.testing.assert_close(packed[row, places][real], alone[real])


def test_recomputed_packs_have_the_same_gradients():
    model, tokens = masked(BOTH["lightnet"]).train(), ids(2, 10)
    found = []
    for recompute in (False, True):
        for block in model.network.blocks:
            block.recompute = recompute
        loss = scores(model, tokens, documents=NUMBERS).square().sum()
        found.append(gradients(model, loss))
    for name, gradient in found[0].items():
        assert torch.equal(found[1][name], gradient), name


def test_texts_of_like_length_are_mixed_together():
    lengths = [9, 8, 5, 4, 4, 2, 1, 1]
    numbers = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    shapes = [tuple(group.positions.shape) for group in Documents(numbers).groups]
    assert shapes == [(3, 9), (2, 4), (1, 2), (2, 1)]
    places = torch.cat([g.positions[g.inside] for g in Documents(numbers).groups])
    assert places.sort().values.tolist() == list(range(34))


def test_a_batch_of_nothing_has_no_texts():
    model = masked(BOTH["lion"])
    assert scores(model, ids(0, 5), documents=ids(0, 5)).shape == (0, 5, 13)


def test_a_row_of_one_text_is_a_row():
    model, tokens = causal({"mixer": built_mixer(), "position": None}), ids(2, 10)
    numbers = torch.tensor([[3] * 10, [4] * 10])
    torch.testing.assert_close(scores(model, tokens, documents=numbers), scores(model, tokens))


def built_mixer():
    return CausalLMConfig(**SMALL).mixer.__class__(num_heads=3, causal=True)


def test_what_cannot_be_packed_is_refused():
    model, tokens = causal({"mixer": built_mixer(), "position": None}), ids(2, 10)
    _, state = model(tokens)
    with pytest.raises(ValueError, match="documents and state were both given"):
        model(tokens, state, documents=NUMBERS)
    assert model(tokens, documents=NUMBERS)[1] is None
