"""Heads, backbones and config names that other tools expect of a model in transformers."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_transformers_images import PRESETS, built
from tiny_language_models import BOTH, CAUSAL, VOCABULARY, causal, ids
from tiny_language_models import SMALL as SMALL_TEXT
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from transformers import (
    AutoBackbone,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    UperNetConfig,
    UperNetForSemanticSegmentation,
)

import onescan
from onescan.integrations.transformers import (
    OnescanBackbone,
    OnescanImageConfig,
    OnescanTextConfig,
    to_transformers,
)
from onescan.layers.position import TokenPositionConfig

HEADS = {
    "tokens": (AutoModelForTokenClassification, (2, 5)),
    "answers": (AutoModelForQuestionAnswering, (2, 5)),
    "choices": (AutoModelForMultipleChoice, (2, 3, 5)),
}


def with_head(auto, **fields):
    torch.manual_seed(0)
    return auto.from_config(OnescanTextConfig(**{**SMALL_TEXT, **BOTH["bert"], **fields})).eval()


def labels_of(name):
    if name == "tokens":
        return {"labels": torch.tensor([[0, 1, 2, 1, -100], [2, 0, -100, 1, 1]])}
    if name == "answers":
        return {"start_positions": torch.tensor([0, 2]), "end_positions": torch.tensor([3, 4])}
    return {"labels": torch.tensor([2, 0])}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_learns_and_is_saved(name, tmp_path):
    auto, shape = HEADS[name]
    model = with_head(auto, num_labels=3)
    tokens = torch.randint(VOCABULARY, shape)
    out = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **labels_of(name))
    labels = list(labels_of(name).values())
    logits = {
        "tokens": lambda: [out.logits.flatten(0, 1)],
        "answers": lambda: [out.start_logits, out.end_logits],
        "choices": lambda: [out.logits],
    }[name]()
    losses = [cross_entropy(x, y.flatten()) for x, y in zip(logits, labels, strict=True)]
    assert_close(out.loss, sum(losses) / len(losses))
    out.loss.backward()
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0
    assert all(p.grad is not None for n, p in model.named_parameters() if "segment" not in n)
    model.save_pretrained(tmp_path)
    again = auto.from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert_close(again(tokens)[0], model(tokens)[0])


def test_heads_start_from_a_language_model(tmp_path):
    native = causal(CAUSAL["lightnet"])
    to_transformers(native).save_pretrained(tmp_path)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path, num_labels=4)
    assert model(ids(2, 5)).logits.shape == (2, 5, 4)
    for name, weight in native.network.named_parameters():
        assert torch.equal(model.network.get_parameter(name), weight), name
    with pytest.raises(ValueError, match="OnescanForTokenClassification has no native model"):
        model.to_onescan()


def test_choices_need_an_axis():
    model = with_head(AutoModelForMultipleChoice)
    with pytest.raises(ValueError, match=r"input_ids has shape \(2, 5\)"):
        model(ids(2, 5))
    tokens = ids(6, 5)
    scores = model(tokens.view(2, 3, 5)).logits.flatten()
    torch.testing.assert_close(model.to_onescan()(tokens)[:, 0], scores)


def test_the_loss_of_choices_is_divided_by_the_labels_of_all_batches():
    model, tokens, labels = with_head(AutoModelForMultipleChoice), ids(6, 3, 5), ids(6) % 3
    whole = model(tokens, labels=labels)
    torch.testing.assert_close(whole.loss, cross_entropy(whole.logits, labels))
    parts = [
        model(tokens[rows], labels=labels[rows], num_items_in_batch=6).loss
        for rows in (slice(0, 2), slice(2, 6))
    ]
    torch.testing.assert_close(sum(parts), whole.loss)


def test_text_configs_have_the_names_that_tools_read():
    config = OnescanTextConfig(**{**SMALL_TEXT, **CAUSAL["lightnet"]}, initializer_range=0.1)
    assert config.init_std == config.initializer_range == 0.1
    assert config.num_attention_heads == config.mixer["num_heads"]
    mlp = causal(CAUSAL["lightnet"]).network.blocks[0].mlp
    assert config.intermediate_size == mlp.up_proj.out_features
    assert config.is_decoder
    assert not hasattr(config, "max_position_embeddings")
    config.num_attention_heads = 4
    assert config.mixer["num_heads"] == 4
    limited = OnescanTextConfig(**{**BOTH["bert"], "position": TokenPositionConfig(max_tokens=77)})
    assert limited.max_position_embeddings == 77
    assert not limited.is_decoder


def test_only_models_with_angles_or_decays_keep_weights_in_float32():
    expected = {"lightnet": {"theta", "log_rate"}, "mamba2": {"log_rate", "dt_bias"}}
    for name, names in expected.items():
        kept = to_transformers(causal(CAUSAL[name]))._keep_in_fp32_modules_strict
        assert set(kept) == names  # a list in some versions
    without = to_transformers(built(*PRESETS["deit"]))
    assert not without._keep_in_fp32_modules_strict


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PRESETS)
def test_a_backbone_returns_feature_maps(name, tmp_path):
    native, pixels = built(*PRESETS[name]), torch.randn(2, 3, 16, 16)
    to_transformers(native).save_pretrained(tmp_path)
    backbone = OnescanBackbone.from_pretrained(tmp_path, out_indices=[0, 1, 2])
    assert type(AutoBackbone.from_config(backbone.config)) is OnescanBackbone
    assert backbone.out_features == ["stem", "stage1", "stage2"]
    assert backbone.channels == [24, 24, 24]
    maps = backbone(pixels).feature_maps
    assert_close(maps[1], native.forward_intermediates(pixels, [0])[1][0])
    assert_close(maps[2], native.forward_grid(pixels))
    assert [len(x.shape) for x in maps] == [4, 4, 4]
    only = OnescanBackbone.from_pretrained(tmp_path)
    assert [x.shape for x in only(pixels).feature_maps] == [(2, 24, 4, 4)]
    assert only(pixels).hidden_states is None


def test_names_and_indices_of_feature_maps_agree():
    config = OnescanImageConfig(depth=3, out_features=["stage1", "stage3"], out_indices=[1, -1])
    assert list(config.out_indices) == [1, 3]
    with pytest.raises(ValueError, match=r"expected out_indices \[1, 3\]"):
        OnescanImageConfig(depth=3, out_features=["stage1", "stage3"], out_indices=[0, 2])


def test_a_segmenter_uses_a_backbone():
    backbone = OnescanImageConfig.from_onescan(
        built(*PRESETS["lightnet"]).config, out_indices=[1, 2]
    )
    config = UperNetConfig(
        backbone_config=backbone, hidden_size=16, num_labels=3, use_auxiliary_head=False
    )
    model = UperNetForSemanticSegmentation(config)
    labels = torch.randint(3, (2, 32, 32))
    out = model(torch.randn(2, 3, 32, 32), labels=labels)
    assert out.logits.shape == (2, 3, 32, 32)
    out.loss.backward()
    patches = model.backbone.get_input_embeddings()
    assert all(p.grad.abs().sum() > 0 for p in patches.parameters())


@pytest.mark.parametrize("head", ["lm", "classifier", "tokens"])
def test_the_base_model_ignores_heads_only(head, tmp_path):
    kind = {
        "lm": transformers.AutoModelForMaskedLM,
        "classifier": transformers.AutoModelForSequenceClassification,
        "tokens": AutoModelForTokenClassification,
    }[head]
    to_transformers(onescan.build("lightnet_mlm_base", **SMALL_TEXT)).save_pretrained(
        tmp_path / "a"
    )
    kind.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    _, info = transformers.AutoModel.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    tensors["model.network.other"] = torch.zeros(1)
    save_file(tensors, tmp_path / "b" / "model.safetensors", metadata={"format": "pt"})
    _, info = transformers.AutoModel.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert len(info["unexpected_keys"]) == 1
