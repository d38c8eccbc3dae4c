"""Features of image classifiers: grids of some blocks, a head on top, and images of mixed sizes."""

import dataclasses

import pytest
import torch

from onescan.inputs import pad_images
from onescan.layers.decays import FixedDecayConfig
from onescan.layers.mixers import (
    DeltaRuleMixerConfig,
    HydraMixerConfig,
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    LionMixerConfig,
    Mamba2MixerConfig,
    MambaMixerConfig,
    SoftmaxMixerConfig,
    VisionRWKVMixerConfig,
)
from onescan.layers.position import (
    AbsolutePositionConfig,
    SinusoidalPositionConfig,
    ToeplitzPositionConfig,
)
from onescan.models.image_classifier import ImageClassifierConfig

TINY = ImageClassifierConfig(
    image_size=(8, 12),
    patch_size=(4, 4),
    num_classes=3,
    width=24,
    depth=3,
    mixer=LightNetMixerConfig(num_heads=2),
    position=ToeplitzPositionConfig(hidden_states=4),
    drop_path=0.0,
    init_std=0.3,
)
SIZES = {1: (12,), 2: (8, 12), 3: (4, 8, 12)}


def built(**changes):
    return dataclasses.replace(TINY, **changes).build().double().eval()


def on_axes(axes, **changes):
    return built(image_size=SIZES[axes], patch_size=(4,) * axes, **changes)


@pytest.mark.parametrize("pool", ["class_token", "mean"])
@pytest.mark.parametrize("axes", SIZES)
def test_intermediates_are_grids_without_prefix_tokens(axes, pool):
    model = on_axes(axes, pool=pool)
    x = torch.randn(2, 3, *SIZES[axes], dtype=torch.float64)
    last, grids = model.forward_intermediates(x)
    shape = tuple(side // 4 for side in SIZES[axes])
    assert [tuple(grid.shape) for grid in grids] == [(2, 24, *shape)] * 3
    torch.testing.assert_close(last, model.forward_features(x))
    (grid,) = model.forward_intermediates(x, indices=1, norm=True, intermediates_only=True)
    torch.testing.assert_close(grid.flatten(2).mT, last[:, model.prefix :])
    torch.testing.assert_close(model.forward_grid(x), grid)
    (tokens,) = model.forward_intermediates(
        x, [-1], norm=True, output_fmt="NLC", intermediates_only=True
    )
    torch.testing.assert_close(tokens, last[:, model.prefix :])


def test_intermediates_follow_the_blocks():
    model, x = built(), torch.randn(1, 3, 8, 12, dtype=torch.float64)
    early = model.forward_intermediates(x, [1], stop_early=True, intermediates_only=True)
    late = model.forward_intermediates(x, [1], intermediates_only=True)
    torch.testing.assert_close(early, late)
    pairs = model.forward_intermediates(x, return_prefix_tokens=True, intermediates_only=True)
    assert [tuple(prefix.shape) for _, prefix in pairs] == [(1, 1, 24)] * 3
    with pytest.raises(ValueError, match=r"indices is \[3\], expected indices from -3 to 2"):
        model.forward_intermediates(x, [3])
    with pytest.raises(ValueError, match="output_fmt is 'NHWC', expected 'NCHW' or 'NLC'"):
        model.forward_intermediates(x, output_fmt="NHWC")


MIXERS = {
    "lightnet": LightNetMixerConfig(num_heads=2),
    "lightnet offset": LightNetMixerConfig(num_heads=2, decay_logits="offset"),
    "lightnet causal": LightNetMixerConfig(num_heads=2, direction="forward"),
    "lion": LionMixerConfig(num_heads=2),
    "lion fixed": LionMixerConfig(num_heads=2, decay=FixedDecayConfig()),
    "lion natural": LionMixerConfig(num_heads=2, scan="natural"),
    "lion backward": LionMixerConfig(num_heads=2, direction="backward"),
    "delta": DeltaRuleMixerConfig(num_heads=2),
    "ldn separable": LinearDiffusionMixerConfig(num_heads=2, separable=True),
    "softmax": SoftmaxMixerConfig(num_heads=2),
    "hydra": HydraMixerConfig(num_heads=2),
    "mamba": MambaMixerConfig(num_heads=2),
    "mamba2": Mamba2MixerConfig(num_heads=2, key_width=4),
    "vision rwkv": VisionRWKVMixerConfig(num_heads=2),
}
POSITIONS = {
    "one direction": ToeplitzPositionConfig(hidden_states=4),
    "both directions": ToeplitzPositionConfig(hidden_states=4, bidirectional=True),
    "joint": ToeplitzPositionConfig(hidden_states=4, joint=True),
    "sinusoidal": SinusoidalPositionConfig(),
    "none": None,
}
MIXED = [(8, 12), (4, 4), (12, 8), (8, 8)]


def check_alone(model, sizes=((8, 12), (3, 4), (11, 7), (6, 1))):
    """Compare a padded batch with NaN in its padding to each image alone."""
    images = [torch.randn(3, *size, dtype=torch.float64) for size in sizes]
    batch, keep = pad_images(images)
    batch = batch.masked_fill(~keep.unsqueeze(1), torch.nan)
    alone = torch.cat([model(image.unsqueeze(0)) for image in images])
    together = model(batch, keep=keep)
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
    names, parameters = zip(*model.named_parameters(), strict=True)
    weights = torch.randn_like(alone)
    expected, found = (
        torch.autograd.grad((y * weights).sum(), parameters, allow_unused=True)
        for y in (alone, together)
    )
    for name, a, b in zip(names, expected, found, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            torch.testing.assert_close(b, a, rtol=1e-7, atol=1e-8, msg=name)


def test_grids_of_mixed_sizes_equal_each_image_alone():
    model = built()
    images = [torch.randn(3, *size, dtype=torch.float64) for size in MIXED]
    batch, keep = pad_images(images)
    together = model.forward_grid(batch, keep=keep)
    for image, found in zip(images, together, strict=True):
        alone = model.forward_grid(image.unsqueeze(0))[0]
        rows, columns = alone.shape[1:]
        torch.testing.assert_close(found[:, :rows, :columns], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MIXERS)
def test_mixed_sizes_equal_each_image_alone(name):
    mixer = MIXERS[name]
    pool = "class_token" if mixer.prefix_reads_grid else "mean"
    model = built(mixer=mixer, pool=pool)
    check_alone(model)


@pytest.mark.parametrize("name", POSITIONS)
def test_mixed_sizes_with_every_position_encoding(name):
    check_alone(built(position=POSITIONS[name]))


@pytest.mark.parametrize("pool", ["mean", "max", "attention", "mean_with_class_token"])
def test_mixed_sizes_with_every_pool(pool):
    check_alone(built(pool=pool))


@pytest.mark.parametrize("mixer", ["lightnet", "lion natural", "ldn separable"])
def test_mixed_sizes_on_three_axes(mixer):
    check_alone(on_axes(3, mixer=MIXERS[mixer]), [(4, 8, 12), (8, 4, 4), (12, 8, 8)])


def test_signals_of_mixed_lengths_diffuse_alone():
    mixer = LinearDiffusionMixerConfig(num_heads=2)
    check_alone(on_axes(1, mixer=mixer), [(12,), (4,), (20,)])


def test_mixed_sizes_with_a_distillation_token():
    check_alone(built(distillation_token=True))


def test_impossible_masks_are_refused():
    model, x = built(), torch.randn(2, 3, 8, 12, dtype=torch.float64)
    keep = torch.ones(2, 8, 12, dtype=torch.bool)
    torch.testing.assert_close(model(x, keep=keep), model(x))
    with pytest.raises(ValueError, match="keep has shape"):
        model(x, keep=keep[:, :2])
    for hole in ((0, 0, 0), (0, slice(0, 4)), (1, slice(4), slice(4, 8)), (1,), (1, 7, 11)):
        holes = keep.clone()
        holes[hole] = False
        with pytest.raises(ValueError, match=r"keep of image [01] is not a box that begins at"):
            model(x, keep=holes)
    flat = built(mixer=LinearDiffusionMixerConfig(num_heads=2))
    with pytest.raises(ValueError, match="keep was given with separable=False"):
        flat(x, keep=keep)
    middle = built(mixer=MambaMixerConfig(num_heads=2, prefix_position="middle"))
    with pytest.raises(ValueError, match="keep was given with prefix_position='middle'"):
        middle(x, keep=keep)
    absolute = built(position=AbsolutePositionConfig())
    with pytest.raises(ValueError, match="keep was given with absolute positions"):
        absolute(x, keep=keep)


def test_images_are_padded_at_their_ends():
    images = [torch.ones(1, 3, 5), torch.ones(1, 4, 2)]
    batch, keep = pad_images(images, multiple=(2, 3))
    assert batch.shape == (2, 1, 4, 6)
    assert keep.shape == (2, 4, 6)
    assert torch.equal(batch[:, 0].bool(), keep)
    assert keep.sum(dim=(1, 2)).tolist() == [15, 8]
    for wrong, message in (
        ([], "images is empty, expected at least one"),
        ([torch.ones(1, 2), torch.ones(1, 2, 2)], r"images\[1\] has 2 axes"),
        ([torch.ones(1, 2), torch.ones(3, 2)], r"images\[1\] has 1 axes and 3 channels"),
    ):
        with pytest.raises(ValueError, match=message):
            pad_images(wrong)
    with pytest.raises(ValueError, match="multiple has 1 number, expected 2"):
        pad_images(images, multiple=(2,))


def shapes(count, generator):
    """Draw a filled square or disc per image; the labels of 4 x 4 patches are 0, 1 or 2."""
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    center = torch.randint(8, 24, (count, 2, 1, 1), generator=generator)
    far = torch.stack([(y - center[:, 0]).abs(), (x - center[:, 1]).abs()])
    is_disc = torch.arange(count).reshape(-1, 1, 1) % 2 == 1
    inside = torch.where(is_disc, far.square().sum(0).sqrt() < 7, far.amax(0) < 7)
    images = inside.float() + 0.1 * torch.randn(inside.shape, generator=generator)
    at_patches = inside[:, 2::4, 2::4]
    return images.unsqueeze(1), at_patches * (1 + is_disc.long())


@pytest.mark.slow
def test_a_linear_segmentation_head_learns_from_grids():
    generator = torch.Generator().manual_seed(0)
    config = dataclasses.replace(
        TINY, image_size=(32, 32), channels=1, width=48, depth=2, init_std=0.05
    )
    backbone = config.build()
    head = torch.nn.Conv2d(48, 3, kernel_size=1)
    optimizer = torch.optim.AdamW([*backbone.parameters(), *head.parameters()], lr=3e-3)
    for _ in range(80):
        images, labels = shapes(32, generator)
        loss = torch.nn.functional.cross_entropy(head(backbone.forward_grid(images)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    images, labels = shapes(200, generator)
    with torch.no_grad():
        found = head(backbone.eval().forward_grid(images)).argmax(dim=1)
    inside = labels > 0
    assert (found == labels).float().mean() > (labels == 0).float().mean() + 0.05
    assert (found == labels)[inside].float().mean() > 0.75  # a guess of the shape scores 0.5
