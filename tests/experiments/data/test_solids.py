"""Volumes with spheres and cubes: brightness, shapes, splits and checks."""

from dataclasses import replace

import pytest
import torch

from onescan.experiments.data import Example, SolidsConfig
from onescan.experiments.recipes import find_recipe

CONFIG = SolidsConfig(size=16, solids=1)
SEEDED = [Example(source, seed) for source, seed in enumerate(range(60))]


def test_solids_are_brighter_and_have_their_shapes():
    splits = CONFIG.build()
    volumes, masks = splits.train.read(SEEDED).batch
    assert (volumes.dtype, volumes.shape) == (torch.uint8, (60, 1, 16, 16, 16))
    assert set(masks.unique().tolist()) == {0, 1, 2}
    cubes = (masks.flatten(1).amax(dim=1) == 2).sum()
    assert 20 < cubes < 40
    for volume, mask in zip(volumes[:, 0].float(), masks, strict=True):
        (kind,) = set(mask.unique().tolist()) - {0}
        places = mask.nonzero()
        extent = places.amax(0) - places.amin(0) + 1
        assert (extent == extent[0]).all()
        is_full = len(places) == extent.prod()
        assert is_full == (kind == 2)
        assert volume[mask > 0].mean() - volume[mask == 0].mean() == pytest.approx(96, abs=20)
        assert volume[mask > 0].min() < volume[mask == 0].max()  # a voxel alone does not show it
    standardized = splits.format.model_input(volumes)
    background = standardized[:, 0][masks == 0]
    assert abs(background.mean()) < 0.05
    assert abs(background.std() - 1) < 0.05


def test_training_volumes_are_new_and_test_volumes_stay():
    splits = CONFIG.build()
    places = [Example(place) for place in range(3)]
    volumes = splits.test.read(places).batch[0]
    assert torch.equal(volumes, CONFIG.build().test.read(places).batch[0])
    assert not torch.equal(volumes[0], volumes[1])
    assert not torch.equal(volumes, replace(CONFIG, seed=1).build().test.read(places).batch[0])
    first, second = (splits.train.read([Example(0, seed)]).batch[0] for seed in (1, 2))
    assert not torch.equal(first, second)
    assert (len(splits.train), len(splits.test)) == (300, 60)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 6}, "data.size is 6, expected"),
        ({"solids": 0}, "data.solids is 0"),
        ({"brightness": 255}, "data.brightness is 255, expected 1 to 254"),
        ({"test_volumes": 0}, "data.test_volumes is 0"),
    ],
)
def test_fields_out_of_range_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **fields).build()


def test_the_recipe_builds():
    run = find_recipe("solids")()
    task = run.build_task()
    assert task.class_names == ("background", "sphere", "cube")
    assert run.model.build()(torch.zeros(1, 1, 20, 20, 20)).shape == (1, 3, 20, 20, 20)
