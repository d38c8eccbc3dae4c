"""The denoiser, its condition, and the parameter counts that decide how it is built."""

import re
from inspect import unwrap

import pytest
import torch

import onescan
from onescan.layers.basic import GLUConfig
from onescan.layers.block import FREQUENCIES, LabelEmbedding, TimestepEmbedding
from onescan.layers.mixers import (
    DeltaRuleMixerConfig,
    HydraMixerConfig,
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    LionMixerConfig,
    MambaMixerConfig,
    SoftmaxMixerConfig,
)
from onescan.layers.position import SinusoidalPosition, ToeplitzPositionConfig
from onescan.layers.tokens import Patchify, Unpatchify
from onescan.models.denoiser import Denoiser, DenoiserConfig, NoiseConfig, SamplerConfig
from onescan.models.presets import PRESETS, preset
from onescan.models.size import model_size
from onescan.shapes import Grid

MIXERS = {
    "lightnet": LightNetMixerConfig(num_heads=2),
    "lion": LionMixerConfig(num_heads=2),
    "linear_diffusion": LinearDiffusionMixerConfig(num_heads=2),
    "delta_rule": DeltaRuleMixerConfig(num_heads=2),
    "mamba": MambaMixerConfig(state_size=4),
    "hydra": HydraMixerConfig(num_heads=2, state_size=4),
    "softmax": SoftmaxMixerConfig(num_heads=2),
}
CONDITIONS = ("tokens", "adaln_zero")
# of patches 2 x 2: what Table 14 rounds to 33, 131, 470 and 680 million
LIGHTNET_PARAMETERS = {
    "s": 33_532_448, "b": 131_060_768, "l": 470_050_848, "xl": 678_523_424,
}  # fmt: skip


def tiny(**changes):
    fields = {
        "image_size": (8, 8), "channels": 3, "num_classes": 5, "width": 24, "depth": 2,
        "mixer": LightNetMixerConfig(num_heads=2), "init_std": 0.2, "label_dropout": 0.5,
    }  # fmt: skip
    return DenoiserConfig(**fields | changes)


def awake(config):
    """A model whose last maps are not 0 any more, in float64."""
    torch.manual_seed(0)
    model = config.build().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.2)
    return model.eval()


def noisy(*size, count=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, *size, generator=generator, dtype=torch.float64)


T, LABELS = torch.tensor([10, 900]), torch.tensor([1, 4])


@pytest.mark.sampled
@pytest.mark.parametrize("size", LIGHTNET_PARAMETERS)
def test_lightnet_has_exactly_the_parameters_of_its_table(size):
    assert model_size(preset(f"lightnet_dit_{size}_2")).parameters == LIGHTNET_PARAMETERS[size]


@pytest.mark.parametrize(
    ("size", "d", "depth"), [("s", 384, 12), ("b", 768, 12), ("l", 1024, 24), ("xl", 1152, 28)]
)
def test_dit_has_exactly_dits_parameters(size, d, depth):
    block = 4 * d * d + 4 * d + 8 * d * d + 5 * d + 6 * d * d + 6 * d  # attention, MLP, modulation
    condition = 256 * d + d + d * d + d + 1001 * d
    ends = 16 * d + d + 2 * d * d + 2 * d + 32 * d + 32  # patches, modulation, patches
    assert model_size(preset(f"dit_{size}_2")).parameters == depth * block + condition + ends


def test_dit_xl_has_the_cost_that_is_published():
    macs = [model_size(preset(f"dit_xl_{patch}")).macs / 1e9 for patch in (2, 4, 8)]
    assert [round(each, 1) for each in macs] == [118.6, 29.0, 7.4]


def test_every_size_and_patch_has_a_preset_of_the_papers_shape():
    sizes = re.compile(r"(lightnet_)?dit_(s|b|l|xl)_[248]")
    names = [name for name in PRESETS if sizes.fullmatch(name)]
    assert len(names) == 24
    for name in names:
        config, patch = PRESETS[name].config, int(name[-1])
        assert config.patch_size == (patch, patch)
        assert (config.image_size, config.channels, config.num_classes) == ((32, 32), 4, 1000)
        assert config.learn_sigma


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_denoises_any_size_with_gradients_for_all(mixer, condition):
    model = awake(tiny(mixer=MIXERS[mixer], condition=condition))
    for size in ((8, 8), (4, 10)):
        told = model(noisy(3, *size), T, LABELS)
        assert told.shape == (2, 6, *size)
    told.square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("condition", CONDITIONS)
def test_what_is_told_depends_on_timestep_class_and_the_whole_image(condition):
    model, x = awake(tiny(condition=condition)), noisy(3, 8, 8)
    told = model(x, T, LABELS)
    assert not torch.allclose(told, model(x, T + 1, LABELS))
    assert not torch.allclose(told, model(x, T, LABELS - 1))
    changed = x.clone()
    changed[:, :, -1, -1] += 1
    apart = (model(changed, T, LABELS) - told).abs().sum(dim=1)
    assert (apart > 1e-9).all()  # the last patch reaches every other one


@pytest.mark.parametrize("condition", CONDITIONS)
def test_each_patch_comes_out_where_it_went_in(condition):
    """Where tokens exchange nothing, a changed patch changes its own place alone."""
    model, x = awake(tiny(condition=condition, position=None)), noisy(3, 8, 8)
    for block in model.blocks:
        torch.nn.init.zeros_(block.mixer.out_proj.weight)
    changed = x.clone()
    changed[:, :, 2:4, 6:8] += 1
    apart = (model(changed, T, LABELS) - model(x, T, LABELS)).abs().sum(dim=(0, 1)) > 1e-9
    assert apart[2:4, 6:8].all()
    assert apart.sum() == 4


def test_a_fresh_model_tells_nothing_yet():
    for condition in CONDITIONS:
        model = tiny(condition=condition).build()
        assert not model(noisy(3, 8, 8).float(), T, LABELS).any()


def test_a_fresh_adaln_block_is_the_identity():
    model = tiny(condition="adaln_zero").build()
    x, grid = torch.randn(2, 16, 24), Grid((4, 4))
    y, _ = model.blocks[0](x, grid, condition=torch.randn(2, 24))
    assert torch.equal(x, y)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_recomputing_a_block_changes_no_gradient(condition):
    gradients = []
    for recompute in (False, True):
        model = awake(tiny(condition=condition))
        for block in model.blocks:
            block.recompute = recompute
        model(noisy(3, 8, 8), T, LABELS).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_images_of_a_batch_do_not_see_each_other():
    model, x = awake(tiny()), noisy(3, 8, 8)
    whole = model(x, T, LABELS)
    for i in range(2):
        alone = model(x[i : i + 1], T[i : i + 1], LABELS[i : i + 1])
        torch.testing.assert_close(alone, whole[i : i + 1], rtol=0, atol=1e-9)


def test_no_labels_are_the_label_of_no_class():
    model, x = awake(tiny()), noisy(3, 8, 8)
    assert torch.equal(model(x, T), model(x, T, torch.tensor([5, 5])))


def test_labels_are_dropped_in_training_alone_and_as_often_as_asked():
    table = LabelEmbedding(3, 8, dropout=0.25)
    labels = torch.zeros(20_000, dtype=torch.long)
    none = table.table.weight[3]
    dropped = (table(labels) == none).all(dim=1).double().mean().item()
    assert abs(dropped - 0.25) < 0.02
    table.eval()
    assert torch.equal(table(labels), table.table.weight[labels])


def test_a_model_without_classes_takes_no_labels():
    model, x = awake(tiny(num_classes=0)), noisy(3, 8, 8)
    assert model.prefix == 1
    assert model(x, T).shape == (2, 6, 8, 8)
    with pytest.raises(ValueError, match="labels were given, but num_classes is 0"):
        model(x, T, LABELS)


@pytest.mark.parametrize("num_classes", [0, 5])
def test_example_inputs_are_what_forward_takes(num_classes):
    config = tiny(num_classes=num_classes)
    assert config.build()(*config.example_inputs()).shape == (1, 6, 8, 8)
    assert model_size(config).parameters > 0


def test_timesteps_are_embedded_as_in_dit():
    embedding = TimestepEmbedding(8).double()
    steps = torch.tensor([0.0, 12.5, 999.0], dtype=torch.float64)
    rates = 10_000.0 ** -(torch.arange(128) / 128).double()
    waves = torch.cat([(steps[:, None] * rates).sin(), (steps[:, None] * rates).cos()], dim=1)
    hidden = torch.nn.functional.silu(embedding.in_proj(waves))
    assert waves.shape[1] == FREQUENCIES
    embedded = embedding(steps, torch.float64)
    torch.testing.assert_close(embedded, embedding.out_proj(hidden), atol=1e-5, rtol=0)


def test_unpatchify_puts_together_what_patchify_cut():
    cut, join = Patchify(3, (2, 4), 24), Unpatchify(24, 3, (2, 4))
    with torch.no_grad():
        for linear in (cut.proj, join.proj):
            linear.weight.copy_(torch.eye(24))
            linear.bias.zero_()
    x = torch.randn(2, 3, 6, 8)
    tokens, shape = cut(x)
    assert torch.equal(join(tokens, shape), x)


def test_sinusoidal_positions_tell_both_axes_and_pass_the_prefix():
    position = SinusoidalPosition(8, axes=2)
    x, _ = position(torch.zeros(1, 8, 8), Grid((2, 3), prefix=2))
    assert not x[0, :2].any()
    places = x[0, 2:].reshape(2, 3, 8)
    assert torch.equal(places[0, :, :4], places[0, :1, :4].expand(3, 4))  # one row
    assert torch.equal(places[:, 0, 4:], places[:1, 0, 4:].expand(2, 4))  # one column
    assert len(places.flatten(0, 1).unique(dim=0)) == 6


@pytest.mark.compile
@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_denoiser_compiles_whole(condition):
    model = awake(tiny(condition=condition)).float()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    arguments = (noisy(3, 8, 8).float(), T, LABELS)
    torch.testing.assert_close(compiled(*arguments), model(*arguments))


@pytest.mark.sampled
@pytest.mark.parametrize("condition", CONDITIONS)
def test_it_is_exported(condition):
    model = awake(tiny(condition=condition)).float()
    program = torch.export.export(model, (noisy(3, 8, 8).float(), T, LABELS), strict=False)
    other = (noisy(3, 8, 8).float() + 1, T + 5, LABELS - 1)
    torch.testing.assert_close(program.module()(*other), model(*other), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_classes": -1}, "num_classes is -1, expected 0 or more"),
        ({"label_dropout": 1.5}, "label_dropout is 1.5"),
        ({"width": 0}, "width is 0"),
        ({"channels": 0}, "channels is 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_config_that_no_model_has_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(**changes).build()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (noisy(3, 8, 8), T, torch.tensor([1, 6])),
            "labels contain 6, expected classes from 0 to 4",
        ),
        ((noisy(3, 8, 8), T, torch.tensor([-1, 0])), "labels contain -1"),
        ((noisy(3, 8, 8), torch.tensor([1, 1001]), LABELS), "timesteps range from 1 to 1001"),
        ((noisy(3, 8, 8), torch.tensor([float("nan"), 1]), LABELS), "timesteps range from nan"),
        ((noisy(3, 8, 8), T[:1], LABELS), r"timesteps has shape \(1,\), expected \(2,\)"),
        ((noisy(3, 8, 8), T, LABELS[:1]), r"labels has shape \(1,\), expected \(2,\)"),
        ((noisy(1, 8, 8), T, LABELS), "input has 1 channels"),
        ((noisy(3, 8, 0), T, LABELS), "input has size 8 x 0, expected at least 1"),
        ((torch.ones(2, 3, 8, 8, dtype=torch.long), T, LABELS), "noisy has dtype torch.int64"),
    ],
    ids=["label", "negative", "late", "nan", "steps", "labels", "channels", "side", "integers"],
)
def test_input_that_no_model_takes_is_refused(arguments, message):
    model = awake(tiny())
    with pytest.raises(ValueError, match=message):
        unwrap(Denoiser.forward)(model, *arguments)


def test_other_sizes_are_completed_with_zeros():
    model, images = awake(tiny()), noisy(3, 7, 9)
    whole = torch.zeros(2, 3, 8, 10, dtype=images.dtype)
    whole[:, :, :7, :9] = images
    assert torch.equal(model(images, T, LABELS), model(whole, T, LABELS)[:, :, :7, :9])


def test_width_that_sines_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="width is 6"):
        SinusoidalPosition(6, axes=2)


def test_noise_and_samplers_that_do_not_fit_are_refused():
    flow, noise = NoiseConfig(prediction="flow"), NoiseConfig()
    with pytest.raises(ValueError, match=r"betas is 'cosine', but noise.prediction is 'flow'"):
        NoiseConfig(prediction="flow", betas="cosine").check()
    with pytest.raises(ValueError, match=r"sampler is 'ddim', but .*'flow', expected euler"):
        SamplerConfig(sampler="ddim").check(flow)
    with pytest.raises(ValueError, match=r"sampler is 'euler', but .*'noise', expected ddpm"):
        SamplerConfig(sampler="euler").check(noise)
    for changes in (
        {"steps": 0},
        {"steps": 1001},
        {"guidance_scale": -1.0},
        {"guidance_scale": float("nan")},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(changes))} is "):
            SamplerConfig(**changes).check(noise)
    for changes in ({"steps": "50"}, {"steps": 50.0}, {"guidance_scale": None}):
        config = SamplerConfig()
        object.__setattr__(config, *next(iter(changes.items())))  # past the tests' check of types
        with pytest.raises(ValueError, match=f"{next(iter(changes))} is .*, expected (int|float)"):
            config.check(noise)
    with pytest.raises(ValueError, match=r"steps is 61, but ddim .* expected 50 or 100"):
        SamplerConfig(steps=61).check(noise)
    SamplerConfig(steps=61, sampler="dpm").check(noise)
    assert (SamplerConfig().resolved(flow), SamplerConfig().resolved(noise)) == ("euler", "ddim")


def test_a_denoiser_is_built_by_name_for_pixels_of_any_size():
    model = onescan.build(
        "lightnet_dit_s_8", image_size=64, patch_size=8, channels=3, num_classes=10, depth=1,
        position=ToeplitzPositionConfig(hidden_states=4), mlp=GLUConfig(),
    )  # fmt: skip
    assert model(torch.zeros(1, 3, 32, 96), torch.zeros(1)).shape == (1, 6, 32, 96)
