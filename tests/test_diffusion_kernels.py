"""The report shows the kernels that an LDN learnt and how far they reach, and of no other model."""

import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from html_page import Page, assert_loads_nothing
from matplotlib.figure import Figure
from tiny_run import tiny_run

from onescan.layers.mixers import LightNetMixerConfig, LinearDiffusionMixerConfig
from onescan.layers.position import AbsolutePositionConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.report.chart import chart
from onescan.report.diffusion import dots, kernels, reached
from onescan.report.diffusion.lines import blocks_to_hear_all, diffusing_lines, influence
from onescan.report.page import render_page
from onescan.report.runs import read_run_group
from onescan.report.sections import diffusion_kernels
from onescan.shapes import Grid
from onescan.tasks import ImageClassificationConfig
from onescan.training import train

LDN = ImageClassifierConfig(
    image_size=(4, 3),
    channels=1,
    patch_size=(1, 1),
    num_classes=3,
    width=16,
    depth=3,
    mixer=LinearDiffusionMixerConfig(num_heads=2),
    mlp=None,
    position=AbsolutePositionConfig(),
    pool="mean",
    drop_path=0.0,
)
NARROW = {"max_sigma": 1.5, "sigmas": (1.0,), "epsilon": 0.3}  # kernels that reach 3 places


def ldn(*, pool="mean", depth=3, image_size=(4, 3), seed=0, **changes):
    """A model whose kernels are as if something had been learnt."""
    mixer = dataclasses.replace(LDN.mixer, **changes)
    config = dataclasses.replace(LDN, mixer=mixer, pool=pool, depth=depth, image_size=image_size)
    model = config.build().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for diffusion in (each for block in model.blocks for each in block.mixer.diffusions):
            for parameter in diffusion.parameters():
                parameter += torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ldn")
    run = dataclasses.replace(
        tiny_run(epochs=1),
        model=dataclasses.replace(LDN, image_size=(4, 4)),
        task=ImageClassificationConfig(augment=None),
    )
    train(run, folder)
    return read_run_group([folder])


def of(study, model):
    return diffusion_kernels.section(dataclasses.replace(study, model=model))


@pytest.fixture
def drawn(monkeypatch):
    """Each picture from now on."""
    figures = []

    def watched(draw, **words):
        figures.append(Figure())
        draw(figures[-1])
        return chart(draw, **words)

    for module in (kernels, dots, reached):
        monkeypatch.setattr(module, "chart", watched)
    return figures


def matrices(diffusion, tokens):
    """I + dt (K - diag(K 1)) of each kernel, number by number."""
    with torch.no_grad():
        weights = diffusion.weights().double().numpy()
        steps = diffusion.dt(diffusion.weights()).double().numpy()
    made = []
    for row, step in zip(weights, steps, strict=True):
        kernel = np.zeros((tokens, tokens))
        for t in range(tokens):
            for s in range(tokens):
                if s != t and abs(t - s) <= diffusion.radius:
                    kernel[t, s] = row[diffusion.radius + t - s]
        made.append(np.eye(tokens) + step * (kernel - np.diag(kernel.sum(axis=1))))
    return made


def products(diffusions, tokens):
    """A_1, A_2 A_1, ... of each kernel: blocks H T T."""
    made = [matrices(diffusion, tokens) for diffusion in diffusions]
    return np.array(
        [
            [np.linalg.multi_dot([*(each[h] for each in made[n::-1]), np.eye(tokens)])
             for h in range(len(made[0]))]
            for n in range(len(made))
        ]
    )  # fmt: skip


def spread(shares):
    """Root mean square distance of the middle token's shares, [T]."""
    middle = len(shares) // 2
    return math.sqrt(sum(share * (s - middle) ** 2 for s, share in enumerate(shares)))


@pytest.mark.parametrize("kernels", [1, 4])
@pytest.mark.parametrize("pool", ["mean", "class_token"])
def test_influence_is_a_row_of_the_product_of_the_blocks_matrices(kernels, pool):
    (line,) = diffusing_lines(model := ldn(kernels=kernels, pool=pool))
    tokens = 12 + model.prefix
    assert line.tokens == tokens
    wanted = products([block.mixer.diffusions[0] for block in model.blocks], tokens)
    for token in (0, 5):
        shares = influence(line, token)
        np.testing.assert_allclose(shares, wanted[:, :, token], atol=1e-12)
    assert not np.allclose(shares[-1], wanted[-1, :, :, 5], atol=1e-3)  # the order of blocks tells


def test_a_model_that_drops_paths_is_said_to_do_less(study):
    model = dataclasses.replace(LDN, drop_path=0.25).build().eval()
    lead = diffusion_kernels.section(dataclasses.replace(study, model=model)).lead
    assert "when they are judged: by 25.0% less in the last" in lead
    plain = diffusion_kernels.section(dataclasses.replace(study, model=LDN.build().eval())).lead
    assert "judged" not in plain


@pytest.mark.parametrize("scheme", ["explicit", "crank_nicolson"])
@pytest.mark.parametrize("separable", [False, True])
def test_influence_is_what_the_blocks_do_when_they_only_diffuse(scheme, separable):
    model = ldn(
        kernels=2, scheme=scheme, separable=separable, local_update=False, linear_attention=False
    )
    x = h = torch.randn(1, 12, 16)
    lines = diffusing_lines(model)
    shares = [influence(line, line.tokens // 2) for line in lines]
    middle = np.ravel_multi_index([line.tokens // 2 for line in lines], [n.tokens for n in lines])
    for n, block in enumerate(model.blocks):
        with torch.no_grad():
            h, _ = block(h, Grid((4, 3)))
        for kernel, channels in enumerate((slice(8), slice(8, 16))):
            rows = [torch.tensor(each[n, kernel]).float() for each in shares]
            row = torch.outer(*rows).flatten() if separable else rows[0]
            torch.testing.assert_close(row @ x[0, :, channels], h[0, middle, channels])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernels", [1, 2])
@pytest.mark.parametrize("depth", [2, 4, 6])
@pytest.mark.parametrize("changes", [NARROW, {"max_sigma": 1.2, "sigmas": (0.3, 1.0)}, {}])
def test_blocks_to_hear_all_are_those_after_which_no_product_has_a_zero(
    depth, kernels, causal, changes
):
    model = ldn(depth=depth, kernels=kernels, causal=causal, **changes)
    lines = diffusing_lines(model)
    heard = products([block.mixer.diffusions[0] for block in model.blocks], 12) > 0
    asked = np.tri(12, dtype=bool) if causal else np.ones((12, 12), dtype=bool)
    enough = [bool(each[:, asked].all()) for each in heard]
    wanted = enough.index(True) + 1 if any(enough) else None
    assert blocks_to_hear_all(lines) == wanted


def test_along_axes_all_are_heard_when_the_last_axis_is_through():
    model = ldn(image_size=(8, 5), depth=4, separable=True, **NARROW)
    lines = diffusing_lines(model)
    reached = [
        products([block.mixer.diffusions[axis] for block in model.blocks], tokens)[:, 0] > 0
        for axis, tokens in enumerate((8, 5))
    ]
    whole = [np.kron(*each).all() for each in zip(*reached, strict=True)]
    assert whole == [False, False, True, True]
    assert blocks_to_hear_all(lines) == 3


def test_the_lead_tells_after_how_many_blocks_all_have_heard(study):
    lead = of(study, ldn(**NARROW, depth=5)).lead
    assert "heard of every other token, however little, after 4 of 5 blocks." in lead
    assert "Linear attention hears of all tokens in every block anyway." in lead
    assert "3 tokens back lies the patch right above" in lead
    lead = of(study, ldn(**NARROW, linear_attention=False)).lead
    assert "not let each token hear of every other token within 3 blocks: " in lead
    assert "not all tokens more than 9 apart do." in lead
    assert "attention" not in lead
    lead = of(study, ldn(**NARROW, causal=True)).lead
    assert "hear of every token before it within 3 blocks" in lead
    assert "hears of all tokens before it" in lead
    lead = of(study, ldn(**NARROW, separable=True, depth=1, image_size=(9, 4))).lead
    assert "every other patch within 1 block: along columns not all patches more than 3 " in lead
    assert "along rows not all" not in lead
    assert "in the first block" in of(study, ldn()).lead


def test_an_implicit_step_hears_of_all():
    lines = diffusing_lines(ldn(**NARROW, scheme="crank_nicolson"))
    assert (influence(lines[0], 0)[0] != 0).all()
    assert blocks_to_hear_all(lines) == 1


def test_kernels_are_drawn_as_they_are_and_as_they_were(study, drawn):
    model = ldn(kernels=2, sigmas=(1.0, 2.0))
    of(study, model)
    panels = drawn[0].axes
    assert [axes.get_title() for axes in panels] == ["block 1", "block 2", "block 3"]
    for i, (axes, block) in enumerate(zip(panels, model.blocks, strict=True)):
        initial, learnt = axes.lines[:2], axes.lines[2:]
        for h, line in enumerate(learnt):
            lags = line.get_xdata()
            row = matrices(block.mixer.diffusions[0], 301)[h][150]  # far from both ends
            wanted = np.where(lags == 0, np.nan, row[150 - lags])
            np.testing.assert_allclose(line.get_ydata(), wanted, rtol=1e-5, atol=1e-12)
        for h, line in enumerate(initial):
            lags = line.get_xdata()
            gaussian = np.exp(-(lags**2) / 2 / (1.0, 2.0)[(h + i) % 2] ** 2)
            whole = np.exp(-(np.arange(1, 99) ** 2) / 2 / (1.0, 2.0)[(h + i) % 2] ** 2)
            wanted = np.where(lags == 0, np.nan, 0.4995 * gaussian / (2 * whole.sum()))
            np.testing.assert_allclose(line.get_ydata(), wanted, rtol=1e-4, atol=1e-12)
    assert len({axes.get_ylim() for axes in panels}) == len({axes.get_xlim() for axes in panels})


def test_widths_and_steps_are_those_of_the_kernels(study, drawn):
    model = ldn()
    for i, block in enumerate(model.blocks):
        diffusion = block.mixer.diffusions[0]
        torch.nn.init.constant_(diffusion.raw_sigma, 0.0)
        torch.nn.init.constant_(diffusion.raw_step, math.log(i + 1))
    of(study, model)
    (widths,), (steps,) = (figure.axes for figure in drawn[1:3])
    before, now = (line.get_ydata() for line in widths.lines)
    np.testing.assert_allclose(before, [1, 2, 4], rtol=1e-5)
    np.testing.assert_allclose(now, np.sqrt([0.25 * 32] * 3), rtol=1e-5)
    before, now = (line.get_ydata() for line in steps.lines)
    np.testing.assert_allclose(before, [0.4995] * 3, rtol=1e-5)
    np.testing.assert_allclose(now, 0.999 * np.array([1 / 2, 2 / 3, 3 / 4]), rtol=1e-5)


def test_distances_are_of_what_the_middle_token_consists_of(study, drawn):
    model = ldn(kernels=2)
    alts = [dict(tag)["alt"] for _, tag in Page(of(study, model).figures[3].html).tags[2:]]
    (axes,) = drawn[3].axes
    even, *initial, first, second = (line.get_ydata() for line in axes.lines)
    assert even[0] == pytest.approx(spread([1 / 12] * 12))
    wanted = products([block.mixer.diffusions[0] for block in model.blocks], 12)[:, :, 6]
    for h, line in enumerate((first, second)):
        assert line[0] == 0
        np.testing.assert_allclose(line[1:], [spread(each) for each in wanted[:, h]], rtol=1e-6)
    fresh = dataclasses.replace(LDN, mixer=model.config.mixer).build()
    was = products([block.mixer.diffusions[0] for block in fresh.blocks], 12)[:, :, 6]
    for h, line in enumerate(initial):
        np.testing.assert_allclose(line[1:], [spread(each) for each in was[:, h]], rtol=1e-6)
    least, most = sorted((first[-1], second[-1]))
    assert f"after block 3 it is {least:.3g} to {most:.3g} tokens" in alts[0]


@pytest.mark.parametrize("pool", ["mean", "class_token"])
def test_the_map_shows_each_share_and_where_nothing_was_heard(study, drawn, pool):
    model = ldn(**NARROW, pool=pool)
    caption = of(study, model).figures[-1].caption
    tokens = 12 + model.prefix
    middle = tokens // 2
    shares = products([block.mixer.diffusions[0] for block in model.blocks], tokens)[:, 0, middle]
    picture = drawn[-1].axes[0].images[0]
    left, right, *_ = picture.get_extent()
    lags = np.arange(left + 0.5, right)
    assert lags[0] == middle - tokens + 1
    assert lags[-1] == middle
    shown, wanted = picture.get_array(), shares[:, middle - lags.astype(int)]
    np.testing.assert_array_equal(shown.mask, wanted == 0)
    assert shown.mask.any()
    relative = np.clip(wanted * tokens, 0.01, 100)
    np.testing.assert_allclose(shown.compressed(), relative[wanted > 0], rtol=1e-6)
    faintest = shares[-1][shares[-1] > 0].min()
    assert f"faintest share is {faintest:.2%}, where {1 / tokens:.2%} would be even" in caption


def test_the_faintest_share_is_of_those_heard(study):
    model = ldn(**NARROW, depth=1)
    (row,) = matrices(model.blocks[0].mixer.diffusions[0], 12)[0][6:7]
    assert (row == 0).any()
    assert (
        f"the faintest share is {row[row > 0].min():.2%}," in of(study, model).figures[-1].caption
    )


def test_axes_have_pictures_each(study, drawn):
    model = ldn(separable=True, image_size=(6, 4), kernels=2)
    figures = of(study, model).figures
    for figure in figures:
        assert re.findall("<h4>(.*?)</h4>", figure.html) == ["Along columns", "Along rows"]
    assert figures[-1].title == "What the middle patch has heard of"
    for axis, (figure, tokens) in enumerate(zip(drawn[-2:], (6, 4), strict=True)):
        wanted = products([block.mixer.diffusions[axis] for block in model.blocks], tokens)
        for h in range(2):
            shown = figure.axes[h].images[0].get_array()[:, ::-1]
            relative = np.clip(wanted[:, h, tokens // 2] * tokens, 0.01, 100)
            np.testing.assert_allclose(shown, relative, rtol=1e-6)


def test_many_kernels_are_shown_by_their_range(study, drawn):
    model = ldn(kernels=8)
    figures = of(study, model).figures
    assert "median of 8 kernels" in figures[0].caption
    assert "Of 8 kernels those are shown that reach least" in figures[-1].caption
    wanted = products([block.mixer.diffusions[0] for block in model.blocks], 12)[:, :, 6]
    distances = np.array([[spread(each) for each in block] for block in wanted])
    *_, median = drawn[3].axes[0].lines
    np.testing.assert_allclose(median.get_ydata()[1:], np.median(distances, axis=1), rtol=1e-6)
    (band,) = drawn[3].axes[0].collections
    high = band.get_paths()[0].vertices[:, 1].max()
    assert high == pytest.approx(distances.max())
    order = np.argsort(distances[-1])
    titles = [axes.get_title() for axes in drawn[-1].axes[:3]]
    assert titles == [f"kernel {order[i] + 1}" for i in (0, 4, 7)]


def test_a_deep_model_has_a_panel_for_each_block(study, drawn):
    of(study, ldn(depth=11))
    shown = [axes.get_title() for axes in drawn[0].axes if axes.get_visible()]
    assert shown == [f"block {i}" for i in range(1, 12)]


def test_models_without_diffusion_have_no_such_pictures(study):
    lightnet = dataclasses.replace(LDN, mixer=LightNetMixerConfig(num_heads=2, gate_rank=4))
    for model, why in {
        lightnet.build(): "Not shown: this is no image classifier of LDN mixers.",
        ldn(diffusion=False): "Not shown: this model was built without diffusion.",
    }.items():
        section = of(study, model)
        assert not section.figures
        assert section.lead == why


def test_the_page_has_the_section(study):
    html = render_page(study)
    assert_loads_nothing(html)
    assert f"<h2>{diffusion_kernels.TITLE}</h2>" in html
