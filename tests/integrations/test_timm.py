"""timm's calls on the image classifiers: the same numbers as without timm, in its own shapes."""

import copy
import subprocess
import sys
from functools import partial
from importlib.util import find_spec

import pytest
import torch

import onescan
from onescan import zoo
from onescan.experiments.training.optim import parameter_groups
from onescan.models.presets import PRESETS

try:  # built for another torch, it fails in many ways
    import torchvision  # noqa: F401
except Exception as error:
    pytest.skip(f"timm needs torchvision: {error}", allow_module_level=True)
if find_spec("timm") is None:
    pytest.skip("timm is not installed", allow_module_level=True)

import timm.data
from timm.models import load_checkpoint
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV2

import onescan.integrations.timm  # registers the models

pytestmark = pytest.mark.integrations

SMALL = {"depth": 3, "width": 24, "num_classes": 5, "patch_size": 8}
HEADS = {"lightnet_tiny": 2, "lion_lit_tiny": 2, "lion_s_natural_tiny": 2, "ldn_base": 4}
GRID = (4, 6)
IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 48).sin().reshape(2, 3, 32, 48)


def fields(name):
    return {**SMALL, "mixer.num_heads": HEADS[name]}


def pair(name="lightnet_tiny", **options):
    """timm's model of this name, and ours with its weights."""
    model = timm.create_model(name, **{**fields(name), **options}).eval()
    native = onescan.build(name, **fields(name)).eval()
    native.load_state_dict(model.state_dict())
    return model, native


@pytest.fixture(params=HEADS)
def name(request):
    return request.param


@pytest.mark.skipif("digits_lightnet" not in zoo.names(), reason="no such weights")
def test_trained_weights_load():
    native = onescan.load("zoo/digits_lightnet")
    model = timm.create_model("onescan_digits_lightnet", pretrained=True).eval()
    images = torch.linspace(-1, 1, 2 * 8 * 8).sin().reshape(2, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(model(images), native.model(images))
    data = timm.data.resolve_data_config({}, model=model)
    assert data["input_size"] == (1, 8, 8)
    assert data["mean"] == native.format.mean
    assert timm.create_model("onescan_digits_lightnet", pretrained=True, num_classes=3) is not None


def test_every_model_but_timms_own_is_listed():
    ours = set(timm.list_models(module="timm"))
    presets = set(ours) - set(timm.list_models("onescan_*"))
    assert {"lightnet_tiny", "lion_lit_tiny", "ldn_base"} < presets < set(PRESETS)
    assert not [name for name in ours if name.startswith(("deit_", "vit_"))]
    assert timm.list_models("lion_*", pretrained=True) == []


def test_an_explicit_import_registers_the_models():
    code = """
import onescan, timm
print(timm.is_model("lightnet_tiny"))
import onescan.integrations.timm
print(timm.is_model("lightnet_tiny"))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.split() == ["False", "True"], run.stderr


def test_scores_are_the_native_models(name):
    model, native = pair(name)
    assert torch.equal(model(IMAGES), native(IMAGES))
    assert torch.equal(model.forward_features(IMAGES), native.forward_features(IMAGES))
    assert model.config == native.config


def test_arguments_become_fields():
    model = timm.create_model(
        "lightnet_tiny", **fields("lightnet_tiny"), in_chans=1, img_size=(16, 24),
        drop_path_rate=0.25, drop_rate=0.5, dtype=torch.float64,
    )  # fmt: skip
    config = model.config
    assert (config.channels, config.image_size, config.drop_path) == (1, (16, 24), 0.25)
    assert model.blocks[-1].drop_path.rate == 0.25
    assert model.in_chans == 1
    assert model.head.weight.dtype == torch.float64
    assert model.patch_embed.grid_size == (2, 3)
    assert model.patch_embed.num_patches == 6
    features = torch.ones(1, 7, 24, dtype=torch.float64)
    dropped = model.train().forward_head(features, pre_logits=True)
    assert set(dropped.unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qkv_bias": True}, "qkv_bias"),
        ({"drop_path": 0.1}, "drop_path is 0.1.*drop_path_rate"),
        ({"global_pool": "prr"}, "global_pool is 'prr', expected one of.*'token'"),
        ({"global_pool": "map"}, "global_pool is 'map'"),
        ({"num_classes": -1}, "num_classes is -1"),
        ({"depth": 0}, "depth is 0"),
        ({"out_indices": [1]}, "out_indices is unknown"),
        ({"distillation_token": True}, "distillation_token is True"),
    ],
)
def test_arguments_without_a_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model("lightnet_tiny", **{**fields("lightnet_tiny"), **options})


def test_there_are_no_published_weights():
    with pytest.raises(RuntimeError, match="No pretrained weights exist for lightnet_tiny"):
        timm.create_model("lightnet_tiny", pretrained=True, **fields("lightnet_tiny"))


def test_pools_read_what_timms_read():
    _, native = pair()
    tokens = native.forward_features(IMAGES)
    patches = tokens[:, 1:]
    expected = {
        "": tokens,
        "token": tokens[:, 0],
        "avg": patches.mean(1),
        "max": patches.amax(1),
        "avgmax": (patches.mean(1) + patches.amax(1)) / 2,
    }
    for global_pool, read in expected.items():
        chosen, _ = pair(global_pool=global_pool)
        chosen.load_state_dict(native.state_dict())
        assert chosen.global_pool == global_pool
        torch.testing.assert_close(chosen.forward_head(tokens, pre_logits=True), read)
        torch.testing.assert_close(chosen(IMAGES), native.head(read))


def test_a_mean_with_the_class_token_stays_one():
    model, native = pair("lion_s_natural_tiny", global_pool="avg")
    assert torch.equal(model(IMAGES), native(IMAGES))
    assert model.pool_include_prefix


def test_learnt_attention_is_timms_map():
    options = {**fields("ldn_base"), "pool": "attention"}
    model = timm.create_model("ldn_base", **options).eval()
    native = onescan.build("ldn_base", **options).eval()
    torch.nn.init.normal_(model.attention_pool.query)
    native.load_state_dict(model.state_dict())
    assert model.global_pool == "map"
    assert torch.equal(model(IMAGES), native(IMAGES))
    model.reset_classifier(5, "avg")
    assert not any("attention_pool" in key for key in model.state_dict())


def test_a_token_that_is_not_there_or_reads_nothing_is_refused():
    model, _ = pair("ldn_base")
    with pytest.raises(ValueError, match="global_pool is 'token'"):
        model.reset_classifier(5, "token")
    blind = {**fields("lion_s_natural_tiny"), "mixer.direction": "forward"}
    with pytest.raises(ValueError, match="global_pool is 'token'"):
        timm.create_model("lion_s_natural_tiny", **blind, global_pool="token")


def test_attributes_and_the_head(name):
    model, native = pair(name)
    assert model.num_features == model.embed_dim == model.head_hidden_size == 24
    assert model.num_prefix_tokens == native.prefix
    assert model.get_classifier().out_features == model.num_classes == 5
    model.double().reset_classifier(7)
    assert model(IMAGES.double()).shape == (2, 7)
    assert model.config.build().head.out_features == 7
    assert model.get_classifier().weight.std() < 0.04  # the model's own first weights
    model.float().reset_classifier(0)
    pooled = native.pooled(native.forward_features(IMAGES))
    assert torch.equal(model(IMAGES), pooled)
    headless = timm.create_model(name, **{**fields(name), "num_classes": 0}).eval()
    assert headless.num_classes == 0
    assert headless(IMAGES).shape == (2, 24)
    with pytest.raises(ValueError, match="num_classes is -1"):
        model.reset_classifier(-1)


def test_intermediates(name):
    model, native = pair(name)
    after = []
    for block in native.blocks:
        block.register_forward_hook(lambda block, arguments, output: after.append(output[0]))
    final = native.forward_features(IMAGES)
    last, maps = model.forward_intermediates(IMAGES)
    assert torch.equal(last, final)
    for tokens, image in zip(after, maps, strict=True):
        patches = tokens[:, native.prefix :].mT.reshape(2, 24, *GRID)
        assert torch.equal(image, patches)
    (row,) = model.forward_intermediates(
        IMAGES, [-1], norm=True, output_fmt="NLC", intermediates_only=True
    )
    assert torch.equal(row, final[:, native.prefix :])


def test_intermediates_with_prefix_stop_early():
    model, _ = pair()
    runs = []
    model.blocks[2].register_forward_hook(lambda *_: runs.append(1))
    last, [(_, first), (patches, prefix)] = model.forward_intermediates(
        IMAGES, [0, 1], return_prefix_tokens=True, stop_early=True, output_fmt="NLC"
    )
    assert not runs
    assert first.shape == (2, 1, 24)
    assert torch.equal(last, model.norm(torch.cat([prefix, patches], dim=1)))
    assert len(model.forward_intermediates(IMAGES, 2, intermediates_only=True)) == 2
    for wrong in ([3], 4, [], -1):
        with pytest.raises(ValueError, match=r"indices is .* from 1 to 3"):
            model.forward_intermediates(IMAGES, wrong)
    with pytest.raises(ValueError, match="output_fmt is 'NHWC'"):
        model.forward_intermediates(IMAGES, output_fmt="NHWC")


def test_features_only(name):
    options = {**fields(name), "features_only": True, "out_indices": (0, -2)}
    features = timm.create_model(name, **options).eval()
    assert features.feature_info.channels() == [24, 24]
    assert features.feature_info.reduction() == [8, 8]
    assert len(features.model.blocks) == 2
    assert isinstance(features.model.norm, torch.nn.Identity)
    assert isinstance(features.model.head, torch.nn.Identity)
    expected = features.model.forward_intermediates(IMAGES, [0, 1], intermediates_only=True)
    for image, same in zip(features(IMAGES), expected, strict=True):
        assert image.shape == (2, 24, *GRID)
        assert torch.equal(image, same)


def test_checkpointing_keeps_gradients(name):
    model, native = pair(name)
    model.set_grad_checkpointing()
    assert all(block.recompute for block in model.blocks)
    for network in (model, native):
        network(IMAGES).square().sum().backward()
    for ours, theirs in zip(model.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    model.set_grad_checkpointing(False)
    assert not any(block.recompute for block in model.blocks)


def test_timms_optimizer_treats_each_parameter_by_its_place(name):
    model, native = pair(name)
    names = {parameter: key for key, parameter in model.named_parameters()}
    optimizer = create_optimizer_v2(model, "adamw", lr=1.0, weight_decay=0.1, layer_decay=0.5)
    groups = {names[p]: group for group in optimizer.param_groups for p in group["params"]}
    assert set(groups) == {key for key, _ in native.named_parameters()}
    native_names = {parameter: key for key, parameter in native.named_parameters()}
    decaying = {native_names[p] for p in parameter_groups(native, 0.1)[0]["params"]}
    for key, group in groups.items():
        part = key.split(".")
        place = {"blocks": 1 + int(part[1]) if part[0] == "blocks" else 0, "norm": 3, "head": 4}
        assert group["lr_scale"] == 0.5 ** (4 - place.get(part[0], 0)), key
        assert group["weight_decay"] == (0.1 if key in decaying else 0), key
    assert model.no_weight_decay() <= set(groups)


def test_the_input_size_can_be_changed(name):
    model, _ = pair(name)
    before = model(IMAGES)
    model.set_input_size((32, 48))
    assert model.patch_embed.grid_size == GRID
    torch.testing.assert_close(model(IMAGES), before)
    assert model.config.build().load_state_dict(model.state_dict())
    assert model._traits["img_size"] == (32, 48)
    model.set_input_size(patch_size=8)
    with pytest.raises(ValueError, match="patch_size is 4"):
        model.set_input_size(patch_size=4)
    model.set_input_size((30, 33))  # padded to whole patches
    assert model.patch_embed.grid_size == (4, 5)
    assert model(torch.randn(2, 3, 30, 33)).isfinite().all()


def test_native_weights_are_a_checkpoint(tmp_path):
    model, native = pair()
    torch.nn.init.normal_(native.head.weight)
    torch.save(native.state_dict(), path := str(tmp_path / "weights.pt"))
    loaded = timm.create_model("lightnet_tiny", checkpoint_path=path, **fields("lightnet_tiny"))
    assert torch.equal(loaded.eval()(IMAGES), native(IMAGES))
    load_checkpoint(model, path)
    assert torch.equal(model(IMAGES), native(IMAGES))
    options = {**fields("lightnet_tiny"), "num_classes": 3}
    source = {"file": path, "num_classes": 5}
    tuned = timm.create_model(
        "lightnet_tiny", pretrained=True, pretrained_cfg_overlay=source, **options
    )
    features = tuned.eval().forward_features(IMAGES)
    assert torch.equal(features, native.forward_features(IMAGES))


def test_data_and_averages_follow_the_model():
    model, _ = pair()
    data = timm.data.resolve_model_data_config(model)
    assert data["input_size"] == (3, 224, 224)
    assert data["mean"] == (0.485, 0.456, 0.406)
    assert (data["crop_pct"], data["interpolation"]) == (0.875, "bicubic")
    average = ModelEmaV2(model, decay=0.0)
    trained = copy.deepcopy(model)
    torch.nn.init.normal_(trained.head.weight)
    average.update(trained)
    assert torch.equal(average.module(IMAGES), trained(IMAGES))


def test_frozen_weights_stay_frozen(name):
    model = timm.create_model(name, **fields(name))
    model.requires_grad_(False)
    model.set_input_size((64, 64))
    model.reset_classifier(0, "")
    assert not [key for key, weight in model.named_parameters() if weight.requires_grad]


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_scripts_and_graphs_are_refused(name):
    model, _ = pair(name)
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.script cannot compile this model"):
        torch.jit.script(model)
    with pytest.raises(NotImplementedError, match=r"torch\.fx cannot trace this model"):
        torch.fx.symbolic_trace(model)
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace cannot trace this model"):
        torch.jit.trace(model, IMAGES)


def test_every_parameter_gets_a_gradient(name):
    model = timm.create_model(name, **fields(name)).train()
    model(IMAGES).square().mean().backward()
    assert not [key for key, weight in model.named_parameters() if weight.grad is None]


def test_models_run_on_the_meta_device_and_in_another_dtype(name):
    with torch.device("meta"):
        model = timm.create_model(name, **fields(name), device="meta").eval()
    assert model(IMAGES.to("meta")).shape == (2, 5)
    model, _ = pair(name)
    model(IMAGES)
    assert model.bfloat16()(IMAGES.bfloat16()).dtype == torch.bfloat16


def test_checkpointed_features_keep_gradients(name):
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        options = {"features_only": True, "out_indices": (0, 2)}
        features = timm.create_model(name, **fields(name), **options).train()
        features.model.set_grad_checkpointing(recompute)
        sum(maps.square().mean() for maps in features(IMAGES)).backward()
        gradients.append([weight.grad for weight in features.parameters()])
    torch.testing.assert_close(*gradients)


def test_a_pruned_model_uses_all_its_parameters(name):
    model = timm.create_model(name, **fields(name)).train()
    assert model.prune_intermediate_layers(1, prune_head=False) == [2]
    assert model.prune_intermediate_layers([0]) == [0]
    assert len(model.blocks) == 1
    model(IMAGES).square().mean().backward()
    assert not [key for key, weight in model.named_parameters() if weight.grad is None]


@pytest.mark.skipif("cifar10_lightnet" not in zoo.names(), reason="no such weights")
def test_trained_weights_fit_other_channels_and_classes():
    create = partial(timm.create_model, "onescan_cifar10_lightnet", pretrained=True)
    size = create().pretrained_cfg["input_size"]
    images = torch.linspace(-1, 1, size[1] * size[2]).sin().reshape(1, 1, *size[1:])
    assert create().eval()(images.expand(1, *size)).shape == (1, 10)
    assert create(in_chans=1, num_classes=5).eval()(images).shape == (1, 5)
    gray, color = (create(in_chans=count).eval() for count in (1, 3))
    torch.testing.assert_close(gray(images), color(images.expand(1, *size)))
    headless = create(num_classes=0).eval()
    assert headless(images.expand(1, *size)).shape == (1, headless.num_features)
    features = create(features_only=True, out_indices=(0, 1)).eval()
    assert len(features(images.expand(1, *size))) == 2
