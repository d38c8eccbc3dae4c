"""Forms are measured once each, given up when they take too long, and shown as they were found."""

import dataclasses
import json
import re

import pytest
import torch
from html_page import Page, assert_loads_nothing

from onescan.bench import forms
from onescan.bench.form_costs import Variant
from onescan.bench.forms import FormsConfig, measure_forms
from onescan.bench.timing import Measurement
from onescan.layers.decays import FixedDecayConfig
from onescan.layers.mixers import (
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    LionMixerConfig,
)
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.presets import preset
from onescan.report import write_forms
from onescan.report.forms.page import render_forms

MODEL = ImageClassifierConfig(
    image_size=(8, 8),
    channels=1,
    patch_size=(2, 4),
    num_classes=3,
    width=8,
    depth=1,
    mixer=LionMixerConfig(num_heads=2, decay=FixedDecayConfig()),
    position=None,
)
ASKED = FormsConfig(image_sizes=(16, 8, 32), chunk_sizes=(4, 2), time_limit_s=5.0)
VARIANTS = ("full", "chunk 4", "chunk 2", "recurrent")


@pytest.fixture
def measured(monkeypatch):
    """What is measured from now on, in no process: (form, chunk size, side)."""
    calls = []

    def measure(prepare, model, batch_size, device):
        mixer, side = model.mixer, model.image_size[0]
        calls.append((mixer.form, mixer.chunk_size, side))
        return Measurement(float(side * len(mixer.form)), peak_mib=side / mixer.chunk_size)

    monkeypatch.setattr(forms, "measure", measure)
    return calls


def costs(folder, model=MODEL, **changes):
    return measure_forms("mine", model, dataclasses.replace(ASKED, **changes), folder)


def test_each_form_is_measured_at_each_size_with_each_chunk(measured, tmp_path):
    found = costs(tmp_path)
    assert measured == [
        (form, chunk, side)
        for form, chunk in [("full", 64), ("chunk", 4), ("chunk", 2), ("recurrent", 64)]
        for side in (8, 16, 32)
    ]
    assert not found.left_out
    chunk = Variant(form="chunk", chunk_size=2)
    assert chunk.name == "chunk 2"
    assert [(c.size, c.median_ms, c.peak_mib) for c in found.of(chunk)] == [
        (8, 40, 4), (16, 80, 8), (32, 160, 16)
    ]  # fmt: skip
    held = json.loads((tmp_path / "forms.json").read_text())
    assert len(held["costs"]) == 12
    assert held["machine"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("mixer", "known"),
    [
        (LionMixerConfig(num_heads=2), {"full", "chunk", "recurrent"}),
        (LightNetMixerConfig(num_heads=2), {"one_scan", "full"}),
        (LinearDiffusionMixerConfig(num_heads=2), {"dense", "banded", "fft"}),
        (LinearDiffusionMixerConfig(num_heads=2, scheme="crank_nicolson"), {"dense", "banded"}),
    ],
    ids=["lion", "lightnet", "ldn", "implicit ldn"],
)
def test_without_any_all_forms_that_the_model_has_are_measured(mixer, known, monkeypatch, tmp_path):
    monkeypatch.setattr(forms, "measure", lambda *_: Measurement(1.0, 1.0))
    model = dataclasses.replace(MODEL, mixer=mixer)
    found = costs(tmp_path, model, forms=(), image_sizes=(8,))
    assert {cost.variant.form for cost in found.costs} == known
    with pytest.raises(ValueError, match=r"form 'chunky' is unknown.*; there are: "):
        costs(tmp_path, model, forms=("chunky",))


def test_what_is_known_is_not_measured_again(measured, tmp_path):
    first = costs(tmp_path)
    measured.clear()
    assert costs(tmp_path) == first
    assert not measured
    more = costs(tmp_path, image_sizes=(8, 64), forms=("full",))
    assert measured == [("full", 64, 64)]
    assert more.costs[:-1] == first.costs


def test_a_killed_benchmark_goes_on_where_it_was(measured, tmp_path, monkeypatch):
    whole = costs(tmp_path / "whole")
    measure, left = forms.measure, iter(range(7))
    monkeypatch.setattr(forms, "measure", lambda *given: (next(left), measure(*given))[1])
    with pytest.raises(StopIteration):
        costs(tmp_path / "killed")
    monkeypatch.setattr(forms, "measure", measure)
    measured.clear()
    assert costs(tmp_path / "killed") == whole
    assert len(measured) == 5


def test_a_form_that_takes_too_long_is_not_measured_on_larger_images(measured, tmp_path):
    found = costs(tmp_path, time_limit_s=0.1)  # recurrent takes 0.144 s at 16
    (left,) = found.left_out
    assert (left.variant.name, left.size) == ("recurrent", 32)
    assert left.why == "at 16 one took 0.144 s"
    assert len(found.costs) == 11
    measured.clear()
    assert costs(tmp_path, time_limit_s=0.1) == found
    assert not measured
    assert not costs(tmp_path).left_out
    assert measured == [("recurrent", 64, 32)]


def test_a_process_that_dies_ends_its_form_and_is_tried_again(measured, tmp_path, monkeypatch):
    measure = forms.measure

    def dying(prepare, model, *rest):
        if model.mixer.form == "full" and model.image_size[0] > 8:
            raise RuntimeError("measuring ended with -9")
        return measure(prepare, model, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(forms, "measure", dying)
        found = costs(tmp_path)
    (left,) = found.left_out
    assert (left.variant.name, left.size) == ("full", 16)
    assert "memory may have run out" in left.why
    assert [c.size for c in found.of(left.variant)] == [8]
    assert not costs(tmp_path).left_out


def test_a_real_forward_in_a_real_process(tmp_path):
    (cost,) = costs(tmp_path, image_sizes=(8,), forms=("recurrent",)).costs
    assert cost.variant == Variant(form="recurrent")
    assert 0 < cost.median_ms < 10_000


def test_what_is_prepared_is_a_forward_without_gradients(monkeypatch):
    model = forms.configured(MODEL, Variant(form="chunk", chunk_size=2), 16)
    assert (model.image_size, model.mixer.form, model.mixer.chunk_size) == ((16, 16), "chunk", 2)
    scores = forms._prepare(model, 5, "cpu")()
    assert scores.shape == (5, 3)
    assert not scores.requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"image_sizes": (8, 10)},
            "image_sizes has 10, expected a multiple of the patch size 2 x 4",
        ),
        ({"image_sizes": (0,)}, "image_sizes has 0, expected a multiple"),
        ({"image_sizes": ()}, r"image_sizes is \(\), expected at least one, and each once"),
        ({"chunk_sizes": (4, 4)}, r"chunk_sizes is \(4, 4\), expected at least one, and each once"),
        ({"chunk_sizes": (4, 0)}, "chunk_size is 0"),
        ({"forms": ("full", "ful")}, "form 'ful' is unknown .*; there are: full, chunk, recurrent"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"time_limit_s": -1.0}, "time_limit_s is -1.0"),
        ({"device": "gpu"}, "device is 'gpu', expected auto, cpu, cuda"),
        ({"model": preset("deit_tiny")}, "mine has no forms, expected an image classifier whose"),
        (
            {"model": preset("lightnet_tiny"), "image_sizes": (224,), "forms": ("chunk",)},
            "there are: one_scan/torch, full",
        ),
    ],
)
def test_refusals_come_before_the_first_measurement(measured, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        costs(tmp_path, **changes)
    assert not measured
    assert not list(tmp_path.iterdir())


def test_measurements_of_something_else_are_not_mixed_in(measured, tmp_path, monkeypatch):
    costs(tmp_path)
    before = (tmp_path / "forms.json").read_bytes()
    wider = dataclasses.replace(MODEL, width=16)
    with pytest.raises(ValueError, match=r"measured with model\.width 8, and not 16: choose"):
        costs(tmp_path, model=wider)
    with pytest.raises(ValueError, match="with batch_size 1, and not 2"):
        costs(tmp_path, batch_size=2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    with pytest.raises(ValueError, match=r"with machine\.threads \d+, and not 77"):
        costs(tmp_path)
    assert (tmp_path / "forms.json").read_bytes() == before


@pytest.mark.parametrize("text", ["[", "[]", '{"name": "mine"}'])
def test_a_damaged_file_says_so(measured, tmp_path, text):
    (tmp_path / "forms.json").write_text(text)
    with pytest.raises(ValueError, match=r"forms\.json is damaged .*: remove it"):
        costs(tmp_path)


# The page


def numbers(page):
    """Row name to cells, of the table of times and that of memory."""
    return [{name: cells for name, *cells in rows} for rows in page.cells]


def test_the_page_holds_the_numbers(measured, tmp_path):
    path = write_forms(costs(tmp_path, batch_size=2, time_limit_s=0.1), tmp_path / "report.html")
    html = path.read_text(encoding="utf-8")
    assert_loads_nothing(html)
    page = Page(html)
    time, memory = numbers(page)
    assert time[""] == memory[""] == [f"{n} \N{MULTIPLICATION SIGN} {n}" for n in (8, 16, 32)]
    assert time["full"] == ["16 ms", "32 ms", "64 ms"]  # per image
    assert time["recurrent"] == ["36 ms", "72 ms", "not measured"]
    assert memory["chunk 2"] == ["4 MiB", "8 MiB", "16 MiB"]
    assert re.findall(r"<b>([\d.]+ ms)</b>", html) == ["16 ms", "32 ms", "64 ms"]
    assert "Not measured: recurrent from 32 pixels on, as at 16 one took 0.144 s." in page.text
    assert len(page.pictures("svg+xml")) == 3
    drawn = " ".join(svg.decode() for svg in page.pictures("svg+xml"))
    assert drawn.count(">recurrent (to 16)<") == 2
    assert all(f">{name}<" in drawn for name in VARIANTS)


def test_big_numbers_are_of_the_largest_size_that_most_was_measured_at(measured, tmp_path):
    found = costs(tmp_path, time_limit_s=0.1)
    html = render_forms(found)
    assert "<strong>64 ms</strong><b>fastest, per image</b><span>full, at 16" in html
    assert "<strong>2.25 \N{MULTIPLICATION SIGN}</strong>" in html  # 144 / 64


def test_a_memory_of_nothing_can_be_drawn(measured, tmp_path):
    found = costs(tmp_path)
    nothing = tuple(dataclasses.replace(cost, peak_mib=0.0) for cost in found.costs)
    assert "0 MiB" in render_forms(dataclasses.replace(found, costs=nothing))


def test_a_page_about_nothing_is_refused(measured, tmp_path):
    nothing = dataclasses.replace(costs(tmp_path), costs=())
    with pytest.raises(ValueError, match="nothing was measured of mine"):
        write_forms(nothing, tmp_path / "report.html")
    (tmp_path / "notes.html").write_text("mine")
    with pytest.raises(ValueError, match="was not written by onescan"):
        write_forms(costs(tmp_path), tmp_path / "notes.html")
