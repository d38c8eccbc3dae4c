"""Noise schedules and losses, against closed forms and diffusers' schedulers."""

import math

import pytest
import torch
from diffusers import DDPMScheduler

from onescan.experiments.tasks.noising import Noising, make_betas
from onescan.models.denoiser import NoiseConfig

CONFIGS = {
    "noise": NoiseConfig(),
    "noise_cosine": NoiseConfig(betas="cosine"),
    "v": NoiseConfig(prediction="v"),
    "v_cosine": NoiseConfig(prediction="v", betas="cosine"),
    "flow": NoiseConfig(prediction="flow"),
}
DISCRETE = {name: config for name, config in CONFIGS.items() if name != "flow"}
NAMES = {"linear": "linear", "cosine": "squaredcos_cap_v2"}  # in diffusers


def drawn(count=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x0, noise = torch.randn(2, count, 3, 4, 4, generator=generator, dtype=dtype)
    return x0.clamp(-1, 1), noise


@pytest.mark.parametrize("betas", NAMES)
def test_betas_are_those_of_diffusers(betas):
    ours = make_betas(NoiseConfig(betas=betas))
    theirs = DDPMScheduler(beta_schedule=NAMES[betas]).betas.double()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", DISCRETE)
def test_mixing_and_targets_are_those_of_diffusers(name):
    config, (x0, noise) = CONFIGS[name], drawn()
    noising, t = Noising(config), torch.tensor([0, 10, 500, 999])
    theirs = DDPMScheduler(beta_schedule=NAMES[config.betas])
    # which computes its tables in float32
    mixed = theirs.add_noise(x0, noise, t)
    torch.testing.assert_close(noising.mix(x0, noise, t), mixed, atol=1e-5, rtol=1e-5)
    target = theirs.get_velocity(x0, noise, t) if config.prediction == "v" else noise
    torch.testing.assert_close(noising.target(x0, noise, t), target, atol=1e-5, rtol=1e-5)


def test_flow_matching_predicts_the_velocity_of_a_straight_line():
    noising, (x0, noise) = Noising(CONFIGS["flow"]), drawn()
    t = torch.tensor([0.0, 250.0, 999.5, 1000.0], dtype=torch.float64)
    s = (t / 1000)[:, None, None, None]
    torch.testing.assert_close(noising.mix(x0, noise, t), (1 - s) * x0 + s * noise)
    step = 1e-3  # d x_t / d s
    beyond = noising.mix(x0, noise, t + 1000 * step)
    slope = (beyond - noising.mix(x0, noise, t)) / step
    torch.testing.assert_close(noising.target(x0, noise, t), slope, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_image_follows_from_the_target(name):
    noising, (x0, noise) = Noising(CONFIGS[name]), drawn()
    t = noising.timesteps(torch.tensor([0.0, 0.3, 0.7, 0.95], dtype=torch.float64))
    found = noising.denoised(noising.mix(x0, noise, t), noising.target(x0, noise, t), t)
    torch.testing.assert_close(found, x0, atol=1e-9, rtol=0)


def test_timesteps_are_whole_except_for_flow_matching():
    fractions = torch.tensor([0.0, 0.50049, 0.99999])
    assert Noising(NoiseConfig()).timesteps(fractions).tolist() == [0, 500, 999]
    flow = Noising(CONFIGS["flow"]).timesteps(fractions)
    torch.testing.assert_close(flow, torch.tensor([0.0, 500.49, 999.99]))


@pytest.mark.parametrize("name", DISCRETE)
def test_variance_loss_is_the_divergence_of_the_step_in_bits(name):
    """Against torch's own distributions, number by number."""
    config, (x0, noise) = CONFIGS[name], drawn()
    noising, t = Noising(config), torch.tensor([1, 10, 500, 990])
    noisy = noising.mix(x0, noise, t)
    prediction = noising.target(x0, noise, t) + 0.1
    variance = torch.linspace(-1, 1, x0.numel(), dtype=torch.float64).view_as(x0)
    found = noising.variance_loss(x0, noisy, prediction, variance, t)
    betas = make_betas(config)
    alphas = (1 - betas).cumprod(0)
    for i, step in enumerate(t.tolist()):
        before, now, beta = alphas[step - 1], alphas[step], betas[step]
        tilde = beta * (1 - before) / (1 - now)

        def mean(image, before=before, now=now, beta=beta, i=i):
            by_image = before.sqrt() * beta / (1 - now) * image
            return by_image + (1 - beta).sqrt() * (1 - before) / (1 - now) * noisy[i]

        image = noising.denoised(noisy, prediction, t)[i]
        log = (variance[i] + 1) / 2 * beta.log() + (1 - variance[i]) / 2 * tilde.log()
        expected = torch.distributions.Normal(mean(x0[i]), tilde.sqrt())
        given = torch.distributions.Normal(mean(image), (log / 2).exp())
        bits = torch.distributions.kl_divergence(expected, given).mean() / math.log(2)
        torch.testing.assert_close(found[i], bits, atol=1e-9, rtol=1e-9)


def test_the_first_step_is_the_likelihood_of_8_bit_pixels():
    noising, t = Noising(NoiseConfig()), torch.zeros(1, dtype=torch.long)
    levels = torch.linspace(-1, 1, 256, dtype=torch.float64)
    noise = torch.zeros(1, 1, 16, 16, dtype=torch.float64)
    noisy = noising.mix(levels[[77]].expand(1, 1, 16, 16), noise, t)  # all pixels of one level
    all_levels = levels.view(1, 1, 16, 16)
    variance = torch.full_like(noise, 0.5)
    bits = noising.variance_loss  # of every level, for one prediction
    each = torch.stack([
        bits(level.expand(1, 1, 16, 16), noisy, noise, variance, t)
        for level in all_levels.flatten()
    ])  # fmt: skip
    assert each.argmin() == 77
    total = (2.0 ** -each.clamp(max=39)).sum().item()  # probabilities are clamped
    assert abs(total - 1) < 1e-6


def test_variance_loss_trains_only_the_variance():
    noising, (x0, noise) = Noising(NoiseConfig()), drawn()
    t = torch.tensor([0, 1, 500, 999])
    prediction, variance = noise.clone().requires_grad_(), torch.zeros_like(x0).requires_grad_()
    noising.variance_loss(x0, noising.mix(x0, noise, t), prediction, variance, t).sum().backward()
    assert prediction.grad is None
    assert variance.grad.flatten(1).any(dim=1).all()


def test_the_minimum_variance_is_exact_for_a_known_image():
    """With the true noise, the divergence is 0 at the minimum variance."""
    noising, (x0, noise) = Noising(NoiseConfig()), drawn()
    t = torch.tensor([2, 10, 500, 999])
    noisy = noising.mix(x0, noise, t)
    found = noising.variance_loss(x0, noisy, noise, torch.full_like(x0, -1.0), t)
    torch.testing.assert_close(found, torch.zeros_like(found), atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_is_near_float64(name):
    noising = Noising(CONFIGS[name])
    (x0, noise), (x0_32, noise_32) = drawn(), (part.float() for part in drawn())
    t = noising.timesteps(torch.tensor([0.0, 0.3, 0.7, 0.95]))
    mixed = noising.mix(x0_32, noise_32, t)
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed.double(), noising.mix(x0, noise, t), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("sides", [(), (9,), (8, 8), (8, 8, 8), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_samples_have_any_number_of_axes(name, sides):
    """Each sample is what it is on its own, with all its values in one axis."""
    noising, config = Noising(CONFIGS[name]), CONFIGS[name]
    x0, noise, predicted, variance = torch.rand(4, 3, 1, *sides, dtype=torch.float64) * 2 - 1
    t = torch.tensor([0, 500, 999])

    def every(*tensors):
        noisy = noising.mix(*tensors[:2], t)
        results = [
            noisy,
            noising.target(*tensors[:2], t),
            noising.denoised(noisy, tensors[2], t),
        ]
        if config.prediction != "flow":
            results.append(noising.variance_loss(tensors[0], noisy, *tensors[2:], t))
        return results

    tensors = (x0, noise, predicted, variance)
    flat = every(*(x.reshape(3, 1, 1, -1) for x in tensors))
    for i, (x, want) in enumerate(zip(every(*tensors), flat, strict=True)):
        assert x.shape == (x0.shape if i < 3 else (3,))
        torch.testing.assert_close(x.reshape(want.shape), want)
    a, s = (noising.mix(*pair, t) for pair in ((x0 * 0 + 1, x0 * 0), (x0 * 0, x0 * 0 + 1)))
    torch.testing.assert_close(noising.mix(x0, noise, t), a * x0 + s * noise)
