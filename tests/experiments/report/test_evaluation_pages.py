"""Pages and tables of evaluations: generated images, context lengths, and needles."""

import math

import pytest
import torch
from html_page import Page, assert_loads_nothing, table

from onescan.checkpoint.weights import save_weights
from onescan.experiments.evaluation.config import NeedleConfig
from onescan.experiments.evaluation.generation import (
    STATE,
    GenerationScore,
    GenerationScores,
    RealScore,
    Shown,
)
from onescan.experiments.evaluation.lengths import (
    LeftOutLength,
    LengthScore,
    LengthScores,
    PlaceScore,
)
from onescan.experiments.evaluation.needle import NeedleGrid, Outcome
from onescan.experiments.report import (
    generation_table,
    lengths_table,
    needle_table,
    write_generation,
    write_lengths,
    write_needles,
)
from onescan.experiments.report.lengths import loss_by_position

NAMES = ("cat", "a <dog>", "$hip")


def read(path):
    html = path.read_text(encoding="utf-8")
    assert_loads_nothing(html)
    return html, Page(html)


# Generated images


def score(guidance, distance, correct=3, **changes):
    """Scores of three classes; all mistakes are classified as the first."""
    confusion = tuple(
        tuple(correct * (i == j) + (5 - correct) * (j == 0) for j in range(3)) for i in range(3)
    )
    confusion = changes.pop("confusion", confusion)
    right = tuple(row[i] for i, row in enumerate(confusion))
    counts = tuple(map(sum, confusion))
    fields = {
        "guidance": guidance,
        "distance": distance,
        "spatial_distance": 2 * distance,
        "class_score": 2.5,
        "class_score_std": 0.25,
        "precision": 0.75,
        "recall": 0.5,
        "class_accuracy": sum(right) / sum(counts) if counts else None,
        "requested": counts,
        "right": right,
        "confusion": confusion if len(confusion) <= 20 else (),
        "folder": "images" if guidance is None else f"guidance-{guidance:g}",
    }
    return GenerationScore(**fields | changes)


def outcome(*scores, **changes):
    fields = {
        "name": "runs/<mine>",
        "samples": 15,
        "features": "runs/classifier",
        "is_inception": False,
        "is_singular": False,
        "real": RealScore(name="train, Bars", count=24, class_score=2.75, class_accuracy=0.9375),
        "sampler": "dpm",
        "steps": 50,
        "labels": "uniform",
        "seed": 3,
        "class_names": NAMES,
        "onescan": "1.2.3",
        "scores": scores
        or (score(1.0, 12.5), score(1.5, 8.25, correct=4), score(4.0, 9.0, correct=5)),
    }
    return GenerationScores(**fields | changes)


def shown(count=12, channels=1, classes=3):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, channels, 6, 6), generator=generator, dtype=torch.uint8)
    labels = torch.arange(count) % classes if classes else torch.full((count,), -1)
    return Shown(images, labels)


def kept(folder, images):
    """Write what an evaluation keeps of its first images."""
    folder.mkdir(parents=True, exist_ok=True)
    count = torch.tensor(len(images.labels))
    save_weights(folder / STATE, {"pooled.count": count, **images._asdict()}, {})


def generation_page(scores, out, images=None):
    for each in scores.scores if images else ():
        kept(out / each.folder, images)
    return read(write_generation(scores, out))


def test_generation_page_has_all_scores(tmp_path):
    html, page = generation_page(outcome(), tmp_path)
    assert "8.25 Frechet distance of 15 images at guidance 1.5" in page.text
    for card in ("75.0% precision", "50.0% recall", "86.7% class accuracy"):
        assert card in page.text
    rows = table(page, "guidance")
    heads = ["Frechet distance", "spatial distance", "class score", "precision", "recall"]
    assert rows[0] == ["guidance", *heads, "class accuracy"]
    assert rows[1][:4] == ["1", "12.50", "25.00", "2.50 \u00b1 0.25"]
    assert [row[0] for row in rows[1:]] == ["1", "1.5", "4", "real images"]
    assert rows[-1][1:] == ["", "", "2.75", "", "", "93.8%"]
    assert html.count('class="best"') == len(rows[2])
    assert "It classifies 93.8% of real images correctly." in page.text
    assert html.count("<svg") == 4  # three curves, and the accuracy by class
    assert "runs/&lt;mine&gt;" in html
    matrix = table(page, "requested \\ predicted")
    assert matrix[0][1:] == list(NAMES)
    assert [row[1:] for row in matrix[1:]] == [["5", "0", "0"], ["1", "4", "0"], ["1", "0", "4"]]
    assert write_generation(outcome(), tmp_path).read_text() == html


def test_only_inception_features_give_an_fid(tmp_path):
    html, _ = generation_page(outcome(), tmp_path)
    assert html.count("FID") == 1
    assert "not an FID" in html
    assert "FID" not in generation_table(outcome())
    _, page = generation_page(outcome(is_inception=True), tmp_path)
    assert table(page, "guidance")[0][1:4] == ["FID", "sFID", "Inception Score"]
    large = outcome(is_inception=True, samples=50_000)
    assert generation_table(large).startswith("FID-50K, 50,000 images")


def test_generation_table_has_columns(tmp_path):
    title, *lines = generation_table(outcome()).splitlines()
    assert title == "Frechet distance in features of runs/classifier, 15 images"
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split()[:2] == ["1.5", "8.25"]
    singular = outcome(is_singular=True)
    assert "does not exceed the number of features" in generation_table(singular)
    assert "does not exceed the number of features" in generation_page(singular, tmp_path)[1].text
    assert "no more images than features" not in generation_table(outcome())


def test_unmeasured_scores_have_no_columns(tmp_path):
    fields = ("spatial_distance", "class_score", "class_score_std", "precision", "recall")
    bare = dict.fromkeys((*fields, "class_accuracy")) | {"confusion": ()}
    real = RealScore(name="x.npz", count=None, class_score=None, class_accuracy=None)
    settings = dict.fromkeys(("sampler", "steps", "labels", "seed"))
    scores = outcome(score(None, 3.0, **bare), real=real, class_names=(), **settings)
    html, page = generation_page(scores, tmp_path, shown(classes=0, channels=3))
    assert table(page, "guidance") == [["guidance", "Frechet distance"], ["-", "3.00"]]
    assert "x.npz, statistics only" in page.text
    for absent in ("Over guidance", "predicted classes", "Sampler", "by requested class"):
        assert absent not in page.text
    assert html.count("<img") == 1
    assert generation_table(scores).splitlines()[-1].split() == ["-", "3.00"]


def test_class_score_is_drawn_without_requested_classes(tmp_path):
    scores = [score(g, d, class_accuracy=None, confusion=()) for g, d in ((1.0, 3.0), (2.0, 2.0))]
    _, page = generation_page(outcome(*scores), tmp_path)
    assert "2.50 \u00b1 0.25 class score over ten parts" in page.text
    assert "Band: standard deviation over ten parts" in page.text


@pytest.mark.parametrize(
    ("images", "pictures"),
    [
        (shown(count=12), 1),
        (shown(count=13, channels=3), 1),  # an uneven number of images per class
        (shown(count=24, classes=12), 24),  # too many classes for columns
    ],
)
def test_generated_images_have_class_names(tmp_path, images, pictures):
    names = ("cat", "a <dog>", *(f"class {i}" for i in range(2, 12)))
    bare = score(1.0, 3.0, class_accuracy=None, confusion=())
    html, page = generation_page(outcome(bare, class_names=names), tmp_path, images)
    assert html.count("<img") == pictures
    shown_names = [text for text in page.texts if text in names]
    assert set(shown_names) == {names[label] for label in images.labels}
    assert "Unselected samples, by requested class." in page.text


def test_fewer_images_are_shown_of_other_guidance_scales(tmp_path):
    html, page = generation_page(outcome(), tmp_path, shown(count=100))
    assert html.count("<img") == 3
    first, second = (page.text.index(f"The first {n} images") for n in (100, 30))
    assert first < second


def test_classes_without_images_are_left_out(tmp_path):
    scores = outcome(score(1.0, 3.0, confusion=((4, 1, 0), (0, 0, 0), (1, 0, 4))))
    html, _ = generation_page(scores, tmp_path)
    assert "cat 80.0%, $hip 80.0%" in html


def test_foreign_file_is_not_replaced(tmp_path):
    (tmp_path / "report.html").write_text("mine")
    for write in (
        lambda path: write_generation(outcome(), path.parent),
        lambda path: write_lengths(lengths(), path),
        lambda path: write_needles(needles(), path),
    ):
        with pytest.raises(ValueError, match="was not written by onescan"):
            write(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == "mine"


# Context lengths


def lengths(**changes):
    fields = {
        "name": "runs/<mine>",
        "is_causal": False,
        "trained_length": 256,
        "text": "a text",
        "tokens": 9000,
        "predicted_tokens": 1350,
        "onescan": "1.0",
        "scores": tuple(
            LengthScore(length=n, loss=loss, perplexity=math.exp(loss), accuracy=share)
            for n, loss, share in ((128, 2.0, 0.5), (256, 1.5, 0.625), (4096, 3.0, 0.25))
        ),
    }
    return LengthScores(**fields | changes)


def test_lengths_page_has_all_numbers(tmp_path):
    left_out = (LeftOutLength(length=9999, why="the model has 4096 places"),)
    html, page = read(write_lengths(lengths(left_out=left_out), tmp_path / "report.html"))
    assert page.cells == [
        [
            ["length", "loss", "perplexity", "accuracy"],
            ["128", "2.000", "7.389", "50.00%"],
            ["256", "1.500", "4.482", "62.50%"],
            ["4,096", "3.000", "20.086", "25.00%"],
        ]
    ]
    assert "62.50% accuracy as in training: rows of 256 tokens" in page.text
    assert "25.00% accuracy the longest: rows of 4,096 tokens" in page.text
    assert "Not evaluated: 9,999 tokens, because the model has 4096 places." in page.text
    assert page.text.count("The dashed line marks the row length in training.") == 2
    assert html.count("<svg") == 2
    lines = lengths_table(lengths()).splitlines()
    assert lines[2].split() == ["256", "1.5000", "4.4817", "0.6250", "as", "in", "training"]


def test_causal_lengths_page_has_loss_by_position(tmp_path):
    def causal(length, *losses):
        ends = [0, *(2**i for i in range(len(losses)))]
        places = zip(ends, ends[1:], losses, strict=False)
        return LengthScore(
            length=length,
            loss=1.0,
            perplexity=math.e,
            accuracy=0.5,
            places=tuple(PlaceScore(begin=a, end=b, loss=loss) for a, b, loss in places),
        )

    scores = (causal(2, 3.0, 2.0), causal(8, 9.0, 9.0, 1.5, 1.25))
    found = lengths(is_causal=True, trained_length=None, scores=scores)
    assert [place.loss for place in loss_by_position(found)] == [3.0, 2.0, 1.5, 1.25]
    html, page = read(write_lengths(found, tmp_path / "report.html"))
    assert html.count("<svg") == 2
    assert "Training unknown" in page.text
    assert "dashed" not in page.text
    html, page = read(
        write_lengths(lengths(is_causal=True, scores=scores[:1]), tmp_path / "report.html")
    )
    assert html.count("<svg") == 1
    assert "Only one length was evaluated." in page.text


# Needles


def needles(is_found=lambda length, depth: False, gain=lambda length, depth: 0.0):
    config = NeedleConfig(lengths=(200, 400), depths=(1.0, 0.0, 0.5), trials=2)
    outcomes = tuple(
        Outcome(
            length=length,
            depth=depth,
            trial=trial,
            right=is_found(length, depth),
            log_probability=gain(length, depth) - 9.0,
            without=-9.0,
        )
        for length in config.lengths
        for depth in config.depths
        for trial in range(config.trials)
    )
    return NeedleGrid(
        name="runs/<mine>",
        weights="w",
        haystack="lines",
        text="t",
        onescan="1.0",
        config=config,
        outcomes=outcomes,
    )


def test_needle_page_has_grids(tmp_path):
    grid = needles(
        lambda length, depth: depth == 1, lambda length, depth: 8.5 if depth == 1 else -0.5
    )
    _, page = read(write_needles(grid, tmp_path / "report.html"))
    found, gained = page.cells
    assert found[0] == gained[0] == ["depth \\ tokens", "200", "400"]
    assert found[1:] == [["0%", "0%", "0%"], ["50%", "0%", "0%"], ["100%", "100%", "100%"]]
    assert gained[1:] == [
        ["0%", "-0.50", "-0.50"],
        ["50%", "-0.50", "-0.50"],
        ["100%", "8.50", "8.50"],
    ]
    assert "33.3% found of 12 needles" in page.text
    assert "The magic number of {name} is {number}." in page.text
    lines = needle_table(grid).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["depth", "200", "400"]
    assert lines[-1].split() == ["100%", "100%,", "+8.50", "100%,", "+8.50"]


def test_empty_needle_grid_is_visible(tmp_path):
    html, page = read(write_needles(needles(), tmp_path / "report.html"))
    assert [row[1:] for row in page.cells[0][1:]] == [["0%", "0%"]] * 3
    assert [row[1:] for row in page.cells[1][1:]] == [["0.00", "0.00"]] * 3
    assert html.count('class="zero"') == 12
    assert "1px solid" in html  # cells have borders
