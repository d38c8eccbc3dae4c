"""The report shows the decays that a LION learnt, and nothing of models that have none."""

import dataclasses

import numpy as np
import pytest
import torch
from html_page import Page, assert_loads_nothing
from tiny_run import tiny_run

from onescan.layers.decays import (
    FixedDecayConfig,
    HippoDecayConfig,
    NoDecayConfig,
    SelectiveDecayConfig,
)
from onescan.layers.mixers import LightNetMixerConfig, LionMixerConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.report.page import render_page
from onescan.report.runs import read_run_group
from onescan.report.sections import learnt_decays
from onescan.tasks import ImageClassificationConfig
from onescan.training import train

LION = ImageClassifierConfig(
    image_size=(4, 4),
    channels=1,
    patch_size=(1, 1),
    num_classes=3,
    width=16,
    depth=3,
    mixer=LionMixerConfig(num_heads=2, decay=FixedDecayConfig()),
    position=None,
)
DIAGONAL = SelectiveDecayConfig(diagonal=True)


def lion(**changes):
    mixer = dataclasses.replace(LION.mixer, **changes)
    return dataclasses.replace(LION, mixer=mixer).build().eval()


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lion")
    run = dataclasses.replace(
        tiny_run(epochs=1), model=LION, task=ImageClassificationConfig(augment=None)
    )
    train(run, folder)
    return read_run_group([folder])


def of(study, model):
    return learnt_decays.section(dataclasses.replace(study, model=model))


def set_decays(model, decays):
    """Block by block, head by head."""
    with torch.no_grad():
        for block, values in zip(model.blocks, decays, strict=True):
            block.mixer.decays[0].logit.copy_(torch.tensor(values).logit())


@pytest.fixture
def drawn(monkeypatch):
    """What each picture from now on is drawn from."""
    scans, dots = [], learnt_decays._dots
    monkeypatch.setattr(
        learnt_decays, "_dots", lambda scan, *rest: scans.append(scan) or dots(scan, *rest)
    )
    return scans


def test_half_lives_are_those_of_the_decays(study, drawn):
    decays = [[0.5, 0.9], [0.99, 0.1], [0.999, 0.5**0.5]]
    model = lion()
    set_decays(model, decays)
    section = of(study, model)
    (quantiles,) = drawn
    wanted = np.array([[1, 6.5788], [68.9676, 0.30103], [692.8, 2]])
    for quantile in quantiles:
        np.testing.assert_allclose(quantile, wanted, rtol=1e-4)
    (svg,) = Page(section.figures[0].html).pictures("svg+xml")
    assert all(f">{number}<" in svg.decode() for number in ("0.5", "0.9", "0.99", "0.999"))
    assert "drawn there" not in section.figures[0].caption


def test_decays_that_forget_all_or_nothing_are_drawn_at_the_edge(study, drawn):
    model = lion()
    set_decays(model, [[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]])
    section = of(study, model)
    assert "drawn there" in section.figures[0].caption
    np.testing.assert_allclose(drawn[0][1, 0], [0.100343, 69314.4], rtol=1e-4)


def test_selective_decays_are_means_over_test_images(study, drawn):
    model = lion(decay=SelectiveDecayConfig())
    torch.nn.init.normal_(model.blocks[0].mixer.decays[0].proj.weight)
    assert "its geometric mean over 32 test images" in of(study, model).lead
    images = learnt_decays._images(study)
    (block, *_) = learnt_decays.mean_decays(model, images)
    assert block.shape == (1, 2)
    assert not any(module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():  # by hand
        x, _ = model.patchify(images)
        x = torch.cat([model.class_token.expand(len(x), 1, -1), x], dim=1)
        logits = model.blocks[0].mixer.decays[0].proj(model.blocks[0].mixer_norm(x))
    wanted = torch.nn.functional.logsigmoid(logits[:, 1:]).mean(dim=(0, 1)).exp()
    torch.testing.assert_close(block[0], wanted)
    np.testing.assert_allclose(drawn[0][1, 0], np.log(0.5) / np.log(wanted.numpy()), rtol=1e-5)


def test_natural_scans_have_a_picture_each(study, drawn):
    model = lion(scan="natural")
    for block in model.blocks:
        for decay, value in zip(block.mixer.decays, (0.5, 0.25), strict=True):
            torch.nn.init.constant_(decay.logit, torch.tensor(value).logit())
    html = of(study, model).figures[0].html
    assert html.index("Along rows") < html.index("Along columns")
    rows, columns = drawn
    np.testing.assert_allclose(rows, 1, rtol=1e-5)
    np.testing.assert_allclose(columns, 0.5, rtol=1e-5)


@pytest.mark.parametrize("decay", [DIAGONAL, HippoDecayConfig()])
def test_channels_are_shown_by_their_spread(study, drawn, decay):
    model = lion(decay=decay)
    for parameter in model.blocks[0].mixer.decays.parameters():
        torch.nn.init.normal_(parameter)
    section = of(study, model)
    low, median, high = drawn[0]
    assert (low[0] < median[0]).all()
    assert (median[0] < high[0]).all()
    assert "middle 90% of a head's channels" in section.figures[0].caption


def test_models_without_learnt_decays_have_no_such_pictures(study):
    lightnet = dataclasses.replace(LION, mixer=LightNetMixerConfig(num_heads=2, gate_rank=4))
    for model, why in {
        lightnet.build(): "no image classifier of LION mixers",
        lion(decay=NoDecayConfig()): "decays are none, or constant",
        lion(
            decay=FixedDecayConfig(init="retnet", learnable=False)
        ): "decays are none, or constant",
    }.items():
        section = of(study, model)
        assert not section.figures
        assert why in section.lead


def test_the_page_has_the_section(study):
    html = render_page(study)
    assert_loads_nothing(html)
    assert f"<h2>{learnt_decays.TITLE}</h2>" in html
