"""The page about generated images, and its table."""

from dataclasses import replace

import pytest
import torch
from html_page import Page, assert_loads_nothing, table

from onescan.evaluation.generation import (
    Gathered,
    GenerationScore,
    GenerationScores,
    RealScore,
    RowFile,
    Shown,
    Tally,
)
from onescan.report import generation_table, write_generation
from onescan.report.generation.page import render_generation
from onescan.tasks.feature_distance import FeatureStatistics

NAMES = ("cat", "a <dog>", "$hip")


def score(guidance, distance, right=3, **changes):
    """Of three classes, of which the first is told for every mistake."""
    confusion = tuple(
        tuple(right * (told == asked) + (5 - right) * (told == 0) for told in range(3))
        for asked in range(3)
    )
    confusion = changes.pop("confusion", confusion)
    right = [row[k] for k, row in enumerate(confusion)]
    asked = [sum(row) for row in confusion]
    fields = {
        "guidance": guidance,
        "distance": distance,
        "spatial_distance": 2 * distance,
        "class_score": 2.5,
        "class_score_spread": 0.25,
        "precision": 0.75,
        "recall": 0.5,
        "as_asked": sum(right) / sum(asked) if asked else None,
        "asked": tuple(asked),
        "right": tuple(right),
        "confusion": confusion if len(confusion) <= 20 else (),
        "folder": f"guidance-{guidance:g}" if guidance is not None else "images",
    }
    return GenerationScore(**fields | changes)


def outcome(*scores, **changes):
    fields = {
        "name": "runs/<mine>",
        "samples": 15,
        "features": "runs/judge",
        "is_inception": False,
        "is_singular": False,
        "real": RealScore(name="train, Bars", count=24, class_score=2.75, as_labelled=0.9375),
        "sampler": "dpm",
        "steps": 50,
        "labels": "uniform",
        "seed": 3,
        "class_names": NAMES,
        "onescan": "1.2.3",
        "scores": scores or (score(1.0, 12.5), score(1.5, 8.25, right=4), score(4.0, 9.0, right=5)),
    }
    return GenerationScores(**fields | changes)


def shown(count=12, channels=1, labelled=True):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, channels, 6, 6), generator=generator, dtype=torch.uint8)
    labels = torch.arange(count) % 3 if labelled else torch.full((count,), -1)
    return Shown(images, labels)


def render(scores, kept=None):
    html = render_generation(scores, {each.guidance: kept for each in scores.scores})
    assert_loads_nothing(html)
    return html, Page(html)


def test_big_numbers_are_those_of_the_nearest_scale():
    _, page = render(outcome())
    assert "8.25 Frechet distance of 15 images at guidance 1.5" in page.text
    assert "75.0% precision" in page.text
    assert "50.0% recall" in page.text
    assert "86.7% as asked" in page.text


def test_the_table_has_every_scale_and_the_real_images():
    _, page = render(outcome())
    rows = table(page, "guidance")
    heads = ["Frechet distance", "spatial distance", "class score", "precision", "recall"]
    assert rows[0] == ["guidance", *heads, "as asked"]
    assert rows[1][:4] == ["1", "12.50", "25.00", "2.50 \N{PLUS-MINUS SIGN} 0.25"]
    assert [row[0] for row in rows] == ["guidance", "1", "1.5", "4", "real images"]
    assert rows[-1] == ["real images", "", "", "2.75", "", "", "93.8%"]


def test_only_inceptions_distance_is_called_fid():
    html, _ = render(outcome())
    assert "no FID" in html
    assert html.count("FID") == 1
    assert "FID" not in generation_table(outcome())
    _, page = render(outcome(is_inception=True))
    assert table(page, "guidance")[0][1:4] == ["FID", "sFID", "Inception Score"]
    _, page = render(outcome(is_inception=True, samples=50_000))
    assert table(page, "guidance")[0][1] == "FID-50K"
    assert generation_table(outcome(is_inception=True)).startswith("FID, 15 images")


def test_the_terminal_has_all_numbers_in_columns():
    lines = generation_table(outcome()).splitlines()
    assert lines[0] == "Frechet distance in features of runs/judge, 15 images"
    heads = ["Frechet", "distance", "spatial", "distance", "class", "score", "precision", "recall"]
    assert lines[1].split() == ["guidance", *heads, "as", "asked"]
    assert len({len(line) for line in lines[1:]}) == 1
    assert lines[3].split()[:2] == ["1.5", "8.25"]


def test_what_was_not_measured_has_no_column():
    bare = {
        "spatial_distance": None,
        "class_score": None,
        "class_score_spread": None,
        "precision": None,
        "recall": None,
        "as_asked": None,
        "confusion": (),
    }
    real = RealScore(name="x.npz", count=None, class_score=None, as_labelled=None)
    scores = outcome(
        score(None, 3.0, **bare),
        real=real,
        is_inception=True,
        sampler=None,
        steps=None,
        labels=None,
        seed=None,
        class_names=(),
    )
    _, page = render(scores, shown(labelled=False))
    assert table(page, "guidance") == [["guidance", "FID"], ["-", "3.00"]]
    assert "x.npz, statistics of them" in page.text
    assert "Over guidance" not in page.text
    assert "Classes asked for" not in page.text
    assert "Sampler" not in page.text
    assert generation_table(scores).splitlines()[-1].split() == ["-", "3.00"]


def test_too_few_images_are_told_of():
    html, _ = render(outcome(is_singular=True))
    warning = "There are no more images than features on a side"
    assert warning in html
    assert warning in generation_table(outcome(is_singular=True))
    assert warning not in generation_table(outcome())


def test_curves_are_drawn_over_several_scales_alone():
    html, page = render(outcome())
    assert "distance 12.5 at 1, 8.25 at 1.5, 9 at 4" in html
    assert "precision 0.75 at 1, 0.75 at 1.5, 0.75 at 4; recall 0.5 at 1" in html
    assert "as_asked" in html
    assert len(page.pictures("svg+xml")) == 4
    _, page = render(outcome(score(1.0, 3.0)))
    assert "Over guidance" not in page.text


def test_without_asked_classes_the_class_score_is_drawn():
    scores = [score(g, d, as_asked=None, confusion=()) for g, d in ((1.0, 3.0), (2.0, 2.0))]
    html, _ = render(outcome(*scores))
    assert "class_score 2.5 at 1, 2.5 at 2" in html


def test_images_stand_class_by_class():
    html, page = render(outcome(score(1.0, 3.0)), shown())
    assert len(page.pictures("png")) == 12
    places = [html.index(f"<h4>{name}</h4>") for name in ("cat", "a &lt;dog&gt;", "$hip")]
    assert places == sorted(places)
    assert "asked for a &lt;dog&gt;" in html


def test_of_the_scales_that_are_not_nearest_fewer_images_are_shown():
    html, page = render(outcome(), shown(count=100))
    assert len(page.pictures("png")) == 30 + 2 * 30  # ten of a class, then the first thirty
    assert html.index("The first 100 images at guidance 1.5") < html.index("The first 30 images at")


def test_one_image_of_each_class_is_named_below():
    html, page = render(outcome(score(1.0, 3.0)), shown(count=3))
    assert "<h4>" not in html
    assert "<div>a &lt;dog&gt;</div>" in html
    assert len(page.pictures("png")) == 3


def test_images_without_classes_are_one_gallery():
    html, page = render(outcome(score(1.0, 3.0)), shown(labelled=False, channels=3))
    assert len(page.pictures("png")) == 12
    assert "<h4>" not in html
    assert "beside the class" not in html


def test_a_matrix_has_what_is_told_by_what_was_asked():
    html, page = render(outcome())
    rows = table(page, "asked for \\ told")
    assert rows[0][1:] == list(NAMES)
    assert rows[1] == ["cat", "100", "0", "0"]
    assert rows[2] == ["a <dog>", "20", "80", "0"]
    assert rows[3] == ["$hip", "20", "0", "80"]
    assert "as asked, by class: a &lt;dog&gt; 80%, $hip 80%, cat 100%" in html
    assert "tells 93.8% of the real images aright" in page.text


@pytest.mark.parametrize(("classes", "matrix", "bars"), [(20, 1, 1), (21, 0, 1), (40, 0, 2)])
def test_many_classes_are_told_in_less(classes, matrix, bars):
    confusion = tuple(
        tuple(9 * (i == j) + i * (j == 0) for j in range(classes)) for i in range(classes)
    )
    names = tuple(f"class {i}" for i in range(classes))
    html, page = render(outcome(score(1.0, 3.0, confusion=confusion), class_names=names))
    assert html.count("asked for \\ told") == matrix
    assert len(page.pictures("svg+xml")) == bars


def test_classes_that_were_never_asked_for_have_no_bar():
    confusion = ((4, 1, 0), (0, 0, 0), (1, 0, 4))
    html, _ = render(outcome(score(1.0, 3.0, confusion=confusion)))
    assert "as asked, by class: cat 80%, $hip 80%" in html


def kept(folder, images):
    """What gathering leaves of some images."""
    folder.mkdir(parents=True)
    tally = Tally(2, 3)
    tally.place, tally.first = 2, images
    tally.pooled = FeatureStatistics.empty(2)
    Gathered(tally, RowFile(folder / "features.bin", 0, 2, 0)).save(folder)


def test_the_page_finds_what_was_kept_of_the_images(tmp_path):
    for scale in ("1", "1.5", "4"):
        kept(tmp_path / f"guidance-{scale}", shown())
    path = write_generation(outcome(), tmp_path)
    assert path == tmp_path / "report.html"
    html = path.read_text()
    assert_loads_nothing(html)
    assert len(Page(html).pictures("png")) == 36
    again = write_generation(outcome(), tmp_path)
    assert again.read_text() == html


def test_a_page_without_kept_images_has_none(tmp_path):
    page = Page(write_generation(outcome(), tmp_path).read_text())
    assert not page.pictures("png")


def test_a_foreign_file_is_not_replaced(tmp_path):
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(ValueError, match="was not written by onescan"):
        write_generation(outcome(), tmp_path)
    assert (tmp_path / "report.html").read_text() == "mine"


def test_the_same_scores_give_the_same_page():
    scores = outcome()
    assert render(scores, shown())[0] == render(replace(scores), shown())[0]
