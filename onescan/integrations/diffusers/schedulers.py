"""diffusers' schedulers, with the noise that a denoiser was trained with."""

import copy
import warnings
from typing import Any

import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from onescan.checks import check_choice, check_positive
from onescan.models.denoiser import STEPS, NoiseConfig, SamplerConfig

SCHEDULERS: dict[str, type[SchedulerMixin]] = {
    "ddpm": DDPMScheduler,
    "ddim": DDIMScheduler,
    "dpm": DPMSolverMultistepScheduler,
    "euler": FlowMatchEulerDiscreteScheduler,
}
BETAS: dict[str, dict[str, Any]] = {
    "linear": {"beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02},
    "cosine": {"beta_schedule": "squaredcos_cap_v2"},
}
PREDICTIONS = {"noise": "epsilon", "v": "v_prediction"}
# Its last betas leave next to nothing of an image, which cannot be told from the noise: DPM-Solver
# begins where log(a / s) is above this, as diffusers advises.
COSINE_BEGIN = -5.1


def build_scheduler(
    noise: NoiseConfig, sampler: SamplerConfig, *, clip: float | None, learnt_sigma: bool
) -> SchedulerMixin:
    """The scheduler of a sampler, over the 1000 steps of training.

    The timesteps are spaced "trailing": from the last one, which is pure noise as what is drawn is,
    down in equal strides that end at the image. The others begin where some of the image should be
    left, or end before it.

    Args:
        noise: what the model was trained with.
        sampler: which one; its steps and guidance are not a scheduler's.
        clip: pixels reach from -clip to clip, and so does any guess at them; None for latents. For
            dpm it is 1 or left out, as diffusers has no other there, and for euler there is none.
        learnt_sigma: whether the model tells variances, which ddpm alone reads.

    Raises:
        ValueError: a field out of range, or a sampler of another kind of noise.
    """
    noise.check()
    sampler.check(noise)
    if clip is not None:
        check_positive(clip=clip)
    chosen = sampler.resolved(noise)
    if chosen == "euler":
        return FlowMatchEulerDiscreteScheduler(num_train_timesteps=STEPS)
    fields = _fields(noise) | {"timestep_spacing": "trailing"}
    if chosen == "dpm":
        if clip == 1:
            fields |= {"thresholding": True, "sample_max_value": 1.0}  # the same as clipping
        if noise.betas == "cosine":
            fields["lambda_min_clipped"] = COSINE_BEGIN
        return DPMSolverMultistepScheduler(algorithm_type="dpmsolver++", **fields)
    fields["clip_sample"] = clip is not None
    if clip is not None:
        fields["clip_sample_range"] = clip
    if chosen == "ddim":
        return DDIMScheduler(**fields)
    return DDPMScheduler(variance_type="learned_range" if learnt_sigma else "fixed_small", **fields)


def check_scheduler(scheduler: Any, noise: NoiseConfig) -> None:
    """Raise ValueError for a scheduler that there is no sampler of, or of another kind of noise."""
    if not isinstance(scheduler, tuple(SCHEDULERS.values())):
        known = [kind.__name__ for kind in SCHEDULERS.values()]
        check_choice("scheduler", type(scheduler).__name__, known)
    for name, expected in _fields(noise).items():
        told = scheduler.config.get(name)
        if told != expected:
            raise ValueError(
                f"scheduler is a {type(scheduler).__name__} with {name}={told!r}, but the model "
                f"was trained with noise.prediction={noise.prediction!r} and "
                f"noise.betas={noise.betas!r}, expected {expected!r}"
            )
    is_flow = isinstance(scheduler, FlowMatchEulerDiscreteScheduler)
    if is_flow != (noise.prediction == "flow"):
        raise ValueError(
            f"scheduler is a {type(scheduler).__name__}, but the model was trained with "
            f"noise.prediction={noise.prediction!r}, expected "
            + ("one with betas" if is_flow else FlowMatchEulerDiscreteScheduler.__name__)
        )


def at_the_start(scheduler: Any, steps: int) -> Any:
    """Copy a scheduler, and set the copy to begin a walk of so many steps.

    Raises:
        ValueError: steps is out of range, or none that DDIM can go in equal strides.
    """
    if not 1 <= steps <= STEPS:
        raise ValueError(f"steps is {steps}, expected 1 to {STEPS}")
    walk = copy.deepcopy(scheduler)
    if isinstance(walk, FlowMatchEulerDiscreteScheduler):
        # in equal strides from 1 to 0; its own end with a stride of next to nothing
        walk.set_timesteps(sigmas=torch.linspace(1, 1 / steps, steps).tolist())
        return walk
    with warnings.catch_warnings():
        # diffusers turns tensors into arrays in a way that numpy will drop
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        walk.set_timesteps(steps)
        if isinstance(walk, DDIMScheduler):
            _check_strides(walk, steps)
        kept = walk.timesteps[walk.timesteps >= 0]
        if len(kept) < len(walk.timesteps):  # diffusers rounds a timestep -1 after 61 and others
            walk.set_timesteps(timesteps=kept.tolist())
    if isinstance(walk, DPMSolverMultistepScheduler):
        walk.register_to_config(variance_type=None)  # else it reads the first 3 channels alone
    return walk


def _fields(noise: NoiseConfig) -> dict[str, Any]:
    """What a scheduler's config says of the noise."""
    trained = {"num_train_timesteps": STEPS}
    if noise.prediction == "flow":
        return trained
    return trained | BETAS[noise.betas] | {"prediction_type": PREDICTIONS[noise.prediction]}


def _check_strides(walk: DDIMScheduler, steps: int) -> None:
    """DDIM goes back by 1000 // steps, whatever the next timestep is, and -1 is the image."""
    stride, timesteps = STEPS // steps, walk.timesteps
    if bool((timesteps[:-1] - timesteps[1:] == stride).all()) and timesteps[-1] < stride:
        return
    spacing = walk.config["timestep_spacing"]
    fitting = [number for number in range(1, STEPS + 1) if STEPS % number == 0]
    below, above = (max(n for n in fitting if n <= steps), min(n for n in fitting if n >= steps))
    if below == above or spacing != "trailing":
        raise ValueError(
            f"scheduler has timestep_spacing={spacing!r}, by which diffusers' DDIM misses its "
            "timesteps, expected 'trailing'"
        )
    raise ValueError(
        f"steps is {steps}, but DDIM goes {STEPS} timesteps in equal strides, expected {below} or "
        f"{above}, or another sampler"
    )
