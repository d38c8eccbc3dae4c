"""Linearizing softmax encoders of other libraries: attention transfer, then training."""

import copy
import dataclasses

import jaxtyping
import pytest
import torch
from other_encoders import CASES, DIM, HEADS, build, inputs
from torch import nn

import onescan
from onescan.nn.replace import Replacement, build_replacements, is_replacement

LABELED = inputs("text") | {"labels": inputs("text")["input_ids"]}
FAST = {"transfer_steps": 3, "steps": 3}


def bert(**changes):
    case = CASES["BERT for masked LM"]
    return build(dataclasses.replace(case, config=case.config | changes))


def encoder(batch_first=True):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, dropout=0.0, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = encoder(), nn.Linear(DIM, 3)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


def test_transfer_and_training_lower_the_loss():
    model = bert()
    done = onescan.linearize(
        model,
        [LABELED],
        transfer_steps=60,
        transfer_learning_rate=1e-2,
        steps=30,
        learning_rate=1e-2,
    )
    assert done.replaced == tuple(f"bert.encoder.layer.{i}.attention.self" for i in range(2))
    assert all(is_replacement(model.get_submodule(name)) for name in done.replaced)
    for losses in done.transfer_losses.values():
        assert len(losses) == 60
        assert losses[-1] < 0.3 * losses[0]
    assert len(done.losses) == 30
    assert done.losses[-1] < 0.8 * done.losses[0]
    assert not model.training


def test_transfer_changes_only_the_new_attention():
    model = bert().train()
    before = copy.deepcopy(model.state_dict())
    done = onescan.linearize(model, [LABELED], transfer_steps=5, steps=0)
    assert done.losses == []
    after = model.state_dict()
    for name, tensor in before.items():
        if name in after:
            assert torch.equal(tensor, after[name]), name
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("batch_first", [True, False])
def test_transfer_losses_are_those_of_the_definition(batch_first):
    model = encoder(batch_first).eval()
    x = torch.randn(2, 7, DIM) if batch_first else torch.randn(7, 2, DIM)
    padding = torch.arange(7).expand(2, 7) >= torch.tensor([[7], [4]])
    batch = {"src": x, "src_key_padding_mask": padding}
    torch.manual_seed(0)
    done = onescan.linearize(copy.deepcopy(model), [batch], transfer_steps=1, steps=0)
    torch.manual_seed(0)
    students = build_replacements(model, Replacement())  # with the same new weights
    real = ~padding if batch_first else ~padding.T
    expected = {}

    def compare(name):
        def hook(_, args, kwargs, output):
            target = output[0][real]
            error = students[name](*args, **kwargs)[0][real] - target
            expected[name] = (error.square().sum() / target.square().sum()).item()

        return hook

    for name in students:
        model.get_submodule(name).register_forward_hook(compare(name), with_kwargs=True)
    with torch.no_grad():
        model(**batch)
    assert {name: losses[0] for name, losses in done.transfer_losses.items()} == pytest.approx(
        expected, rel=1e-5
    )


def test_padding_has_no_effect_on_transfer():
    data = LABELED | {"attention_mask": torch.ones(2, 8, dtype=torch.long)}
    data["attention_mask"][1, 5:] = 0
    changed = {name: tensor.clone() for name, tensor in data.items()}
    changed["input_ids"][1, 5:] = 3
    changed["labels"][1, 5:] = data["labels"][1, 5:] = -100
    losses = []
    for batch in (data, changed):
        torch.manual_seed(0)
        losses.append(onescan.linearize(bert(), [batch], **FAST))
    for name, numbers in losses[0].transfer_losses.items():
        assert numbers == pytest.approx(losses[1].transfer_losses[name], rel=1e-4)
    assert losses[0].losses == pytest.approx(losses[1].losses, rel=1e-4)


def test_every_nth_layer_may_keep_softmax():
    model = Classifier()
    batch = (torch.randn(4, 7, DIM), torch.tensor([0, 1, 2, 0]))
    done = onescan.linearize(model, [batch], "lion", softmax_every=2, **FAST)
    assert done.replaced == ("encoder.layers.0.self_attn",)
    assert done.kept == ("encoder.layers.1.self_attn",)
    assert isinstance(model.encoder.layers[1].self_attn, nn.MultiheadAttention)
    assert len(done.losses) == 3


def test_memory_of_transfer_is_that_of_one_layer():
    """No activations of the model are kept, and each layer's are freed before the next one."""
    sizes = []

    class Counted(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self):
            self.alive = 0
            super().__init__(self.pack, lambda x: x.tensor)

        def pack(self, tensor):
            counter = self

            class Held:
                def __init__(self):
                    self.tensor = tensor
                    counter.alive += tensor.numel()
                    sizes.append(counter.alive)

                def __del__(self):
                    counter.alive -= tensor.numel()

            return Held()

    peaks = []
    for layers in (1, 4):
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        sizes.clear()
        with Counted():
            onescan.linearize(model, [{"src": torch.randn(2, 9, DIM)}], transfer_steps=1, steps=0)
        peaks.append(max(sizes))
    assert peaks[1] == peaks[0]


def test_progress_is_reported():
    calls = []
    onescan.linearize(bert(), [LABELED], **FAST, report=lambda *call: calls.append(call))
    assert [call[:2] for call in calls] == [
        (phase, step) for phase in ("transfer", "train") for step in (1, 2, 3)
    ]


def test_a_loss_of_ones_own():
    model = encoder()
    data = [torch.randn(2, 7, DIM)]
    done = onescan.linearize(model, data, **FAST, loss=lambda m, x: m(x).square().mean())
    assert len(done.losses) == 3
    assert len(done.transfer_losses) == 2


@pytest.mark.parametrize(
    ("data", "options", "reason"),
    [
        ([], {}, "data has no batches$"),
        (iter([LABELED]), {}, "data can be read only once"),
        (
            LABELED,
            {},
            r"data is a dict, expected batches: a DataLoader, or a list such as \[batch\]",
        ),
        (["a text"], {}, "data has batches of type str"),
        ([inputs("text")], {}, "returned no loss; add labels"),
        ([inputs("text")["input_ids"]], {}, "data has batches of type Tensor"),
        ([LABELED], {"softmax_every": 1}, "softmax_every is 1"),
        ([LABELED], {"transfer_steps": -1}, "transfer_steps is -1"),
        ([LABELED], {"learning_rate": 0.0}, "learning_rate is 0"),
        ([LABELED], {"kind": "softmax"}, "kind 'softmax' is unknown"),
        ([LABELED], {"exclude": ["nothing"]}, "exclude contains 'nothing'"),
        ([LABELED], {"exclude": "bert"}, "exclude is 'bert', expected a list of names"),
        ([LABELED], {"weight_decay": -1.0}, "weight_decay is -1.0, expected at least 0"),
        ([LABELED], {"size": 3}, "LightNetAttention has no option 'size', expected causal, lrpe"),
        ([LABELED], {"loss": lambda m, b: m(**b).logits}, "expected a scalar tensor"),
    ],
)
def test_mistakes_are_named(data, options, reason):
    model = bert().train()
    with pytest.raises(ValueError, match=reason):
        onescan.linearize(model, data, **(FAST | options))
    assert model.training
    assert not any(is_replacement(module) for module in model.modules())


@pytest.mark.parametrize("model", [None, "my-bert"])
def test_other_objects_than_models_are_refused(model, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=r"model is .*, expected an nn\.Module"):
        onescan.linearize(model, [LABELED], **FAST)


def test_a_loss_without_gradient_is_refused():
    model = bert()
    with pytest.raises(ValueError, match="does not depend on the model's weights"):
        onescan.linearize(model, [LABELED], **FAST, loss=lambda m, b: m(**b).loss.detach())
    with torch.no_grad():
        done = onescan.linearize(bert(), [LABELED], **FAST)
    assert len(done.losses) == 3


def test_a_layer_with_several_names_is_one_layer():
    model = bert(num_hidden_layers=4)
    layers = model.bert.encoder.layer
    layers[1] = layers[2] = layers[3] = layers[0]
    done = onescan.linearize(model, [LABELED], **FAST, softmax_every=2)
    assert len(done.replaced) == 4
    assert done.kept == ()
    assert {len(losses) for losses in done.transfer_losses.values()} == {3}
    assert len(set(map(tuple, done.transfer_losses.values()))) == 1


def test_an_unused_layer_is_named():
    model = nn.ModuleDict({"used": encoder(), "unused": encoder()})
    model.forward = model["used"].forward
    with pytest.raises(ValueError, match=r"did not use unused\.layers\.0\.self_attn"):
        onescan.linearize(model, [{"src": torch.randn(2, 7, DIM)}], transfer_steps=1, steps=0)
    assert not any(is_replacement(module) for module in model.modules())


def test_a_loss_that_is_not_finite_ends_training():
    model, x = encoder(), torch.randn(2, 7, DIM)
    with pytest.raises(FloatingPointError, match="training loss is nan at step 1; check the in"):
        onescan.linearize(model, [x], **FAST, loss=lambda m, y: m(y).mean() * torch.nan)


def test_a_gradient_that_is_not_finite_ends_training():
    def loss(m, y):
        zero = 0 * sum(p.sum() for p in m.parameters())
        return m(y).square().mean() + 0 * torch.sqrt(zero)  # a gradient of 0 * inf

    model, x = encoder(), torch.randn(2, 7, DIM)
    with pytest.raises(FloatingPointError, match="gradient of the training loss is nan at step 1"):
        onescan.linearize(model, [x], **FAST, loss=loss)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"transfer_steps": 0, "steps": 8, "learning_rate": 1e30},
            r"^training diverged at step 2: .*; try a smaller learning_rate \(now 1e\+30\)$",
        ),
        (
            {"transfer_steps": 0, "steps": 1, "learning_rate": 1e30},
            "^training diverged at step 1: the norm of the weights is inf; try a smaller learning",
        ),
        (
            {"transfer_steps": 8, "steps": 0, "transfer_learning_rate": 1e30},
            r"^attention transfer diverged at step 2: .* transfer_learning_rate \(now 1e\+30\)$",
        ),
        (
            {"transfer_steps": 8, "steps": 0, "transfer_learning_rate": 1e4},
            r"^attention transfer diverged at step 8: the transfer loss of bert\.\S* is .*, but "
            r"was .* at step 1; try a smaller transfer_learning_rate \(now 10000\.0\)$",
        ),
    ],
)
def test_divergence_names_the_phase_and_its_learning_rate(options, message):
    with pytest.raises(FloatingPointError, match=message):
        onescan.linearize(bert(), [LABELED], **options)
