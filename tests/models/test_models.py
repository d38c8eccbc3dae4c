"""The classifier, its presets, and the parameter counts that decide how LightNet is built."""

from copy import copy, deepcopy

import jaxtyping
import numpy as np
import pytest
import torch

from onescan.configs import replace
from onescan.layers.basic import MLPConfig
from onescan.layers.mixers import (
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    LionMixerConfig,
)
from onescan.layers.position import AbsolutePositionConfig
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.denoiser import DenoiserConfig
from onescan.models.dense_predictor import DensePredictorConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.masked_lm import MaskedLMConfig
from onescan.models.presets import (
    LDN_ABLATIONS,
    LIGHTNET_ABLATIONS,
    LION_ABLATIONS,
    PRESETS,
    build,
    preset,
)
from onescan.models.sequence_classifier import SequenceClassifierConfig
from onescan.models.sequence_decoder import SequenceDecoderConfig
from onescan.models.size import model_size

SIZES = ("tiny", "small", "base")
# Counted by hand from the paper's equations, layer by layer.
LIGHTNET_PARAMETERS = {
    "lightnet": (6_009_832, 22_635_496, 87_737_320),
    "without_tpe": (5_960_680, 22_537_192, 87_540_712),
    "without_lrpe": (6_007_528, 22_630_888, 87_728_104),
    "without_decay": (6_009_832, 22_635_496, 87_737_320),
    "without_norm": (6_005_224, 22_626_280, 87_718_888),
    "full_rank_gate": (6_157_288, 23_815_144, 93_635_560),
}
DEIT_PARAMETERS = (5_717_416, 22_050_664, 86_567_656)
# DeiT's, without positions and with decays but for lit
LION_PARAMETERS = {
    "lion_lit": DEIT_PARAMETERS,
    "lion_d": (5_679_628, 21_975_088, 86_416_504),
    "lion_s": (5_686_540, 22_002_736, 86_527_096),
    "lion_d_natural": (5_679_664, 21_975_160, 86_416_648),
    "lion_s_natural": (5_693_488, 22_030_456, 86_637_832),
}


def tiny(**changes):
    fields = {
        "image_size": (8, 8), "channels": 1, "patch_size": (2, 2), "num_classes": 5, "width": 24,
        "depth": 2, "mixer": LightNetMixerConfig(num_heads=2), "drop_path": 0.0,
    }  # fmt: skip
    return ImageClassifierConfig(**{**fields, **changes})


@pytest.mark.sampled(7)
@pytest.mark.parametrize("row", LIGHTNET_PARAMETERS)
@pytest.mark.parametrize("size", SIZES)
def test_lightnet_has_exactly_the_papers_parameters(row, size):
    config = preset(f"lightnet_{size}", **LIGHTNET_ABLATIONS.get(row, {}))
    want = LIGHTNET_PARAMETERS[row][SIZES.index(size)]
    assert model_size(config).parameters == want


@pytest.mark.parametrize("size", SIZES)
def test_deit_has_exactly_deits_parameters_and_cost(size):
    counted = model_size(preset(f"deit_{size}"))
    assert counted.parameters == DEIT_PARAMETERS[SIZES.index(size)]
    # 1.3, 4.6 and 17.6 GMACs are what is published for DeiT
    assert round(counted.macs / 1e9, 1) == (1.3, 4.6, 17.6)[SIZES.index(size)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", LION_PARAMETERS)
@pytest.mark.parametrize("size", SIZES)
def test_lion_has_deits_parameters_and_its_decays(name, size):
    counted = model_size(preset(f"{name}_{size}")).parameters
    assert counted == LION_PARAMETERS[name][SIZES.index(size)]


@pytest.mark.parametrize(("patch", "gmacs"), [(16, 127.3), (14, 167.3)])
def test_vit_h_has_its_parameters_with_either_patch_but_not_the_printed_cost(patch, gmacs):
    d, patches = 1280, (224 // patch) ** 2
    block = 12 * d * d + 13 * d  # matrices, and biases and norms
    counted = model_size(preset("vit_huge", patch_size=patch))
    embedding = (3 * patch**2 + 1) * d + d + (patches + 1) * d  # patches, class token, positions
    assert counted.parameters == embedding + 32 * block + 2 * d + 1000 * (d + 1)
    assert round(counted.parameters / 1e6) == 632
    assert round(counted.macs / 1e9, 1) == gmacs


@pytest.mark.parametrize(
    ("size", "width", "depth"), [("base", 768, 12), ("large", 1024, 24), ("huge", 1280, 32)]
)
def test_ldn_has_exactly_the_parameters_of_its_equations(size, width, depth):
    attention = 3 * width**2  # queries, keys and values; no projection of what is heard
    local_update = 2 * 2 * width**2  # gate and update, each of [x; h]
    diffusion = 4  # sigma, past, future, dt
    patches, positions = (3 * 16**2 + 1) * width, (224 // 16) ** 2 * width
    norm, head = 2 * width, 1000 * (width + 1)
    blocks = depth * (attention + local_update + diffusion)
    counted = model_size(preset(f"ldn_{size}")).parameters
    assert counted == patches + positions + blocks + norm + head


def test_lightnets_language_model_has_exactly_the_papers_parameters():
    """45.07 million: tied embeddings, 6 layers of GLU, gate and attention, norm and angles, TPE."""
    d, vocabulary, hidden, gate = 512, 50265, 1365, 64
    layer = 4 * d * d + 2 * gate * d + 3 * d * hidden + 2 * d + d
    want = vocabulary * d + 6 * layer + 2 * 64 * d
    assert model_size(preset("lightnet_lm_45m")).parameters == want == 45_074_944


def test_gpt2_and_bert_have_exactly_their_parameters():
    d = 768
    block = 12 * d * d + 13 * d  # matrices, and biases and norms
    gpt2 = 50257 * d + 1024 * d + 12 * block + 2 * d
    assert model_size(preset("gpt2_small")).parameters == gpt2 == 124_439_808
    assert model_size(preset("linear_attention_lm_124m")).parameters == gpt2
    head = d * d + d + 2 * d + 30522  # transform, norm and bias, as in BERT; the matrix is tied
    bert = (30522 + 512 + 2) * d + 2 * d + 12 * block + head  # post-norm: no final norm
    assert model_size(preset("bert_base")).parameters == bert == 109_514_298
    roberta = bert + (50265 - 30522) * (d + 1) + (514 - 512) * d - d  # one segment type
    assert model_size(preset("roberta_base")).parameters == roberta == 124_697_433
    # BertForMaskedLM with the config of google-bert/bert-large-uncased
    assert model_size(preset("bert_large")).parameters == 335_174_458


@pytest.mark.parametrize("family", ["lightnet", "deit"])
def test_a_model_takes_any_size(family):
    model = build(f"{family}_tiny", depth=1, image_size=(40, 50)).double().eval()
    images = torch.randn(1, 3, 37, 50, dtype=torch.float64)
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 384, 256).double()).shape == (1, 1000)
        whole = torch.zeros(1, 3, 48, 64, dtype=torch.float64)
        whole[:, :, :37, :50] = images
        assert torch.equal(model(images), model(whole))
        with pytest.raises(ValueError, match="input has size 224 x 0, expected at least 1"):
            model(torch.zeros(1, 3, 224, 0).double())


def assert_every_parameter_learns(config):
    model = config.build()
    images = torch.randn(3, 1, 8, 8)
    loss = torch.nn.functional.cross_entropy(model(images), torch.tensor([0, 1, 4]))
    loss.backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not missing


def rows_of(name, rows):
    return pytest.mark.parametrize("row", [{}, *rows.values()], ids=[name, *rows])


@rows_of("lightnet", LIGHTNET_ABLATIONS)
@pytest.mark.parametrize("pool", ["class_token", "mean"])
def test_every_row_of_lightnet_learns_with_every_parameter(row, pool):
    assert_every_parameter_learns(replace(tiny(pool=pool), row))


@rows_of("lion", LION_ABLATIONS)
@pytest.mark.parametrize("pool", ["mean_with_class_token", "mean"])
def test_every_row_of_lion_learns_with_every_parameter(row, pool):
    mixer = LionMixerConfig(num_heads=2)
    assert_every_parameter_learns(replace(tiny(mixer=mixer, position=None, pool=pool), row))


@rows_of("ldn", LDN_ABLATIONS)
@pytest.mark.parametrize("pool", ["mean", "max", "attention"])
def test_every_row_of_ldn_learns_with_every_parameter(row, pool):
    mixer, position = LinearDiffusionMixerConfig(num_heads=2), AbsolutePositionConfig()
    config = tiny(mixer=mixer, mlp=None, position=position, pool=pool)
    assert_every_parameter_learns(replace(config, row))


def test_the_class_token_hears_of_every_patch():
    model = tiny().build().eval()
    images = torch.randn(1, 1, 8, 8, requires_grad=True)
    model(images).sum().backward()
    assert (images.grad != 0).all()


def test_without_positions_patches_may_be_shuffled_but_not_with_them():
    images = torch.randn(1, 1, 8, 8)
    shuffled = images.roll(2, dims=-1)  # by one patch
    blind = replace(tiny(), {"position": None, "mixer.lrpe": False}).build().eval()
    torch.testing.assert_close(blind(shuffled), blind(images))
    for field in ({"position": None}, {"mixer.lrpe": False}):
        model = replace(tiny(), field).build().eval()
        assert (model(shuffled) - model(images)).abs().max() > 1e-5


def test_features_and_head_make_the_forward():
    model = tiny().build().eval()
    images = torch.randn(2, 1, 8, 8)
    features = model.forward_features(images)
    assert features.shape == (2, 17, 24)
    assert torch.equal(model.forward_head(features), model(images))


def test_a_mean_of_all_tokens_takes_in_the_class_token():
    model = tiny(pool="mean_with_class_token").build().eval()
    features = model.forward_features(torch.randn(2, 1, 8, 8))
    assert features.shape == (2, 17, 24)
    torch.testing.assert_close(model.forward_head(features), model.head(features.mean(dim=1)))


def test_drop_path_grows_to_the_last_block():
    model = tiny(depth=3, drop_path=0.2).build()
    assert [block.drop_path.rate for block in model.blocks] == [0.0, 0.1, 0.2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build("lightnet_tinny"), "'lightnet_tinny' is unknown .*meant 'lightnet_tiny'"),
        (lambda: build("lightnet_tiny", widht=3), "widht is unknown .*'width'"),
        (lambda: build("lightnet_tiny", **{"mixer.lrp": 1}), "mixer.lrp is unknown .*'lrpe'"),
        (lambda: build("lightnet_tiny", width="a"), "width is 'a', expected int"),
        (lambda: build("lightnet_tiny", width=100), "width 100 is not a multiple of num_heads 6"),
        (lambda: build("lightnet_tiny", depth=0), "depth is 0"),
        (lambda: build("lightnet_tiny", patch_size=0), r"patch_size\[0\] is 0"),
        (lambda: build("lightnet_tiny", pool="sum"), "pool is 'sum', expected"),
        (lambda: build("lightnet_tiny", drop_path=2.0), "drop_path is 2.0, expected 0 or more"),
        (lambda: build("lightnet_tiny", **{"position.hidden_states": 0}), "hidden_states is 0"),
        (
            lambda: build("lightnet_tiny", **{"mixer.direction": "forward"}),
            "the class token reads no patch",
        ),
    ],
)
def test_errors_name_the_field(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "config",
    [
        tiny(),
        DensePredictorConfig(),
        DenoiserConfig(),
        CausalLMConfig(),
        MaskedLMConfig(),
        SequenceClassifierConfig(),
        SequenceDecoderConfig(vocab_size=9),
    ],
    ids=lambda config: type(config).__name__,
)
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("width", 24.0, "width is 24.0, expected int"),
        ("depth", "2", "depth is '2', expected int"),
        ("init_std", None, "init_std is None, expected float"),
        ("norm", 1, r"norm is 1, expected Literal\["),
        ("mixer", "lightnet", "mixer is 'lightnet', expected MixerConfig"),
        ("mixer", LionMixerConfig, "mixer is the class LionMixerConfig, expected MixerConfig"),
        ("mixer", {"num_heads": 2}, "mixer is {'num_heads': 2}, expected MixerConfig"),
        ("mlp", 4, r"mlp is 4, expected MLPConfig \| None"),
    ],
)
def test_values_of_wrong_types_are_refused(config, field, value, message):
    config = copy(config)
    object.__setattr__(config, field, value)  # past the tests' own check of types
    with pytest.raises(ValueError, match=f"^{message}"):
        config.build()


@pytest.mark.parametrize(
    ("config", "field", "value", "message"),
    [
        (tiny(), "image_size", 8, r"image_size is 8, expected tuple\[int, ...\]"),
        (tiny(), "patch_size", (2, 2.0), r"patch_size is \(2, 2.0\), expected tuple\[int, ...\]"),
        (tiny(), "pool", None, r"pool is None, expected Literal\["),
        (tiny(), "drop_path", "0.1", "drop_path is '0.1', expected float"),
        (tiny(), "distillation_token", "no", "distillation_token is 'no', expected bool"),
        (tiny(), "position", True, r"position is True, expected PositionConfig \| None"),
        (DenoiserConfig(), "label_dropout", None, "label_dropout is None, expected float"),
        (CausalLMConfig(), "segment_types", None, "segment_types is None, expected int"),
        (CausalLMConfig(), "dropout", "0", "dropout is '0', expected float"),
        (SequenceDecoderConfig(vocab_size=9), "num_heads", 3.0, "num_heads is 3.0, expected int"),
    ],
)
def test_the_types_of_other_fields_are_checked(config, field, value, message):
    config = copy(config)
    object.__setattr__(config, field, value)  # past the tests' own check of types
    with pytest.raises(ValueError, match=f"^{message}"):
        config.build()


def test_the_types_of_nested_configs_are_checked():
    config = tiny(mlp=MLPConfig())
    object.__setattr__(config.mlp, "ratio", "4")
    with pytest.raises(ValueError, match=r"^mlp.ratio is '4', expected float"):
        config.build()


def test_lists_and_numpy_numbers_are_accepted(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    config = tiny(image_size=[8, 8], patch_size=[2, np.int64(2)], width=np.int64(24), drop_path=0)
    assert config.build()(torch.zeros(1, 1, 8, 8)).shape == (1, 5)


@pytest.mark.parametrize(
    "method", ["forward", "forward_features", "forward_grid", "forward_intermediates", "stream"]
)
def test_images_of_wrong_types_are_refused(method, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    read = getattr(tiny().build(), method)
    with pytest.raises(ValueError, match=r"^images has dtype torch.uint8, expected a floating"):
        read(torch.ones(1, 1, 8, 8).byte())
    with pytest.raises(ValueError, match=r"^images is a list, expected a tensor"):
        read([[[[0.0]]]])


@pytest.mark.parametrize(
    "config", [tiny(pool="mean"), DensePredictorConfig(image_size=(32, 32), width=24, depth=2)]
)
def test_a_mask_that_is_no_tensor_is_refused(config, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    model = config.build()
    with pytest.raises(ValueError, match=r"^keep is a list, expected a tensor"):
        model(*config.example_inputs(), keep=[[True]])


@pytest.mark.compile
def test_a_classifier_compiles_whole():
    model = tiny().build()
    images = torch.randn(2, 1, 8, 8)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images), model(images))


@pytest.mark.compile
def test_a_classifier_exports_with_any_batch():
    model = tiny().build().eval()
    batch = torch.export.Dim("batch")
    exported = torch.export.export(model, (torch.zeros(2, 1, 8, 8),), dynamic_shapes=({0: batch},))
    images = torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(exported.module()(images), model(images))


def test_an_empty_batch_may_have_a_mask():
    model = ImageClassifierConfig(
        width=8,
        depth=1,
        image_size=(8, 8),
        patch_size=(4, 4),
        mixer=LightNetMixerConfig(num_heads=2),
    ).build()
    keep = torch.ones(0, 8, 8, dtype=torch.bool)
    assert model(torch.empty(0, 3, 8, 8), keep=keep).shape == (0, 1000)


def test_presets_can_be_copied():
    assert deepcopy(PRESETS["deit_tiny"]) == PRESETS["deit_tiny"]
