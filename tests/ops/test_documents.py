"""Packed documents: outputs and gradients equal those of each document on its own."""

import pytest
import torch
from tiny_language_models import BOTH, CAUSAL, SMALL, built, causal, ids, over_all_causal, over_both
from torch.nn.functional import cross_entropy

from onescan.layers.tokens import Documents
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.masked_lm import MaskedLMConfig
from onescan.ops.packing import Packing, document_offsets

NUMBERS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2], [7, 5, 5, 5, 5, 5, 5, 5, 5, 7]])


def texts():
    """Yield the row and the positions of each text."""
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
    """Compare outputs, and gradients of a loss over all tokens."""
    packed = scores(model, tokens, documents=NUMBERS)
    labels, separate = tokens.flip(1), torch.zeros(())
    for row, places in texts():
        alone = scores(model, tokens[row, places][None])[0]
        torch.testing.assert_close(packed[row, places], alone, rtol=1e-9, atol=1e-9)
        separate = separate + cross_entropy(alone, labels[row, places], reduction="sum")
    together = cross_entropy(packed.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(together, separate, rtol=1e-9, atol=1e-9)
    got, want = gradients(model, together), gradients(model, separate)
    assert got.keys() == want.keys()
    for name in got:
        torch.testing.assert_close(got[name], want[name], rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.sampled(3)
@over_all_causal
def test_a_causal_model_separates_documents(change):
    model = causal(change)
    tokens = ids(2, 10)
    assert_packing_changes_nothing(model, tokens)
    assert not torch.equal(scores(model, tokens), scores(model, tokens, documents=NUMBERS))


@pytest.mark.sampled(3)
@over_both
def test_a_masked_model_separates_documents(change):
    assert_packing_changes_nothing(masked(change), ids(2, 10))


@pytest.mark.sampled(4)
@over_both
def test_padding_is_ignored_in_packed_rows(change):
    model, tokens = masked(change), ids(2, 10)
    keep = torch.rand(2, 10) > 0.3
    packed = scores(model, tokens, documents=NUMBERS, keep=keep)
    for row, places in texts():
        if keep[row, places].any():
            real = keep[row, places]
            alone = scores(model, tokens[row, places][None], keep=real[None])[0]
            torch.testing.assert_close(packed[row, places][real], alone[real])


def test_recomputation_does_not_change_gradients():
    model, tokens = masked(BOTH["lightnet"]).train(), ids(2, 10)
    found = []
    for recompute in (False, True):
        for block in model.network.blocks:
            block.recompute = recompute
        loss = scores(model, tokens, documents=NUMBERS).square().sum()
        found.append(gradients(model, loss))
    for name, gradient in found[0].items():
        assert torch.equal(found[1][name], gradient), name


def test_documents_of_similar_length_are_grouped():
    lengths = [9, 8, 5, 4, 4, 2, 1, 1]
    numbers = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    documents = Documents(Packing(document_offsets(numbers), batch=1, tokens=34))
    shapes = [tuple(group.positions.shape) for group in documents.groups]
    assert shapes == [(3, 9), (2, 4), (1, 2), (2, 1)]
    x = torch.arange(34.0).reshape(1, 34, 1)
    assert torch.equal(documents.mix_per_document(lambda x, *_, **__: (x, None), x, keep=None), x)


def plain_model():
    mixer = CausalLMConfig(**SMALL).mixer.__class__(num_heads=3, direction="forward")
    return causal({"mixer": mixer, "position": None})


def test_rows_of_a_single_document_and_an_empty_batch():
    model, tokens = plain_model(), ids(2, 10)
    numbers = torch.tensor([[3] * 10, [4] * 10])
    torch.testing.assert_close(scores(model, tokens, documents=numbers), scores(model, tokens))
    model = masked(BOTH["lion"])
    assert scores(model, ids(0, 5), documents=ids(0, 5)).shape == (0, 5, 13)


def test_documents_and_state_exclude_each_other():
    model, tokens = plain_model(), ids(2, 10)
    _, state = model(tokens)
    with pytest.raises(ValueError, match="documents and state were given together"):
        model(tokens, state, documents=NUMBERS)
    assert model(tokens, documents=NUMBERS)[1] is None


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("config", "change"),
    [(causal, x) for x in CAUSAL.values()] + [(masked, x) for x in BOTH.values()],
    ids=[*CAUSAL, *(f"{name}, masked" for name in BOTH)],
)
def test_a_packed_step_reads_no_values_of_device_tensors(config, change):
    """Meta tensors have no values, so whatever would wait for a GPU raises."""
    model = config(change).train().to("meta")
    packing = Packing(document_offsets(NUMBERS), batch=2, tokens=10, device=torch.device("meta"))
    logits = scores(model, ids(2, 10).to("meta"), cu_seqlens=packing)
    logits.square().sum().backward()
    assert all(p.grad is not None for p in model.network.blocks.parameters())


def test_offsets_and_numbers_are_alike():
    model, tokens = masked(BOTH["lightnet"]), ids(2, 10)
    packed = scores(model, tokens, documents=NUMBERS)
    assert torch.equal(scores(model, tokens, cu_seqlens=document_offsets(NUMBERS)), packed)
    with pytest.raises(ValueError, match="documents and cu_seqlens were given together"):
        model(tokens, documents=NUMBERS, cu_seqlens=document_offsets(NUMBERS))
