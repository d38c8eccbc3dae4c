"""Pathfinder: curves, labels and images, generated or read from a published folder."""

import logging
from itertools import chain, combinations, pairwise

import numpy as np
import pytest
from PIL import Image, ImageDraw
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier

from onescan.experiments.data.long_range import Pathfinder, PathfinderConfig, PathfinderFolder, draw
from onescan.experiments.data.long_range.curves import DIMENSIONS

KINDS = [(32, 6), (32, 14), (64, 9), (64, 14)]
FINE = 4


def scenes(side, contour_length, count, seed=0):
    data = Pathfinder(PathfinderConfig(side=side, contour_length=contour_length, seed=seed))
    return [data.scene("train", index) for index in range(count)]


def components(mask):
    """Number the connected parts of a mask, from 1; 0 is outside. Corners connect."""
    numbers, count = np.zeros(mask.shape, dtype=int), 0
    for seed in zip(*mask.nonzero(), strict=True):
        if numbers[seed]:
            continue
        count += 1
        waiting, numbers[seed] = [seed], count
        while waiting:
            row, column = waiting.pop()
            rows, columns = slice(max(row - 1, 0), row + 2), slice(max(column - 1, 0), column + 2)
            new = mask[rows, columns] & (numbers[rows, columns] == 0)
            numbers[rows, columns][new] = count
            waiting += [
                (rows.start + down, columns.start + right) for down, right in np.argwhere(new)
            ]
    return numbers, count


def solid(scene):
    """Draw a scene's curves alone, with their gaps filled, larger."""
    image = Image.new("1", (FINE * scene.side, FINE * scene.side))
    for curve in scene.curves:
        places = [(FINE * place.real, FINE * place.imag) for place in chain(*curve)]
        ImageDraw.Draw(image).line(places, fill=1)
    return np.asarray(image)


def middle_lines(curve):
    """Places along the dashes of a curve."""
    return np.concatenate([np.linspace(start, end, 9) for start, end in curve])


@pytest.mark.parametrize(("side", "contour_length"), KINDS)
def test_discs_are_joined_according_to_the_label(side, contour_length):
    for scene in scenes(side, contour_length, 12):
        numbers, count = components(solid(scene))
        assert count == len(scene.curves)
        first, second = (
            numbers[int(FINE * disc.imag), int(FINE * disc.real)] for disc in scene.discs
        )
        assert 0 not in (first, second)
        assert (first == second) == scene.label


@pytest.mark.parametrize(("side", "contour_length"), KINDS)
def test_an_image_contains_two_discs_and_all_dashes(side, contour_length):
    for scene in scenes(side, contour_length, 12):
        image = draw(scene)
        assert image.shape == (side, side)
        assert image.dtype == np.uint8
        numbers, count = components(image == 255)
        assert count == 2
        middles = {complex(*np.argwhere(numbers == n).mean(0)[::-1] + 0.5) for n in (1, 2)}
        assert all(min(abs(disc - middle) for middle in middles) < 0.5 for disc in scene.discs)
        gray = image[(image > 0) & (image < 255)]
        long, short = contour_length, contour_length // 3
        assert [len(curve) for curve in scene.curves[:2]] == [long, long]
        assert {len(curve) for curve in scene.curves[2:]} <= {short}
        assert len(gray) > 2 * sum(map(len, scene.curves))  # pixels of each dash, at least


@pytest.mark.parametrize(("side", "contour_length"), [*KINDS, (128, 14), (256, 6)])
def test_curves_follow_their_dimensions(side, contour_length):
    dimensions = DIMENSIONS[side]
    style = dimensions.style
    for scene in scenes(side, contour_length, 6):
        for curve in scene.curves:
            for dash, after in pairwise(curve):
                assert abs(dash.end - dash.start) == pytest.approx(style.dash)
                assert style.gap * 0.7 < abs(after.start - dash.end) <= style.gap * 1.001
                turn = np.angle((after.end - after.start) / (dash.end - dash.start), deg=True)
                assert abs(turn) < 90 / style.continuity
            places = middle_lines(curve)
            inside = np.array([places.real, places.imag])
            assert inside.min() > dimensions.radius
            assert inside.max() < side - dimensions.radius
        for one, other in combinations(map(middle_lines, scene.curves), 2):
            assert abs(one[:, None] - other).min() > max(style.gap, 0.8 * style.clearance)


def test_examples_depend_only_on_seed_split_and_index():
    data, again = Pathfinder(), Pathfinder()
    forwards = [data.example("val", index) for index in range(6)]
    for index in reversed(range(6)):
        image, label = again.example("val", index)
        np.testing.assert_array_equal(image, forwards[index][0])
        assert label == forwards[index][1]
    others = [
        Pathfinder().example("test", 0)[0],
        Pathfinder(PathfinderConfig(seed=1)).example("val", 0)[0],
        *(image for image, _ in forwards[1:]),
    ]
    assert not any(np.array_equal(forwards[0][0], other) for other in others)


def test_labels_are_balanced_in_pairs_in_random_order():
    labels = np.array([scene.label for scene in scenes(32, 6, 100)])
    first, second = labels.reshape(-1, 2).T
    np.testing.assert_array_equal(first + second, 1)
    assert 12 < first.sum() < 38  # of 50


def test_the_second_disc_fits_the_other_curve_as_well():
    middle = complex(16, 16)
    for scene in scenes(32, 9, 20):
        own, other = [(curve[0].start, curve[-1].end) for curve in scene.curves[:2]]
        anchor = scene.discs[0]
        joined = own[1 - own.index(anchor)]
        unlike = [
            max(abs(abs(joined - place) - abs(apart - place)) for place in (anchor, middle))
            for apart in other
        ]
        assert min(unlike) <= 32 / 16
        assert scene.discs[1] in (joined, other[np.argmin(unlike)])


def simple_statistics(scene):
    image = draw(scene).astype(float)
    rows, columns = np.mgrid[: scene.side, : scene.side]
    middle = sum(scene.discs) / 2
    return [
        abs(scene.discs[0] - scene.discs[1]),
        (image == 255).sum(),
        (image > 0).sum(),
        image.mean(),
        (image * rows).sum() / image.sum(),
        (image * columns).sum() / image.sum(),
        middle.real,
        middle.imag,
        abs(middle - complex(scene.side, scene.side) / 2),
    ]


@pytest.mark.slow
def test_discs_do_not_touch_and_simple_statistics_do_not_predict_the_label():
    drawn = scenes(32, 14, 300)
    room = 2 * DIMENSIONS[32].radius + DIMENSIONS[32].style.clearance
    assert min(abs(scene.discs[0] - scene.discs[1]) for scene in drawn) >= room
    labels = np.array([scene.label for scene in drawn])
    statistics = np.array([simple_statistics(scene) for scene in drawn])
    limit = 0.5 + 3.5 * 0.5 / len(drawn) ** 0.5  # rarely exceeded by guessing
    noise = np.random.default_rng(0).normal(size=len(drawn))
    for classifier in (LogisticRegression(), DecisionTreeClassifier(max_depth=3, random_state=0)):
        classifier = make_pipeline(StandardScaler(), classifier)
        assert cross_val_score(classifier, statistics, labels, cv=5).mean() < limit
        leaked = np.column_stack([statistics, labels + noise])
        assert cross_val_score(classifier, leaked, labels, cv=5).mean() > limit


@pytest.mark.parametrize(
    ("changes", "example", "found"),
    [
        ({"side": 48}, (), "side 48"),
        ({"contour_length": 7}, (), "contour_length 7"),
        ({}, ("all", 0), "split 'all'"),
        ({}, ("train", -2), "index is -2"),
    ],
)
def test_unknown_variants_and_examples_are_rejected(changes, example, found):
    with pytest.raises(ValueError, match=found):
        Pathfinder(PathfinderConfig(**changes)).example(*example)


@pytest.fixture
def published(tmp_path):
    """A folder of three images as published, 10.npy after 2.npy, and one that is empty."""
    rng = np.random.default_rng(0)
    (tmp_path / "metadata").mkdir()
    for batch, labels in ((2, [1, 0]), (10, [1])):
        folder = tmp_path / f"imgs/{batch}"
        folder.mkdir(parents=True)
        for number in range(len(labels)):
            pixels = rng.integers(0, 256, (32, 32), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"sample_{number}.png")
        lines = [
            f"imgs/{batch} sample_{number}.png {number} {label} 1.0 14 4 2 0.5 1 1\n"
            for number, label in enumerate(labels)
        ]
        (tmp_path / f"metadata/{batch}.npy").write_text("".join(lines))
    return tmp_path


def test_published_folders_are_read(published, caplog):
    (published / "imgs/10/sample_1.png").touch()
    with (published / "metadata/10.npy").open("a") as file:
        file.write("imgs/10 sample_1.png 1 0 1.0 14 4 2 0.5 1 1\n")
    with caplog.at_level(logging.WARNING, logger="onescan"):
        data = PathfinderFolder(published)
    assert "sample_1.png, which is empty" in caplog.text
    examples = [data.example(index) for index in range(len(data))]
    assert [label for _, label in examples] == [1, 0, 1]
    for (image, _), name in zip(examples, ("2/sample_0", "2/sample_1", "10/sample_0"), strict=True):
        np.testing.assert_array_equal(image, np.asarray(Image.open(published / f"imgs/{name}.png")))


@pytest.mark.parametrize("line", ["imgs/2 sample_0.png 0", "imgs/2 sample_0.png 0 2 1.0", ""])
def test_malformed_metadata_is_rejected_with_file_and_line(published, line):
    with (published / "metadata/2.npy").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=rf"2\.npy, line 3 is '{line}'"):
        PathfinderFolder(published)
    np.save(published / "metadata/2.npy", np.array([["imgs/2", "sample_0.png", "0", "1"]]))
    with pytest.raises(ValueError, match=r"2\.npy is not text"):
        PathfinderFolder(published)


def test_damaged_folders_are_rejected(published, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(FileNotFoundError, match=str(empty)):
        PathfinderFolder(empty)
    (published / "imgs/2/sample_0.png").write_text("not an image")
    Image.new("L", (32, 30)).save(published / "imgs/2/sample_1.png")
    data = PathfinderFolder(published)
    with pytest.raises(ValueError, match=r"2/sample_0\.png cannot be read"):
        data.example(0)
    with pytest.raises(ValueError, match=r"2/sample_1\.png has 32 x 30 pixels"):
        data.example(1)
    (published / "imgs/2/sample_1.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"imgs/2/sample_1\.png"):
        PathfinderFolder(published)
