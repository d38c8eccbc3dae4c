"""NIfTI volumes with masks: geometry, sizes, classes, statistics, windows, runs, predictions."""

import gzip
import re
import sys
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from nibabel.orientations import apply_orientation, axcodes2ornt, inv_ornt_aff, ornt_transform
from pages import python_block
from tiny_run import assert_same, interrupt, tiny_run
from torch.nn.functional import interpolate

from onescan import configs
from onescan.cli import main
from onescan.experiments.data import Example, NiftiFolderConfig
from onescan.experiments.recipes import find_recipe
from onescan.experiments.recipes.infer import adapt, infer
from onescan.experiments.tasks import BatchPlan, SegmentationConfig
from onescan.experiments.training import train
from onescan.experiments.training.data import Loader
from onescan.inference.loading import load
from onescan.inputs import VolumeFormat, read_volume
from onescan.inputs.volumes import check_same_geometry, open_volume, resample, volume_bytes
from onescan.layers.mixers import LightNetMixerConfig
from onescan.models.dense_predictor import DensePredictorConfig

RNG = np.random.default_rng(0)
AFFINE = np.array([[0.9, 0.1, 0, -40], [-0.1, 0.8, 0, 12], [0, 0, 2.5, 7], [0, 0, 0, 1.0]])
SIZES = ((9, 8, 7), (6, 8, 10), (7, 7, 7), (8, 6, 9))
NAMES = ("a", "b", "c", "d")


def write(file, values, affine=AFFINE, axes="RAS", kind=nibabel.Nifti1Image, units="mm"):
    """Write values with canonical axes to a file whose axes have other directions."""
    turn = ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(axes))
    stored = apply_orientation(values, turn)
    image = kind(stored, affine @ inv_ornt_aff(turn, values.shape[:3]))
    image.header.set_xyzt_units(units)
    file.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(image, file)


def add(folder, name, size=SIZES[0], suffix=".nii.gz", **options):
    """Write a volume and its mask, which is 1 where the volume is bright, and 2 where it is more.

    Returns:
        The volume and the mask, with canonical axes.
    """
    x = RNG.normal(size=size).astype(np.float32)
    x.flat[0] = 2
    mask = (x > 0).astype(np.uint8) + (x > 1).astype(np.uint8)
    write(folder / "images" / f"{name}{suffix}", x, **options)
    write(folder / "masks" / f"{name}.nii.gz", mask, **options)
    return x, mask


@pytest.fixture
def folder(tmp_path):
    data = {name: add(tmp_path, name, size) for name, size in zip(NAMES, SIZES, strict=True)}
    (tmp_path / "masks" / "notes.txt").write_text("")
    (tmp_path / "images" / "._a.nii.gz").write_text("")
    return tmp_path, data


def config_of(folder, **options):
    return NiftiFolderConfig(path=str(folder), **{"test_fraction": 0.25, **options})


def batch_of(data):
    return data.read([Example(place) for place in range(len(data))]).batch


def onescan(*argv):
    return main([str(each) for each in argv])


def splits_of(path):
    splits = config_of(path).build()
    return splits.train, splits.test


def stem(pair):
    return pair.image.name.split(".")[0]


# Files


@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
def test_all_orientations_give_the_same_values(tmp_path, kind):
    x = RNG.normal(size=(5, 6, 7)).astype(np.float32)
    box = (slice(1, 3), slice(2, 6), slice(0, 5))
    affine = np.diag([0.9, 1.1, 2.5, 1.0])
    codes = [
        "".join(pair[i] for pair, i in zip(axes, ends, strict=True))
        for axes in permutations(("RL", "AP", "SI"))
        for ends in product((0, 1), repeat=3)
    ]
    assert len(codes) == 48
    for code in codes:
        write(tmp_path / "a.nii", x, affine, code, kind)
        volume = open_volume(tmp_path / "a.nii")
        stored = nibabel.load(tmp_path / "a.nii")
        assert "".join(nibabel.aff2axcodes(stored.affine)) == code
        assert np.array_equal(volume.read()[0], x)
        assert np.array_equal(volume.read(box=box)[0], x[box])
        assert (volume.sides, volume.spacing) == ((5, 6, 7), pytest.approx((0.9, 1.1, 2.5)))
        canonical = nibabel.as_closest_canonical(stored)
        np.testing.assert_allclose(volume.affine, canonical.affine, atol=1e-6)
        assert volume.voxel_ml == pytest.approx(0.9 * 1.1 * 2.5 / 1000)


def test_oblique_volumes_get_the_closest_axes(tmp_path):
    x, _ = add(tmp_path, "a", axes="PSR")
    volume = open_volume(tmp_path / "images" / "a.nii.gz")
    assert np.array_equal(volume.read()[0], x)
    np.testing.assert_allclose(volume.affine, AFFINE, atol=1e-5)


@pytest.mark.parametrize("sides", [(5, 12, 7), (9, 8, 7), (3, 2, 20), (1, 1, 1), (18, 4, 14)])
def test_resampling_is_that_of_torch(tmp_path, sides):
    x, mask = add(tmp_path, "a", axes="LPI")
    volume, masks = (open_volume(tmp_path / n / "a.nii.gz") for n in ("images", "masks"))
    linear = interpolate(torch.from_numpy(x)[None, None], sides, mode="trilinear")[0]
    torch.testing.assert_close(volume.read(sides), linear, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(resample(volume.read(), sides), linear, atol=1e-5, rtol=1e-5)
    nearest = interpolate(torch.from_numpy(mask)[None, None].double(), sides, mode="nearest-exact")
    assert torch.equal(masks.read(sides, nearest=True), nearest[0])
    box = tuple(slice(side // 3, side // 3 + (side + 1) // 2) for side in sides)
    inside = (slice(None), *box)
    torch.testing.assert_close(volume.read(sides, box), volume.read(sides)[inside])
    assert torch.equal(masks.read(sides, box, nearest=True), nearest[0][inside])


@pytest.mark.parametrize(("units", "factor"), [("mm", 1.0), ("meter", 1000.0), ("micron", 0.001)])
def test_units_are_converted_to_mm(tmp_path, units, factor):
    add(tmp_path, "a", affine=np.diag([1.0, 2, 3, 1]), units=units)
    volume = open_volume(tmp_path / "images" / "a.nii.gz")
    assert volume.spacing == pytest.approx((factor, 2 * factor, 3 * factor))
    assert volume.resampled_sides((factor, factor, 1.5 * factor)) == (9, 16, 14)
    assert volume.voxel_ml == pytest.approx(6 * factor**3 / 1000)
    saved = nibabel.Nifti1Image.from_bytes(
        gzip.decompress(volume_bytes(volume, torch.zeros(9, 8, 7).long()))
    )
    assert saved.header.get_xyzt_units() == (units, "unknown")


def test_scaled_integers_are_read_as_intensities(tmp_path):
    stored = nibabel.Nifti1Image(np.arange(24, dtype=np.int16).reshape(2, 3, 4), np.eye(4))
    stored.header.set_slope_inter(2, -1000)
    nibabel.save(stored, tmp_path / "a.nii")
    expected = np.asarray(nibabel.load(tmp_path / "a.nii").dataobj)
    assert np.array_equal(open_volume(tmp_path / "a.nii").read()[0], expected)


@pytest.mark.parametrize("axes", ["RAS", "LPS", "SRA"])
@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
def test_maps_are_written_in_the_geometry_of_the_file(tmp_path, axes, kind):
    _, mask = add(tmp_path, "a", axes=axes, kind=kind)
    classes = torch.from_numpy(mask.astype(np.int64))
    volume = open_volume(tmp_path / "images" / "a.nii.gz")
    (tmp_path / "b.nii.gz").write_bytes(volume_bytes(volume, classes))
    written = nibabel.load(tmp_path / "b.nii.gz")
    original = nibabel.load(tmp_path / "masks" / "a.nii.gz")
    assert type(written) is kind
    assert written.get_data_dtype() == np.uint8
    assert np.array_equal(written.dataobj, original.dataobj)
    assert np.array_equal(written.affine, original.affine)
    content = gzip.decompress(volume_bytes(volume, classes + 255))
    assert kind.from_bytes(content).get_data_dtype() == np.uint16


# Data


def test_masks_belong_to_their_volumes(folder):
    path, data = folder
    splits = config_of(path).build()
    assert splits.class_names == ("0", "1", "2")
    assert splits.target.kind == "class_map"
    assert (len(splits.train), len(splits.test)) == (3, 1)
    sizes = np.array(SIZES)
    assert splits.format.shape == tuple(sizes.max(0))
    assert (splits.format.is_ragged, splits.format.channels, splits.format.axes) == (True, 1, 3)
    for part in (splits.train, splits.test):
        volumes, classes, keep = batch_of(part)
        shapes = np.array([data[stem(pair)][0].shape for pair in part.pairs])
        assert (volumes.shape, volumes.dtype) == ((len(part), 1, *shapes.max(0)), torch.float32)
        assert np.array_equal(part.sizes, shapes)
        for pair, x, y, real in zip(part.pairs, volumes, classes, keep, strict=True):
            inside = tuple(map(slice, data[stem(pair)][0].shape))
            assert np.array_equal(x[0][inside], data[stem(pair)][0])
            assert np.array_equal(y[inside], data[stem(pair)][1])
            assert real[inside].all()
            assert (int(real.sum()), x[0][~real].abs().sum()) == (real[inside].numel(), 0)
            assert (y[~real] == -100).all()
    assert "the spacing of voxels is 0.906 x 0.806 x 2.5 mm" in splits.notes


def test_volumes_and_masks_are_resampled_together(folder):
    path, data = folder
    splits = config_of(path, spacing=(0.5, 1.0, 2.5)).build()
    part = splits.train
    for place, pair in enumerate(part.pairs):
        x, mask = (torch.from_numpy(each)[None, None] for each in data[stem(pair)])
        (volume,), (classes,), _ = part.read([Example(place)]).batch
        sides = [round(n * s) for n, s in zip(x.shape[2:], (0.9055 / 0.5, 0.8062, 1), strict=True)]
        assert list(volume.shape[1:]) == sides == part.sizes[place].tolist()
        expected = interpolate(x, sides, mode="trilinear")[0]
        torch.testing.assert_close(volume, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(classes, interpolate(mask, sides, mode="nearest-exact")[0, 0].long())


@pytest.mark.parametrize("clip", [None, (-0.5, 1.25)])
@pytest.mark.parametrize("spacing", [None, (1.0, 1.0, 2.0)])
def test_statistics_are_those_of_real_voxels(folder, clip, spacing):
    path, _ = folder
    splits = config_of(path, clip=clip, spacing=spacing).build()
    volumes, _, keep = batch_of(splits.train)
    values = volumes[:, 0][keep].double()
    values = values if clip is None else values.clamp(*clip)
    assert splits.format.mean == pytest.approx((values.mean().item(),))
    assert splits.format.std == pytest.approx((values.std(correction=0).item(),))
    given = config_of(path, clip=clip, spacing=spacing, mean=(1.0,), std=(2.0,)).build()
    assert (given.format.mean, given.format.std) == ((1.0,), (2.0,))
    inputs = given.format.model_input(volumes)[:, 0][keep]
    torch.testing.assert_close(inputs, ((values - 1) / 2).float())


def test_channels_are_the_last_axis(tmp_path):
    data = [RNG.normal(size=(5, 6, 7, 2)) * [1, 100] + [0, 1000] for _ in range(4)]
    for name, x in zip(NAMES, data, strict=True):
        write(tmp_path / "images" / f"{name}.nii", x.astype(np.float32), axes="LAS")
        write(
            tmp_path / "masks" / f"{name}.nii.gz", (x[..., :1] > 0).astype(np.float32), axes="PIR"
        )
    splits = config_of(tmp_path).build()
    volumes, classes, _ = batch_of(splits.train)
    assert volumes.shape == (3, 2, 5, 6, 7)
    assert torch.equal(classes, (volumes[:, 0] > 0).long())
    assert splits.format.mean == pytest.approx(volumes.double().mean((0, 2, 3, 4)).tolist())
    for name in NAMES[1:]:
        write(tmp_path / "images" / f"{name}.nii", np.zeros((5, 6, 7)), axes="LAS")
    with pytest.raises(ValueError, match=r"\.nii has \d channels?, expected \d"):
        config_of(tmp_path).build()


def test_splits_in_folders_are_used(tmp_path):
    add(tmp_path / "train", "a")
    for name in ("a", "b"):
        add(tmp_path / "val", name)
    (tmp_path / "val" / "masks").rename(tmp_path / "val" / "labels")
    splits = config_of(tmp_path).build()
    assert (len(splits.train), len(splits.test)) == (1, 2)
    assert splits.train.pairs[0].image == tmp_path / "train" / "images" / "a.nii.gz"
    assert splits.test.pairs[0].mask == tmp_path / "val" / "labels" / "a.nii.gz"


def test_ignored_voxels_and_named_classes(tmp_path):
    for name in NAMES:
        _, mask = add(tmp_path, name)
        mask = mask.astype(np.int16)
        mask[0], mask[1] = -1, 40
        write(tmp_path / "masks" / f"{name}.nii.gz", mask)
    with pytest.raises(ValueError, match=r"\.nii\.gz has a voxel with value -1, expected classes"):
        config_of(tmp_path).build()
    with pytest.raises(ValueError, match=r"are 0, 1, 2, 40, expected 0 to 3, or 41 names"):
        config_of(tmp_path, ignore_index=-1).build()
    splits = config_of(tmp_path, ignore_index=-1, class_names=tuple(map(str, range(41)))).build()
    classes = batch_of(splits.train)[1]
    assert (classes[:, 0] == -100).all()
    assert (classes[:, 1] == 40).all()
    with pytest.raises(ValueError, match=r"\.nii\.gz has class 40, expected 0 to 2"):
        batch_of(config_of(tmp_path, ignore_index=-1, class_names=("a", "b", "c")).build().train)


def test_classes_of_test_masks_are_checked_before_training(tmp_path):
    for split in ("train", "val"):
        _, mask = add(tmp_path / split, "a")
    write(tmp_path / "val" / "masks" / "a.nii.gz", mask.astype(np.int16) + 1)
    with pytest.raises(ValueError, match=r"a test mask in .* has class 3, expected 0 to 2"):
        config_of(tmp_path).build()


def test_windows_are_those_of_whole_volumes(folder):
    path, _ = folder
    data = config_of(path, spacing=(0.7, 0.7, 2.0)).build().train
    windowed = data.windowed((4, 5, 40))
    corners = set()
    for seed in range(40):
        example = Example(seed % 3, seed)
        (x,), (y,), _ = windowed.read([example]).batch
        (whole,), (classes,), _ = data.read([example]).batch
        assert x.shape == (1, 4, 5, whole.shape[3])
        places = [
            (i, j)
            for i in range(whole.shape[1] - 3)
            for j in range(whole.shape[2] - 4)
            if torch.allclose(whole[:, i : i + 4, j : j + 5], x, atol=1e-6)
        ]
        ((i, j),) = places
        assert torch.equal(classes[i : i + 4, j : j + 5], y)
        corners.add((i, j))
        assert torch.equal(
            windowed.read([example, Example(0, 9)]).batch[0][0, ..., : x.shape[3]], x
        )
    assert len(corners) > 15
    assert windowed.read([Example(0)]).batch[0].shape[2:] == tuple(data.sizes[0])


def test_tasks_read_windows_and_mirror_them(folder):
    path, _ = folder
    task = SegmentationConfig(window=(4, 4, 4), flip_axes=(2,)).build(config_of(path).build())
    batch = task.train.read([Example(0, 1), Example(1, 2)]).batch
    assert batch[0].shape == (2, 1, 4, 4, 4)
    grids, maps, keep = task.augment(batch, 3)
    assert torch.equal(maps == 0, (grids[:, 0] <= 0) & keep)
    seeds = [task.augment(batch, seed)[0] for seed in range(8)]
    assert any(torch.equal(each[0], batch[0][0].flip(3)) for each in seeds)
    assert any(torch.equal(each[0], batch[0][0]) for each in seeds)


def test_workers_read_volumes(folder):
    path, _ = folder
    data = config_of(path).build().train.windowed((4, 4, 4))
    plan = [BatchPlan([Example(2, 5), Example(0, 6)], None)]
    expected = data.read(plan[0].examples).batch
    loader = Loader(data, iter(plan), workers=1, pin=False)
    try:
        assert all(map(torch.equal, next(iter(loader)), expected))
    finally:
        loader.close()


# Mistakes


def shifted(by):
    affine = AFFINE.copy()
    affine[:3, 3] += by
    return affine


def truncate(file, keep=0.5):
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])


def image(path, values=None, **options):
    write(path / "images" / "b.nii.gz", np.zeros(SIZES[1]) if values is None else values, **options)


def mask(path, values, **options):
    write(path / "masks" / "b.nii.gz", values, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: (p / "masks" / "b.nii.gz").unlink(),
            r"b\.nii\.gz has no mask .*masks.b\.nii\.gz",
        ),
        (
            lambda p: mask(p, np.zeros((6, 8, 9))),
            r"masks.b\.nii\.gz has 6 x 8 x 9 .*images.b.* 10$",
        ),
        (
            lambda p: mask(p, np.zeros(SIZES[1]), affine=shifted(0.5)),
            r"masks.b.*gz and .*images.b.*gz have different affines: .* 1\.07 voxels apart",
        ),
        (lambda p: mask(p, np.full(SIZES[1], 0.5)), r"b\.nii\.gz has a voxel with value 0\.5"),
        (lambda p: mask(p, np.full(SIZES[1], np.nan)), r"b\.nii\.gz has a voxel with value nan"),
        (lambda p: mask(p, np.zeros((*SIZES[1], 2))), r"masks.b\.nii\.gz has 2 channels"),
        (
            lambda p: image(p, np.full(SIZES[1], np.inf)),
            r"images.b\.nii\.gz has values that are not",
        ),
        (
            lambda p: image(p, np.zeros((*SIZES[1], 2, 2))),
            r"b\.nii\.gz has shape .* three axes, or",
        ),
        (
            lambda p: image(p, np.zeros(SIZES[1], np.complex64)),
            r"images.b\.nii\.gz holds complex64",
        ),
        (
            lambda p: (p / "images" / "b.nii.gz").write_text("no"),
            r"images.b\.nii\.gz cannot be read",
        ),
        (lambda p: truncate(p / "images" / "b.nii.gz"), r"images.b\.nii\.gz cannot be read: "),
        (lambda p: truncate(p / "masks" / "b.nii.gz"), r"masks.b\.nii\.gz cannot be read: "),
        (lambda p: (p / "masks" / "b.nii").touch(), "differ only in the suffix"),
        (lambda p: (p / "masks").rename(p / "others"), "there is no folder .*masks"),
    ],
)
def test_what_is_wrong_is_named(folder, change, message):
    path, _ = folder
    change(path)
    with pytest.raises(ValueError, match=message):
        list(map(batch_of, splits_of(path)))


def test_truncated_and_huge_files_are_refused_before_they_are_read(tmp_path):
    add(tmp_path, "a", suffix=".nii")
    truncate(tmp_path / "images" / "a.nii", keep=0.9)
    with pytest.raises(ValueError, match=r"a\.nii is truncated: its header states 2,368 bytes"):
        open_volume(tmp_path / "images" / "a.nii")
    header = nibabel.Nifti1Header()
    header.set_data_shape((30_000,) * 3)
    header["magic"], header["vox_offset"] = b"n+1", 352
    (tmp_path / "b.nii.gz").write_bytes(gzip.compress(header.binaryblock + bytes(4)))
    with pytest.raises(
        ValueError, match=r"b\.nii\.gz is truncated: its header states 108,000,000,000,352 b"
    ):
        open_volume(tmp_path / "b.nii.gz")


def test_affines_without_a_grid_are_refused(tmp_path):
    stored = nibabel.Nifti1Image(np.zeros((3, 3, 3), np.float32), None)
    stored.header.set_sform(np.diag([1.0, 0, 1, 1]), 1)
    (tmp_path / "a.nii").write_bytes(stored.header.binaryblock + bytes(4 + 4 * 27))
    with pytest.raises(ValueError, match=r"a\.nii has an invalid affine"):
        open_volume(tmp_path / "a.nii")


def test_small_differences_of_affines_are_accepted(tmp_path):
    x = np.zeros((9, 8, 7), np.float32)
    write(tmp_path / "a.nii", x)
    write(tmp_path / "b.nii", x, affine=shifted(0.04), axes="LPS")
    check_same_geometry(open_volume(tmp_path / "a.nii"), open_volume(tmp_path / "b.nii"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"spacing": (1.0, 0.0, 1.0)},
            r"data.spacing is \(1\.0, 0\.0, 1\.0\), expected numbers ab",
        ),
        ({"clip": (2.0, 1.0)}, r"data.clip is \(2\.0, 1\.0\), expected two finite numbers"),
        ({"mean": (1.0, 2.0)}, r"data.mean is \(1\.0, 2\.0\), expected 1 number"),
        ({"std": (0.0,)}, r"data.std is \(0\.0,\), expected finite numbers above 0"),
        ({"class_names": ("a", "a", "b")}, "class_names"),
        ({"test_fraction": 1.5}, "data.test_fraction is 1.5"),
    ],
)
def test_settings_out_of_range_are_refused(folder, options, message):
    with pytest.raises(ValueError, match=message):
        config_of(folder[0], **options).build()


def test_masks_of_one_class_are_refused(tmp_path):
    for name in NAMES:
        add(tmp_path, name)
        write(tmp_path / "masks" / f"{name}.nii.gz", np.zeros(SIZES[0], np.uint8))
    with pytest.raises(ValueError, match=r"all positions of the masks in .* have class 0"):
        config_of(tmp_path).build()
    write(tmp_path / "masks" / "b.nii.gz", np.full(SIZES[0], 255, np.uint8))
    with pytest.raises(ValueError, match=r"if 255 marks positions .*, pass --data\.ignore"):
        config_of(tmp_path, test_fraction=0.01).build()


def test_missing_nibabel_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(ImportError, match=r"NIfTI files needs nibabel: pip .*onescan\[medical\]"):
        config_of(folder[0]).build()


def test_other_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*a\.nii"):
        open_volume(tmp_path / "a.nii")
    (tmp_path / "a.png").touch()
    with pytest.raises(ValueError, match=r"a\.png is not a NIfTI file, expected a name ending in"):
        open_volume(tmp_path / "a.png")


# Runs


def adapted(path, **given):
    options = {"data.path": str(path), **given}
    return infer(configs.replace(adapt(find_recipe("segmenter")(), options), given), options)


def test_the_recipe_reads_volumes(folder):
    run, lines = adapted(folder[0])
    assert isinstance(run.data, NiftiFolderConfig)
    assert isinstance(run.task, SegmentationConfig)
    counts = "data: 3 training and 1 test volumes with one of 3 classes at each position (0, 1, 2)"
    assert lines[0] == f"{counts}, 6 to 9 x 6 to 8 x 7 to 10 voxels, 1 channel"
    assert (run.task.window, run.task.evaluation_batch_size) == ((), 1)
    assert run.model.image_size == (9, 8, 10)
    assert run.data.class_names == ("0", "1", "2")
    assert run.data.mean == run.data.build().format.mean
    run.build_task()


def test_large_volumes_are_read_in_windows(tmp_path):
    for name in NAMES:
        add(tmp_path / "train", name, (70, 66, 60))
    (tmp_path / "train").rename(tmp_path / "training")
    run, lines = adapted(tmp_path)
    assert run.task.window == run.model.image_size == (48, 48, 48)
    assert run.model.patch_size == (8, 8, 8)
    assert lines[-1] == "windows: 48 x 48 x 48 voxels; volumes are up to 70 x 66 x 60"
    run, lines = adapted(tmp_path, **{"task.window": (80, 32, 16)})
    assert run.task.window == (80, 32, 16)
    assert run.model.image_size == (70, 32, 16)


def tiny(path, **data):
    model = DensePredictorConfig(
        image_size=(6, 6, 6),
        channels=1,
        out_channels=3,
        patch_size=(2, 3, 2),
        width=12,
        depth=1,
        mixer=LightNetMixerConfig(num_heads=2),
        drop_path=0.0,
    )
    return replace(
        tiny_run(batch_size=2, epochs=6),
        data=config_of(path, **data),
        task=SegmentationConfig(window=(6, 6, 6), flip_axes=(0,), evaluation_batch_size=1),
        model=model,
    )


@pytest.mark.slow
def test_a_resumed_run_equals_a_whole_one(folder, tmp_path):
    run = tiny(folder[0], spacing=(0.8, 0.8, 2.0), clip=(-1.0, 2.0))
    whole = train(run, tmp_path / "whole")
    interrupt(run, tmp_path / "parts", step=3)
    assert_same(train(run, tmp_path / "parts"), whole)
    format = load(tmp_path / "whole").format
    assert format == run.build_task().format
    assert isinstance(format, VolumeFormat)
    assert (format.spacing, format.clip) == ((0.8, 0.8, 2.0), (-1.0, 2.0))


def test_predictions_have_the_geometry_of_the_input(folder, tmp_path, capsys):
    path, data = folder
    run = tiny(path, spacing=(0.8, 0.8, 2.0), clip=(-1.0, 2.0))
    train(run, tmp_path / "run")
    checkpoint = load(tmp_path / "run")
    maps = {}
    for axes in ("RAS", "LPS", "SAR"):
        file = tmp_path / axes / "scan.1.nii.gz"
        write(file, data["a"][0], axes=axes)
        capsys.readouterr()
        out = tmp_path / f"maps-{axes}"
        assert onescan("predict", tmp_path / "run", file, "--out", out) == 0
        shown = capsys.readouterr().out
        written, original = nibabel.load(out / file.name), nibabel.load(file)
        assert written.shape == original.shape
        assert written.get_data_dtype() == np.uint8
        assert np.array_equal(written.affine, original.affine)
        assert [each.name for each in out.iterdir()] == ["scan.1.nii.gz"]
        canonical = nibabel.as_closest_canonical(written)
        maps[axes] = np.asarray(canonical.dataobj)
        counts = np.bincount(maps[axes].flat)
        ml = abs(np.linalg.det(original.affine[:3, :3])) / 1000
        for name, count in enumerate(counts):
            if count:
                assert f"{name} {count / 504:.1%} ({count * ml:.4g} ml)" in shown
    assert all(np.array_equal(each, maps["RAS"]) for each in maps.values())
    values = read_volume(file, checkpoint.format)
    assert values.shape[1:] == open_volume(file).resampled_sides((0.8, 0.8, 2.0))
    low, high = (checkpoint.format.standardize(torch.tensor([[[[x]]]])).item() for x in (-1.0, 2.0))
    assert (values.min(), values.max()) == (pytest.approx(low), pytest.approx(high))


def test_predict_takes_folders_and_refuses_other_files(folder, tmp_path, capsys):
    path, _ = folder
    train(tiny(path), tmp_path / "run")
    (path / "images" / "e.nii.gz").write_text("no volume")
    maps = tmp_path / "maps"
    assert onescan("predict", tmp_path / "run", path / "images", "--out", maps) == 0
    shown = capsys.readouterr().out
    assert re.search(r"skipped: .*e\.nii\.gz cannot be read", shown)
    assert f"{maps}: 4 class maps" in shown
    assert sorted(file.name for file in maps.iterdir()) == [f"{name}.nii.gz" for name in NAMES]
    (tmp_path / "x.npz").touch()
    write(tmp_path / "two.nii.gz", np.zeros((4, 4, 4, 2)))
    for given, message in (
        ((tmp_path / "x.npz",), "is not a NIfTI file"),
        ((path / "images" / "e.nii.gz",), "cannot be read"),
        ((tmp_path / "two.nii.gz",), "two.nii.gz has 2 channels, expected 1"),
        ((path / "images", "--out", path / "images"), "would be overwritten"),
        ((path / "images" / "a.nii.gz", "--out", tmp_path / "x.npz"), "a file, expected a folder"),
        ((path / "images", path / "masks", "--out", maps), "would both be written to"),
    ):
        assert onescan("predict", tmp_path / "run", *given) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_on_own_data_trains_and_predicts(tmp_path, monkeypatch, capsys):
    write, apply = (python_block("own_maps.md", word) for word in ("nibabel.save", "read_volume"))
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(write, names)  # noqa: S102
    small = ("--model.depth", 1, "--model.width", 48, "--training.epochs", 3)
    small += ("--data.clip", -200, 500, "--out", "runs/scans")
    assert onescan("train", "segmenter", "--data.path", "scans", *small) == 0
    assert "20 to 27 x 24 x 16 voxels" in capsys.readouterr().out
    report = Path("runs/scans/report.html").read_text(encoding="utf-8")
    assert "Slices of a volume are arranged row by row" in report
    assert onescan("predict", "runs/scans/seed-0", "scans/images", "--out", "maps") == 0
    exec(apply, names)  # noqa: S102
    classes = nibabel.as_closest_canonical(nibabel.load("maps/0.nii.gz")).dataobj
    assert np.array_equal(names["probabilities"].argmax(0), classes)
    assert names["inputs"].shape == (1, 20, 24, 16)
