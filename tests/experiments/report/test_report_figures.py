"""Figures of what models learned show the numbers of their layers."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from html_page import Page, charts
from matplotlib import figure
from projections import parts_of
from report_runs import HOSTILE, LDN, LIGHTNET, LION, PatternsConfig, model, run_config

from onescan.experiments.data import LabeledSequence, SequenceList, SequenceSplits
from onescan.experiments.data.text import TextDatasetConfig
from onescan.experiments.report import decays, diffusion, mixers
from onescan.experiments.report.plots import label_ends
from onescan.experiments.report.runs import read_run_group
from onescan.experiments.tasks import (
    LanguageModellingConfig,
    MaskedLanguageModellingConfig,
    SequenceClassificationConfig,
)
from onescan.experiments.training import train
from onescan.inputs.sequences import ByteFormat
from onescan.layers.decays import FixedDecayConfig, HippoDecayConfig, NoDecayConfig
from onescan.layers.decays import SelectiveDecayConfig as Selective
from onescan.layers.mixers import (
    HybridMixerConfig,
    LightNetMixerConfig,
    LionMixerConfig,
    SoftmaxMixerConfig,
)
from onescan.layers.position import ToeplitzPosition
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.masked_lm import MaskedLMConfig
from onescan.models.sequence_classifier import SequenceClassifierConfig
from onescan.shapes import Grid

NARROW = {"max_sigma": 1.5, "sigmas": (1.0,), "epsilon": 0.3}  # kernels that reach 3 places
TOKENS = 8  # patches of a run of `report_runs`


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(run_config(), folder)
    return read_run_group([folder])


def with_model(group, model, **changes):
    return dataclasses.replace(group, model=model.eval(), **changes)


# LightNet


def test_key_shares_are_the_softmax_of_keys(group):
    data = PatternsConfig().build()
    images = data.format.model_input(data.test.images[:5])
    shares = mixers.key_shares(group.model, images)
    assert [tuple(layer.shape) for layer in shares] == [(5, 2, 9)] * 2
    torch.testing.assert_close(torch.stack(shares).sum(-1), torch.ones(2, 5, 2))
    assert not any(module._forward_pre_hooks for module in group.model.modules())
    with torch.no_grad():  # the first block by hand
        x, shape = group.model.patchify(images)
        x = torch.cat([group.model.class_token.expand(5, 1, -1), x], dim=1)
        x, _ = group.model.position(x, Grid(shape, prefix=1))
        block = group.model.blocks[0]
        to_k = parts_of(block.mixer)[1]
        keys = to_k(block.mixer_norm(x)).unflatten(-1, (2, 8))  # B T H K
    wanted = keys.softmax(dim=1).mean(dim=-1).transpose(1, 2)
    torch.testing.assert_close(shares[0], wanted)


@pytest.mark.parametrize("pool", ["class_token", "mean"])
def test_tiles_show_all_shares_of_an_image_of_the_named_class(group, monkeypatch, pool):
    drawn, tiles = [], mixers.tiles
    monkeypatch.setattr(
        mixers, "tiles", lambda rows, *args, **kw: drawn.append(rows) or tiles(rows, *args, **kw)
    )
    group = with_model(group, model(pool=pool).build())
    section = mixers.key_importance(group)
    *panels, mean = drawn
    assert [[row.name for row in rows] for rows in panels] == [[*HOSTILE]] * 2
    assert [row.name for row in mean] == ["block 1", "block 2"]
    for row in [row for rows in drawn for row in rows]:
        total = row.maps.flatten(1).sum(dim=1) + (0 if row.numbers is None else row.numbers)
        torch.testing.assert_close(total / (TOKENS + group.model.prefix), torch.ones(2))
        if row.numbers is not None:
            figure = section.figures[row in mean]
            assert all(f">{number:.1f}</text>" in figure.body for number in row.numbers)
    data = PatternsConfig().build().test
    for row in panels[0]:
        pixels = (data.images[:, 0] * 255).round() / 255
        match = (pixels - row.image.mean(dim=-1)).abs().flatten(1).amax(dim=1) < 1e-5
        assert {HOSTILE[i] for i in data.labels[match]} == {row.name}


def test_figures_of_a_hybrid_count_the_blocks_with_their_mixer(group):
    for base, section in (
        (LIGHTNET, mixers.key_importance),
        (LIGHTNET, mixers.frequencies),
        (LION, decays.learned_decays),
    ):
        softmax = SoftmaxMixerConfig(num_heads=4)
        mixer = HybridMixerConfig(linear=base.mixer, attention=softmax, period=3, offset=1)
        config = dataclasses.replace(base, mixer=mixer, depth=3)
        result = section(with_model(group, config.build()))
        assert len(result.figures) >= 1
        assert result.lead.endswith("Blocks with other mixers are not counted.")
        whole = section(with_model(group, dataclasses.replace(base, depth=2).build()))
        assert "not counted" not in whole.lead
        assert len(result.figures) == len(whole.figures)
        assert result.figures[0].caption == whole.figures[0].caption


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("joint", [False, True])
def test_position_kernels_are_the_response_to_an_impulse(bidirectional, joint):
    shape = (5, 4)
    position = ToeplitzPosition(3, shape, 2, bidirectional, joint)
    down, right = mixers.axis_kernels(position, shape)
    impulse = torch.zeros(1, 5, 4, 3)
    impulse[0, 2, 1] = 1
    with torch.no_grad():
        y, _ = position(impulse.flatten(1, 2), Grid(shape))
    y = y.unflatten(1, shape)[0]
    zero, zero_right = (((len(axis[0]) - 1) // 2 if bidirectional else 0) for axis in (down, right))
    for row in range(5):
        lag = row - 2  # of the impulse, upwards
        wanted = down[:, zero + lag] if lag >= 0 or bidirectional else 0 * down[:, 0]
        wanted = wanted + (right[:, zero_right] if lag == 0 and not joint else 0)
        torch.testing.assert_close(y[row, 1], torch.as_tensor(wanted))


# LION


def lion(**changes):
    return dataclasses.replace(LION, mixer=dataclasses.replace(LION.mixer, **changes)).build()


@pytest.fixture
def quantiles(monkeypatch):
    """Half-lives of each chart of decays from now on: low, median, high; blocks; heads."""
    drawn, dots = [], decays.decay_dots
    monkeypatch.setattr(
        decays, "decay_dots", lambda each, *args: drawn.append(each) or dots(each, *args)
    )
    return drawn


def test_half_lives_are_those_of_the_decays(group, quantiles):
    model = lion()
    for block, values in zip(
        model.blocks, [[0.5, 0.9], [0.99, 0.1], [0.999, 0.5**0.5]], strict=True
    ):
        block.mixer.decays[0].logit.data = torch.tensor(values).logit()
    (figure,) = decays.learned_decays(with_model(group, model)).figures
    wanted = np.array([[1, 6.5788], [68.9676, 0.30103], [692.8, 2]])
    np.testing.assert_allclose(quantiles[0], [wanted] * 3, rtol=1e-4)
    assert all(f">{number}<" in figure.body for number in ("0.5", "0.9", "0.99", "0.999"))
    assert "edge" not in figure.caption
    model.blocks[0].mixer.decays[0].logit.data = torch.tensor([0.0, 1.0]).logit()
    (figure,) = decays.learned_decays(with_model(group, model)).figures
    assert "edge" in figure.caption
    np.testing.assert_allclose(quantiles[1][1, 0], [0.100343, 69314.4], rtol=1e-4)


def test_decays_of_tokens_are_means_over_images(group, quantiles):
    model = lion(decay=Selective()).eval()
    torch.nn.init.normal_(model.blocks[0].mixer.decays[0].proj.weight)
    decays.learned_decays(with_model(group, model))
    data = PatternsConfig().build()
    rows = torch.linspace(0, 39, decays.DECAY_EXAMPLES).round().int()
    with torch.no_grad():  # by hand
        x, shape = model.patchify(data.format.model_input(data.test.images[rows]))
        x = torch.cat([model.class_token.expand(len(x), 1, -1), x], dim=1)
        x, _ = model.position(x, Grid(shape, prefix=1))
        logits = model.blocks[0].mixer.decays[0].proj(model.blocks[0].mixer_norm(x))
    wanted = torch.nn.functional.logsigmoid(logits[:, 1:]).mean(dim=(0, 1)).exp().numpy()
    np.testing.assert_allclose(quantiles[0][1, 0], np.log(0.5) / np.log(wanted), rtol=1e-4)
    assert not any(module._forward_pre_hooks for module in model.modules())


def text_task(tmp_path, config):
    """Texts of 3 to 8 bytes, packed in rows of 8, so that most rows hold parts of two."""
    lines = [json.dumps({"text": "a cat sat"[: 3 + i % 6]}) for i in range(600)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    data = TextDatasetConfig(path=str(tmp_path / "text.jsonl"), length=8, cache=False)
    return config.build(data.build())


def text_model(config, **mixer):
    mixer = LionMixerConfig(num_heads=2, **{"decay": Selective(), **mixer})
    model = config(vocab_size=258, width=8, depth=2, mixer=mixer, position=None).build().eval()
    for block in model.network.blocks:
        torch.nn.init.normal_(block.mixer.decays[0].proj.weight)
    return model


def half_lives_of(logits):
    kept = torch.nn.functional.logsigmoid(logits).mean(dim=0).exp()
    return np.log(0.5) / np.log(kept.double().numpy())


@pytest.mark.parametrize("is_causal", [True, False])
def test_decays_of_language_models_are_means_over_tokens(group, quantiles, tmp_path, is_causal):
    if is_causal:
        task, config = LanguageModellingConfig(), CausalLMConfig
        model = text_model(config, direction="forward")
    else:
        task, config = MaskedLanguageModellingConfig(evaluation_batch_size=4), MaskedLMConfig
        model = text_model(config)
    task = text_task(tmp_path, task)
    section = decays.learned_decays(with_model(group, model, task=task))
    count = min(decays.DECAY_EXAMPLES, task.test_batch_size)
    rows = torch.linspace(0, len(task.test) - 1, count).round().int().tolist()
    examples = [example for example, _ in task.test.examples(seed=None)]
    batch = task.test.read([examples[row] for row in rows]).batch
    tokens, documents, *_ = batch if is_causal else task.masked_for_evaluation(batch)
    tokens = tokens[:, :-1] if is_causal else tokens
    first, second = model.network.blocks
    logits = []
    with torch.no_grad():  # text by text
        for row, numbers in zip(tokens, documents[:, : tokens.shape[1]], strict=True):
            for number in numbers.unique():
                x = model.network.embedding(row[numbers == number])[None]
                x, _ = first(x, Grid(x.shape[1:2]))
                logits.append(second.mixer.decays[0].proj(second.mixer_norm(x))[0])
    wanted = half_lives_of(torch.cat(logits))
    np.testing.assert_allclose(quantiles[0][1, 1], wanted, rtol=1e-4)
    assert f"geometric mean over {count} held-out rows" in section.lead
    assert "patches" not in section.lead + section.figures[0].caption
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_padding_has_no_part_in_mean_decays(group, quantiles):
    lengths = (1, 7, 3)
    sequences = [LabeledSequence(np.arange(1, n + 1, dtype=np.uint8), 0) for n in lengths]
    data, names = SequenceList(sequences=sequences), ("a", "b")
    format = ByteFormat(max_length=9)
    splits = SequenceSplits(train=data, test=data, class_names=names, format=format)
    model, task = text_model(SequenceClassifierConfig), SequenceClassificationConfig().build(splits)
    decays.learned_decays(with_model(group, model, task=task))
    block, embedding = model.network.blocks[0], model.network.embedding
    with torch.no_grad():
        x = torch.cat([embedding(torch.arange(1, n + 1)) for n in lengths])
        logits = block.mixer.decays[0].proj(block.mixer_norm(x[None]))[0]
    np.testing.assert_allclose(quantiles[0][1, 0], half_lives_of(logits), rtol=1e-4)


def test_each_scan_has_a_chart(group, quantiles):
    model = lion(scan="natural")
    for block in model.blocks:
        for decay, value in zip(block.mixer.decays, (0.5, 0.25), strict=True):
            torch.nn.init.constant_(decay.logit, torch.tensor(value).logit())
    body = decays.learned_decays(with_model(group, model)).figures[0].body
    assert body.index("Along rows") < body.index("Along columns")
    for drawn, wanted in zip(quantiles, (1, 0.5), strict=True):
        np.testing.assert_allclose(drawn, wanted, rtol=1e-5)


@pytest.mark.parametrize("decay", [Selective(diagonal=True), HippoDecayConfig()])
def test_decays_of_channels_are_drawn_as_ranges(group, quantiles, decay):
    model = lion(decay=decay)
    for parameter in model.blocks[0].mixer.decays.parameters():
        torch.nn.init.normal_(parameter)
    (figure,) = decays.learned_decays(with_model(group, model)).figures
    low, median, high = quantiles[0][:, 0]
    assert (low < median).all()
    assert (median < high).all()
    assert "90% of a head's channels" in figure.caption


# LDN


def ldn(*, image_size=(4, 8), patch_size=(1, 2), depth=3, pool="mean", **changes):
    """A model of 4 x 4 patches whose kernels are not the initial ones."""
    config = dataclasses.replace(
        LDN,
        mixer=dataclasses.replace(LDN.mixer, **changes),
        image_size=image_size,
        patch_size=patch_size,
        depth=depth,
        pool=pool,
    )
    model, generator = config.build().eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for each in (each for block in model.blocks for each in block.mixer.diffusions):
            for parameter in each.parameters():
                parameter += torch.randn(parameter.shape, generator=generator)
    return model


def products(model, tokens, axis=0):
    """A_1, A_2 A_1, ... of each kernel, from I + dt (K - diag(K 1)): blocks H T T."""
    results = []
    for block in model.blocks:
        layer = block.mixer.diffusions[axis]
        with torch.no_grad():
            weights, steps = layer.weights().double(), layer.dt(layer.weights()).double()
        lags = np.subtract.outer(np.arange(tokens), np.arange(tokens))
        near = (abs(lags) <= layer.radius) & (lags != 0)
        matrices = []
        for row, step in zip(weights.numpy(), steps.numpy(), strict=True):
            kernel = np.where(near, row[np.where(near, layer.radius + lags, 0)], 0)
            matrices.append(np.eye(tokens) + step * (kernel - np.diag(kernel.sum(axis=1))))
        results.append(np.stack(matrices) @ results[-1] if results else np.stack(matrices))
    return np.stack(results)


@pytest.mark.parametrize("kernels", [1, 4])
@pytest.mark.parametrize("pool", ["mean", "class_token"])
def test_influence_is_a_row_of_the_product_of_the_blocks_matrices(kernels, pool):
    model = ldn(kernels=kernels, pool=pool)
    (line,) = diffusion.diffusion_lines(model)
    assert line.tokens == 16 + model.prefix
    wanted = products(model, line.tokens)
    for token in (0, 5):
        np.testing.assert_allclose(
            diffusion.influence(line, token), wanted[:, :, token], atol=1e-12
        )
    assert not np.allclose(wanted[-1, :, 5], wanted[-1, :, :, 5], atol=1e-3)  # order matters


@pytest.mark.parametrize("scheme", ["explicit", "crank_nicolson"])
@pytest.mark.parametrize("separable", [False, True])
def test_influence_is_what_purely_diffusing_blocks_do(scheme, separable):
    only = {"local_update": False, "linear_attention": False}
    model = ldn(kernels=2, scheme=scheme, separable=separable, **only)
    x = h = torch.randn(1, 16, 16)
    lines = diffusion.diffusion_lines(model)
    shares = [diffusion.influence(line, line.middle) for line in lines]
    middle = np.ravel_multi_index([line.middle for line in lines], [n.tokens for n in lines])
    for n, block in enumerate(model.blocks):
        with torch.no_grad():
            h, _ = block(h, Grid((4, 4)))
        for kernel, channels in enumerate((slice(8), slice(8, 16))):
            rows = [torch.tensor(each[n, kernel]).float() for each in shares]
            row = torch.outer(*rows).flatten() if separable else rows[0]
            torch.testing.assert_close(row @ x[0, :, channels], h[0, middle, channels])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernels", [1, 2])
@pytest.mark.parametrize("depth", [2, 6])
@pytest.mark.parametrize("changes", [NARROW, {"max_sigma": 1.2, "sigmas": (0.3, 1.0)}, {}])
def test_blocks_to_cover_all_tokens(depth, kernels, causal, changes):
    model = ldn(depth=depth, kernels=kernels, direction="forward" if causal else "both", **changes)
    visible = np.tri(16, dtype=bool) if causal else np.ones((16, 16), dtype=bool)
    enough = [bool(each[:, visible].all()) for each in products(model, 16) > 0]
    wanted = enough.index(True) + 1 if any(enough) else None
    assert diffusion.blocks_to_cover(diffusion.diffusion_lines(model)) == wanted


def test_separable_diffusion_covers_all_tokens_when_each_axis_does():
    model = ldn(image_size=(8, 5), patch_size=(1, 1), depth=4, separable=True, **NARROW)
    lines = diffusion.diffusion_lines(model)
    reached = [
        (products(model, line.tokens, axis)[:, 0] > 0).all((1, 2))
        for axis, line in enumerate(lines)
    ]
    assert np.logical_and(*reached).tolist() == [False, False, True, True]
    assert diffusion.blocks_to_cover(lines) == 3


def test_implicit_steps_reach_all_tokens():
    lines = diffusion.diffusion_lines(ldn(**NARROW, scheme="crank_nicolson"))
    assert (diffusion.influence(lines[0], 0)[0] != 0).all()
    assert diffusion.blocks_to_cover(lines) == 1


@pytest.mark.slow
def test_the_lead_says_how_far_diffusion_reaches(group):
    def lead(**changes):
        return diffusion.section(with_model(group, ldn(**changes))).lead

    assert "reaches every other token within 5 blocks of 6" in lead(**NARROW, depth=6)
    short = lead(**NARROW, linear_attention=False)
    assert "does not reach every other token within 3 blocks: it reaches 9 tokens" in short
    assert "attention" not in short
    assert "every token before it" in lead(**NARROW, direction="forward")
    axes = lead(**NARROW, separable=True, depth=1, image_size=(9, 4), patch_size=(1, 1))
    assert "it reaches 3 patches along columns in all channels" in axes
    dropped = dataclasses.replace(LDN, drop_path=0.25).build()
    assert "25.0% less" in diffusion.section(with_model(group, dropped)).lead


def test_descriptions_of_diffusion_charts_hold_the_numbers(group):
    model = ldn()
    for i, block in enumerate(model.blocks):
        torch.nn.init.constant_(block.mixer.diffusions[0].raw_sigma, 0.0)
        torch.nn.init.constant_(block.mixer.diffusions[0].raw_step, math.log(i + 1))
    figures = diffusion.section(with_model(group, model)).figures
    kernels, widths, steps, distances, maps = (charts(Page(figure.body)) for figure in figures)
    assert len(kernels) == 3
    assert "learned from 2.83 to 2.83, before training 1 to 4" in widths[0]  # sqrt(0.25 * 32)
    assert "learned from 0.5 to 0.749, before training 0.5 to 0.5" in steps[0]
    shares = products(model, 16)[-1, 0, 8]
    spread = math.sqrt(sum(share * (s - 8) ** 2 for s, share in enumerate(shares)))
    assert f"after block 3 from {spread:.3g} to {spread:.3g} tokens" in distances[0]
    assert f"smallest share is {shares.min():.2%}, compared with 6.25%" in figures[-1].caption
    assert "influence of 16 tokens" in maps[0]


def test_learned_kernels_have_no_width(group):
    free = diffusion.section(with_model(group, ldn(kernel="free", kernels=2)))
    titles = [figure.title for figure in free.figures]
    assert "Kernels by block" in titles
    assert "Kernel width" not in titles
    dense = diffusion.section(with_model(group, ldn(kernel="dense")))
    assert not dense.figures
    assert "dense kernels do not depend on a distance" in dense.lead


def test_influence_maps_show_where_nothing_arrives():
    (line,) = diffusion.diffusion_lines(model := ldn(**NARROW, depth=1))
    wanted = products(model, 16)[:, :, 8] > 0
    assert not wanted.all()
    np.testing.assert_array_equal(diffusion._reached(line), wanted)
    colors = diffusion._influence_colors(np.array([[0.001, 0.01, 1.0, 100.0, 1e4]]))
    np.testing.assert_allclose(colors[0, :, 3], [0, 0, 1, 1, 1])
    np.testing.assert_allclose(colors[0, 2, :3], diffusion.COOL)
    np.testing.assert_allclose(colors[0, 3:, :3], [diffusion.WARM] * 2)


@pytest.mark.slow
def test_many_kernels_and_axes(group):
    figures = diffusion.section(with_model(group, ldn(kernels=8))).figures
    assert "median of 8 kernels" in figures[0].caption
    assert len(charts(Page(figures[-1].body))) == 3
    figures = diffusion.section(with_model(group, ldn(separable=True, kernels=2))).figures
    assert [len(charts(Page(figure.body))) for figure in figures] == [6, 2, 2, 2, 4]


@pytest.mark.parametrize(
    ("section", "config"),
    [
        (mixers.key_importance, LION),
        (mixers.key_importance, model(mixer=LightNetMixerConfig(num_heads=2, decay=False))),
        (mixers.position_kernels, model(position=None)),
        (mixers.frequencies, model(mixer=LightNetMixerConfig(num_heads=2, lrpe=False))),
        (decays.learned_decays, LIGHTNET),
        (decays.learned_decays, lion(decay=NoDecayConfig()).config),
        (
            decays.learned_decays,
            lion(decay=FixedDecayConfig(init="retnet", learnable=False)).config,
        ),
        (diffusion.section, LIGHTNET),
        (diffusion.section, ldn(diffusion=False).config),
    ],
)
def test_sections_that_do_not_apply_say_why(group, section, config):
    result = section(with_model(group, config.build()))
    assert not result.figures
    assert result.lead.startswith("Not shown: ")


def test_names_of_lines_that_end_at_the_same_place_are_moved_apart():
    axes = figure.Figure().subplots()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    label_ends(axes, [(x, 0.5, "name", "black") for x in (0.4, 0.45, 0.5)], gap=0.1)
    assert [text.xy[1] for text in axes.texts] == pytest.approx([0.5, 0.6, 0.7])
