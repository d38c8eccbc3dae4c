"""Sampling with diffusers' schedulers, against exact predictions and equations."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from onescan.integrations.diffusers.sampling import (
    SCHEDULERS,
    build_scheduler,
    check_scheduler,
    prepare_scheduler,
    sample,
)
from onescan.layers.mixers import LightNetMixerConfig
from onescan.models.denoiser import DenoiserConfig, NoiseConfig, SamplerConfig

SMALL = DenoiserConfig(
    image_size=(4, 4),
    channels=1,
    num_classes=3,
    width=12,
    depth=1,
    mixer=LightNetMixerConfig(num_heads=2),
)
WITH_BETAS = [
    (prediction, betas, sampler)
    for prediction in ("noise", "v")
    for betas in ("linear", "cosine")
    for sampler in ("ddpm", "ddim", "dpm")
]
ALL = [*WITH_BETAS, ("flow", "linear", "euler")]
over_all = pytest.mark.parametrize(
    ("prediction", "betas", "sampler"), ALL, ids=["-".join(case) for case in ALL]
)


def scheduler(prediction="noise", betas="linear", sampler=None, *, clip=None, learn_sigma=False):
    return build_scheduler(
        NoiseConfig(prediction=prediction, betas=betas),
        SamplerConfig(sampler=sampler),
        clip=clip,
        learn_sigma=learn_sigma,
    )


def alphas_squared(betas):
    """Cumulative products of 1 - beta, as the papers print them, in float64."""
    if betas == "linear":
        return np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
    f = np.cos((np.arange(1001) / 1000 + 0.008) / 1.008 * np.pi / 2) ** 2
    return np.cumprod(1 - np.minimum(1 - f[1:] / f[:-1], 0.999))


def coefficients(prediction, betas, t):
    """Return the coefficients of the image and of the noise at a timestep."""
    if prediction == "flow":
        return 1 - t / 1000, t / 1000
    kept = float(alphas_squared(betas)[int(t)])
    return kept**0.5, (1 - kept) ** 0.5


class Oracle:
    """Predicts the exact target for images that are normally distributed around a known one."""

    def __init__(self, prediction, betas, image, std=0.0, variance=None):
        channels = image.shape[0]
        self.config = replace(SMALL, channels=channels, learn_sigma=variance is not None)
        self.prediction, self.betas, self.variance = prediction, betas, variance
        self.image, self.std, self.calls = image.double(), std, 0

    def __call__(self, noisy, timesteps, labels):
        self.calls += 1
        a, s = coefficients(self.prediction, self.betas, timesteps[0].item())
        x, c2 = noisy.double(), self.std**2
        image = self.image + a * c2 / (a * a * c2 + s * s) * (x - a * self.image)
        noise = (x - a * image) / s
        targets = {"noise": noise, "v": a * noise - s * image, "flow": noise - image}
        target = targets[self.prediction].to(noisy.dtype)
        if self.variance is None:
            return target
        return torch.cat([target, torch.full_like(target, self.variance)], dim=1)


@pytest.mark.parametrize("betas", ["linear", "cosine"])
@pytest.mark.parametrize("sampler", ["ddpm", "ddim", "dpm"])
def test_alphas_are_those_of_the_papers(betas, sampler):
    built = scheduler("noise", betas, sampler)
    expected = torch.from_numpy(alphas_squared(betas))
    assert_close(built.alphas_cumprod.double(), expected, rtol=2e-3, atol=1e-6)
    a, s = expected.sqrt(), (1 - expected).sqrt()
    x, noise, t = torch.ones(3, 1, 2, 2), torch.randn(3, 1, 2, 2), torch.tensor([0, 500, 999])
    built = scheduler("noise", betas, "ddpm")
    mixed = a[t, None, None, None] * x + s[t, None, None, None] * noise
    assert_close(built.add_noise(x, noise, t), mixed.float(), rtol=1e-4, atol=1e-4)


@over_all
@pytest.mark.parametrize("steps", [1, 5, 50])
def test_timesteps_begin_at_noise_and_end_at_the_image(prediction, betas, sampler, steps):
    prepared = prepare_scheduler(scheduler(prediction, betas, sampler), steps)
    times = prepared.timesteps.double()
    assert len(times) == steps
    first = 1000 if prediction == "flow" else 999
    assert first - 10 <= times[0] <= first
    a, s = coefficients(prediction, betas, times[0].item())
    assert a < 0.01 < 0.99 < s
    strides = -times.diff(append=torch.tensor([0.0 if first == 1000 else -1.0]))
    assert strides.min() >= strides.max() - 6
    if prediction == "flow":
        assert_close(prepared.sigmas, torch.linspace(1, 0, steps + 1))


@pytest.mark.parametrize("steps", [61, 103, 397, 999])
@pytest.mark.parametrize("sampler", ["ddpm", "dpm"])
def test_timesteps_are_not_negative(sampler, steps):
    prepared = prepare_scheduler(scheduler(sampler=sampler), steps)
    assert len(prepared.timesteps) == steps
    assert prepared.timesteps.min() >= 0
    assert len(set(prepared.timesteps.tolist())) == steps
    if sampler == "dpm":
        assert len(prepared.sigmas) == steps + 1


@over_all
@pytest.mark.parametrize("variance", [None, 1.0], ids=["fixed", "learned"])
def test_an_exact_prediction_gives_the_image(prediction, betas, sampler, variance):
    image = torch.linspace(-0.9, 0.9, 64).reshape(4, 4, 4)
    oracle = Oracle(prediction, betas, image, variance=variance)
    built = scheduler(prediction, betas, sampler, learn_sigma=variance is not None)
    for steps in (1, 20):
        found = sample(oracle, built, size=(4, 4), seeds=[3, 4], steps=steps)
        assert_close(found, image.expand(2, -1, -1, -1), rtol=0, atol=5e-3)


@pytest.mark.parametrize("sampler", ["ddpm", "ddim", "dpm"])
def test_predicted_pixels_are_clipped(sampler):
    image = torch.full((1, 4, 4), 3.0)
    oracle = Oracle("noise", "linear", image)
    found = sample(oracle, scheduler(sampler=sampler, clip=1.0), size=(4, 4), seeds=[1], steps=10)
    assert_close(found[0], torch.ones(1, 4, 4), rtol=0, atol=1e-3)
    if sampler != "dpm":
        wider = scheduler(sampler=sampler, clip=2.5)
        found = sample(oracle, wider, size=(4, 4), seeds=[1], steps=10)
        assert_close(found[0], torch.full((1, 4, 4), 2.5), rtol=0, atol=1e-3)


DETERMINISTIC = [case for case in ALL if case[2] != "ddpm"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("prediction", "betas", "sampler"),
    DETERMINISTIC,
    ids=["-".join(case) for case in DETERMINISTIC],
)
def test_deterministic_samplers_follow_the_flow_to_the_data(prediction, betas, sampler):
    # of normal data x_0 = mean + std z, where x_T = a mean + sqrt(a^2 std^2 + s^2) z
    image, std = torch.full((1, 4, 4), 0.3), 0.5
    built = scheduler(prediction, betas, sampler)
    oracle = Oracle(prediction, betas, image, std)
    start = torch.cat([noise_of(seed) for seed in range(8)])
    a, s = coefficients(prediction, betas, prepare_scheduler(built, 200).timesteps[0].item())
    exact = image + std * (start - a * image) / (a * a * std**2 + s * s) ** 0.5
    errors = [
        (sample(oracle, built, size=(4, 4), seeds=range(8), steps=steps) - exact).abs().max().item()
        for steps in (50, 200)
    ]
    assert errors[1] < errors[0] < 0.1
    assert errors[1] < 0.025


def noise_of(seed):
    return torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("variance", [None, -1.0, 1.0], ids=["fixed", "least", "greatest"])
def test_ddpm_reproduces_the_standard_deviation_of_the_data(variance):
    image = torch.zeros(1, 16, 16)
    oracle = Oracle("noise", "linear", image, 0.5, variance=variance)
    built = scheduler(sampler="ddpm", learn_sigma=variance is not None)
    found = sample(oracle, built, size=(16, 16), seeds=range(16), steps=250)
    assert found.std().item() == pytest.approx(0.5, abs=0.02)
    assert found.mean().item() == pytest.approx(0, abs=0.03)


@pytest.mark.parametrize("sampler", ["ddim", "dpm"])
def test_two_steps_are_the_equations_written_out(sampler):
    image = torch.full((1, 4, 4), 0.3)
    oracle = Oracle("noise", "linear", image, 0.5)
    found = sample(oracle, scheduler(sampler=sampler), size=(4, 4), seeds=[5], steps=2)
    x = noise_of(5).double()
    for t, after in ((999, 499), (499, None)):
        a, s = coefficients("noise", "linear", t)
        noise = oracle(x, torch.tensor([float(t)]), None)
        guess = (x - s * noise) / a
        a, s = (1, 0) if after is None else coefficients("noise", "linear", after)
        x = a * guess + s * noise  # DDIM, and the first order of DPM-Solver++
    assert_close(found.double(), x, rtol=1e-4, atol=1e-4)


def built(**changes):
    model = replace(SMALL, **changes).build()
    for parameter in model.unpatchify.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sampler", ["ddpm", "ddim", "dpm"])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_an_image_depends_only_on_its_seed_and_label(sampler, guidance):
    model, used = built(), scheduler(sampler=sampler, clip=1.0, learn_sigma=True)
    options = {"size": (4, 6), "steps": 4, "guidance": guidance}
    whole = sample(model, used, seeds=[7, 8, 9], labels=[0, 1, 2], **options)
    alone = sample(model, used, seeds=[8], labels=[1], **options)
    assert_close(alone[0], whole[1], rtol=1e-4, atol=1e-5)
    swapped = sample(model, used, seeds=[9, 7], labels=[2, 0], **options)
    assert_close(swapped, whole[[2, 0]], rtol=1e-4, atol=1e-5)
    again = sample(model, used, seeds=[7, 8, 9], labels=torch.tensor([0, 1, 2]), **options)
    assert torch.equal(again, whole)
    assert not torch.allclose(whole[0], whole[1], atol=1e-2)


def test_the_noise_of_a_seed_is_bit_equal_in_every_batch():
    starts = []

    class Watching(Oracle):
        def __call__(self, noisy, timesteps, labels):
            starts.append(noisy)
            return super().__call__(noisy, timesteps, labels)

    oracle = Watching("noise", "linear", torch.zeros(1, 4, 4))
    for seeds in ([1, 2, 3], [3], [2, 1]):
        sample(oracle, scheduler(), size=(4, 4), seeds=seeds, steps=1)
    whole, alone, reversed_ = starts
    assert torch.equal(whole, torch.cat([noise_of(seed) for seed in (1, 2, 3)]))
    assert torch.equal(whole[2:], alone)
    assert torch.equal(whole[[1, 0]], reversed_)


def test_generators_advance():
    model, used = built(), scheduler()
    seeds = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    options = {"size": (4, 4), "steps": 2, "labels": [0, 1]}
    first = sample(model, used, seeds=seeds, **options)
    assert torch.equal(first, sample(model, used, seeds=[1, 2], **options))
    assert not torch.allclose(first, sample(model, used, seeds=seeds, **options))


class Counting(nn.Module):
    """A denoiser that records its calls."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config, self.batches = model, model.config, []

    def forward(self, noisy, timesteps, labels):
        self.batches.append((len(noisy), None if labels is None else labels.tolist()))
        assert not self.model.training
        return self.model(noisy, timesteps, labels)


def test_without_guidance_the_batch_is_not_doubled():
    counting = Counting(built())
    options = {"size": (4, 4), "seeds": [1, 2], "labels": [0, 2], "steps": 4}
    guided = sample(counting, scheduler(), guidance=1.0, **options)
    assert counting.batches == [(2, [0, 2])] * 4
    assert torch.equal(guided, sample(counting, scheduler(), **options))
    x = torch.cat([noise_of(1), noise_of(2)])  # the same by hand
    used = prepare_scheduler(scheduler(), 4)
    with torch.no_grad():
        for t in used.timesteps:
            output = counting.model(x, torch.full((2,), t.item()), torch.tensor([0, 2]))[:, :1]
            x = used.step(output, t, x).prev_sample
    assert torch.equal(guided, x)


def test_guidance_extrapolates_from_the_unconditional_prediction():
    model = built(learn_sigma=True)
    counting = Counting(model.eval())
    used = scheduler(sampler="ddpm", learn_sigma=True)
    options = {"size": (4, 4), "steps": 2, "seeds": [1], "labels": [2]}
    found = sample(counting, used, guidance=2.5, **options)
    assert counting.batches == [(2, [2, 3])] * 2

    class ByHand:
        config = replace(SMALL, num_classes=0)

        def __call__(self, noisy, timesteps, labels):
            labeled, unlabeled = (model(noisy, timesteps, torch.tensor([n])) for n in (2, 3))
            guided = unlabeled + 2.5 * (labeled - unlabeled)
            return torch.cat([guided[:, :1], labeled[:, 1:]], dim=1)  # the label's variance

    expected = sample(ByHand(), used, **(options | {"labels": None}))
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_guidance_uses_the_conditional_variance():
    class ByLabel:
        config = replace(SMALL, learn_sigma=True)

        def __call__(self, noisy, timesteps, labels):
            variance = torch.where(labels == 3, 1.0, -1.0)[:, None, None, None]
            return torch.cat([noisy, variance.expand_as(noisy)], dim=1)

    used = scheduler(sampler="ddpm", learn_sigma=True)
    options = {"size": (4, 4), "steps": 4, "seeds": [1], "labels": [2]}
    plain = sample(ByLabel(), used, **options)
    assert_close(sample(ByLabel(), used, guidance=2.5, **options), plain)
    assert not torch.allclose(
        sample(ByLabel(), used, **options | {"labels": [3]}), plain, rtol=1e-2
    )


def test_guidance_zero_is_unconditional():
    model = built()
    options = {"size": (4, 4), "steps": 4, "seeds": [1]}
    unconditional = sample(model, scheduler(), **options)
    assert_close(sample(model, scheduler(), labels=[1], guidance=0.0, **options), unconditional)
    assert torch.equal(sample(model, scheduler(), labels=[3], **options), unconditional)


def test_only_ddpm_uses_learned_variances():
    plain = Oracle("noise", "linear", torch.zeros(4, 4, 4), 0.5)
    options = {"size": (4, 4), "seeds": [1], "steps": 10}
    for sampler in ("ddim", "dpm", "ddpm"):
        drawn = [
            sample(oracle, scheduler(sampler=sampler, learn_sigma=True), **options)
            for oracle in (
                Oracle("noise", "linear", torch.zeros(4, 4, 4), 0.5, variance=variance)
                for variance in (-1.0, 1.0)
            )
        ]
        assert torch.equal(*drawn) == (sampler != "ddpm")
        if sampler != "ddpm":
            assert torch.equal(drawn[0], sample(plain, scheduler(sampler=sampler), **options))


@pytest.mark.parametrize("learned", [True, False])
def test_schedulers_can_be_replaced(learned):
    image = torch.linspace(-1, 1, 64).reshape(4, 4, 4)
    oracle = Oracle("noise", "linear", image, variance=0.0 if learned else None)
    config = scheduler(sampler="ddpm", learn_sigma=learned).config
    for name in ("dpm", "ddim", "ddpm"):
        other = SCHEDULERS[name].from_config(config)
        check_scheduler(other, NoiseConfig())
        found = sample(oracle, other, size=(4, 4), seeds=[1], steps=10)
        assert_close(found[0], image, rtol=0, atol=2e-3)


def test_sampling_restores_scheduler_and_modes():
    model, used = built().train(), scheduler(sampler="dpm")
    model.blocks[0].eval()
    before = used.timesteps.clone()
    out = sample(model, used, size=(4, 4), seeds=[1], steps=2)
    assert not out.requires_grad
    assert (model.training, model.time.training, model.blocks[0].mixer.training) == (1, 1, 0)
    assert torch.equal(used.timesteps, before)
    assert used.step_index is None


def test_sampling_restores_modes_after_an_error():
    model = built().train()

    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(model, scheduler(), size=(4, 4), seeds=[1], steps=2, callback=stop)
    assert model.training


def test_the_callback_gets_every_step():
    shown = []
    sample(built(), scheduler(), size=(4, 4), seeds=[1], steps=5, callback=shown.append)
    assert shown == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_sampling_is_in_at_least_float32(dtype):
    model = built()
    options = {"size": (4, 4), "seeds": [1, 2], "labels": [0, 1], "steps": 5, "guidance": 2.0}
    expected = sample(model, scheduler(clip=1.0), **options)
    found = sample(model.to(dtype), scheduler(clip=1.0), **options)
    assert found.dtype == (torch.float32 if dtype == torch.bfloat16 else torch.float64)
    loose = 0.2 if dtype == torch.bfloat16 else 1e-4
    assert_close(found.float(), expected, rtol=0, atol=loose)


def test_models_without_classes_get_no_labels():
    counting = Counting(built(num_classes=0))
    sample(counting, scheduler(), size=(4, 4), seeds=[1], steps=1)
    assert counting.batches == [(1, None)]


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"labels": [4]}, "labels contains 4, expected 0 to 2, or 3 for none"),
        ({}, {"labels": [-1]}, "labels contains -1, expected 0 to 2"),
        ({"label_dropout": 0.0}, {"labels": [3]}, "labels contains 3, expected 0 to 2$"),
        ({}, {"labels": [0, 1]}, r"labels has shape \(2,\) and dtype torch.int64, expected \(1,\)"),
        ({}, {"guidance": 2.0}, "guidance is 2.0, but labels is None, expected 1"),
        ({}, {"guidance": -1.0, "labels": [0]}, "guidance is -1.0, expected 0 or more"),
        ({}, {"guidance": float("nan"), "labels": [0]}, "guidance is nan, expected 0 or more"),
        (
            {"label_dropout": 0.0},
            {"guidance": 2.0, "labels": [0]},
            "guidance is 2.0, but the model was trained with label_dropout=0.0, expected 1",
        ),
        ({"label_dropout": 0.0}, {}, "labels is None, but the model was trained with label_dropou"),
        ({"num_classes": 0}, {"guidance": 2.0}, "guidance is 2.0, but the model has no classes"),
        ({"num_classes": 0}, {"labels": [0]}, "labels are given, but the model has no classes"),
        ({}, {"size": (0, 4)}, r"size\[0\] is 0"),
        ({}, {"steps": 0}, "steps is 0, expected 1 to 1000"),
        ({}, {"steps": 1001}, "steps is 1001, expected 1 to 1000"),
        ({}, {"steps": 30}, "steps is 30, but DDIM takes equal strides over 1000 timesteps"),
        ({}, {"seeds": []}, "seeds is empty"),
    ],
)
def test_invalid_options_are_rejected(changes, options, message):
    model = replace(SMALL, **changes).build()
    with pytest.raises(ValueError, match=message):
        sample(model, scheduler(), **{"size": (4, 4), "seeds": [1], "steps": 2} | options)


def test_schedulers_that_do_not_fit_the_variances_are_rejected():
    with_variances, without = built(learn_sigma=True), built(learn_sigma=False)
    options = {"size": (4, 4), "seeds": [1], "steps": 2}
    with pytest.raises(ValueError, match="but the model predicts no variances, expected"):
        sample(without, scheduler(sampler="ddpm", learn_sigma=True), **options)
    config = scheduler(sampler="ddpm", learn_sigma=True).config
    other = SCHEDULERS["ddpm"].from_config(config, variance_type="learned")
    with pytest.raises(ValueError, match="'learned', but the model predicts a range of variances"):
        sample(with_variances, other, **options)
    spaced = SCHEDULERS["ddim"].from_config(config, timestep_spacing="linspace")
    with pytest.raises(ValueError, match="timestep_spacing='linspace', with which DDIM"):
        sample(with_variances, spaced, **options)


def test_samplers_that_do_not_fit_the_noise_are_rejected():
    with pytest.raises(
        ValueError, match="sampler is 'euler', but the model was trained with noise"
    ):
        scheduler("noise", "linear", "euler")
    with pytest.raises(ValueError, match="sampler is 'ddim', but the model was trained with noise"):
        scheduler("flow", "linear", "ddim")
    with pytest.raises(ValueError, match=r"clip is -1.0, expected a number above 0"):
        scheduler(clip=-1.0)
    with pytest.raises(
        ValueError, match=r"prediction_type='epsilon', but .* expected 'v_prediction'"
    ):
        check_scheduler(scheduler("noise"), NoiseConfig(prediction="v"))
    with pytest.raises(ValueError, match=r"beta_schedule='linear', but .*squaredcos_cap_v2"):
        check_scheduler(scheduler("noise"), NoiseConfig(betas="cosine"))
    with pytest.raises(ValueError, match=r"DDIMScheduler, but .* expected FlowMatchEulerDiscrete"):
        check_scheduler(scheduler("noise"), NoiseConfig(prediction="flow"))
    with pytest.raises(ValueError, match="FlowMatchEulerDiscreteScheduler with beta_schedule=None"):
        check_scheduler(scheduler("flow"), NoiseConfig())
    with pytest.raises(ValueError, match="scheduler 'NoneType' is unknown"):
        check_scheduler(None, NoiseConfig())


def test_ddim_rejects_steps_that_diffusers_rounds_beyond_the_image():
    scheduler = build_scheduler(
        NoiseConfig(), SamplerConfig(sampler="ddim"), clip=None, learn_sigma=False
    )
    with pytest.raises(ValueError, match="steps is 61, but DDIM takes equal strides"):
        prepare_scheduler(scheduler, 61)
