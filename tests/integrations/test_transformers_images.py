"""Image classifiers in transformers: the same numbers, saved, loaded, with another head."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForImageClassification

import onescan
from onescan.integrations.transformers import OnescanImageConfig, to_transformers

SMALL = {"num_classes": 5, "image_size": 16, "patch_size": 4, "depth": 2, "width": 24}
PRESETS = {
    "lightnet": ("lightnet_tiny", {"mixer.num_heads": 3}),
    "lion": ("lion_s_natural_tiny", {}),
    "ldn": ("ldn_base", {"mixer.num_heads": 3}),
    "deit": ("deit_tiny", {}),
}
over_presets = pytest.mark.parametrize(("name", "more"), PRESETS.values(), ids=PRESETS)


def built(name, more):
    return onescan.build(name, **SMALL, **more).eval()


def images(*size):
    return torch.randn(2, 3, *(size or (16, 16)))


@pytest.mark.sampled(2)
@over_presets
def test_a_classifier_comes_back_with_the_same_scores(name, more, tmp_path):
    native, pixels = built(name, more), images()
    names = dict(enumerate("abcde"))
    to_transformers(native, id2label=names).save_pretrained(tmp_path)
    model = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert_close(model(pixels).logits, native(pixels))
    assert model.config.id2label == names
    for key, weight in native.state_dict().items():
        assert torch.equal(model.to_onescan().state_dict()[key], weight), key
    tokens = AutoModel.from_pretrained(tmp_path)(pixels).last_hidden_state
    assert_close(tokens, native.forward_features(pixels))


def test_any_size_that_patches_divide():
    native = built(*PRESETS["lightnet"])
    pixels = images(20, 12)
    assert_close(to_transformers(native)(pixels).logits, native(pixels))


@over_presets
def test_a_head_for_other_classes_is_fresh(name, more, tmp_path):
    native = built(name, more)
    to_transformers(native).save_pretrained(tmp_path)
    model = AutoModelForImageClassification.from_pretrained(
        tmp_path, num_labels=7, ignore_mismatched_sizes=True
    )
    assert model(images()).logits.shape == (2, 7)
    assert 0.01 < model.network.head.weight.std() < 0.03
    for key, weight in native.blocks.state_dict().items():
        assert torch.equal(model.network.blocks.state_dict()[key], weight), key


def test_a_config_is_made_from_names_that_transformers_has():
    config = OnescanImageConfig(
        num_labels=4, hidden_size=24, num_hidden_layers=1, num_channels=1, patch_size=[8, 8]
    )
    config.mixer = {**config.mixer, "num_heads": 3}
    model = AutoModelForImageClassification.from_config(config)
    assert model(torch.zeros(1, 1, 16, 8)).logits.shape == (1, 4)


def test_the_loss_is_cross_entropy_and_reaches_all():
    model = to_transformers(built(*PRESETS["lightnet"])).train()
    labels = torch.tensor([1, 4])
    out = model(images(), labels=labels)
    assert_close(out.loss, cross_entropy(out.logits, labels))
    out.loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_both_heads_learn_where_there_are_two():
    native = onescan.build("deit_tiny", **SMALL, distillation_token=True, drop_path=0.0)
    model, pixels = to_transformers(native.train()), images()
    first, second = native(pixels)
    assert_close(model(pixels).logits, (first + second) / 2)


@pytest.mark.sampled(2)
@over_presets
def test_checkpointing_changes_no_gradient(name, more):
    gradients = []
    for enable in (False, True):
        torch.manual_seed(0)
        model = to_transformers(built(name, more)).train()
        model._set_gradient_checkpointing(enable=enable)
        assert model.network.blocks[0].gradient_checkpointing == enable
        torch.manual_seed(1)
        model(torch.ones(2, 3, 16, 16), labels=torch.tensor([1, 4])).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


def test_hidden_states_and_refusals():
    native = built(*PRESETS["lightnet"])
    model = to_transformers(native)
    states = model(images(), output_hidden_states=True).hidden_states
    assert [x.shape for x in states] == [(2, 17, 24)] * 3
    with pytest.raises(ValueError, match="output_attentions is True"):
        model(images(), output_attentions=True)
    assert model(images(15, 16)).logits.shape == model(images(16, 16)).logits.shape
