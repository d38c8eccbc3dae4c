"""Sample images from noise: diffusers schedulers that match a denoiser, and the sampling loop."""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor, nn

from onescan.checks import check_choice, check_positive
from onescan.messages import named_type
from onescan.models.denoiser import STEPS, DenoiserConfig, NoiseConfig, SamplerConfig
from onescan.shapes import DenoiserOutput, Grids, Labels

Seed = int | torch.Generator
Callback = Callable[[int], object]
StepEnd = Callable[[int, Tensor, Grids], Grids]  # index of the step, its timestep, sample

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
LEARNED = ("learned", "learned_range")  # variance types of a model that predicts variances
# With the last betas of the cosine schedule, almost nothing of an image is left, so DPM-Solver
# starts where log(alpha / sigma) exceeds this number, as the documentation of diffusers recommends.
COSINE_LOG_SNR = -5.1


def build_scheduler(
    noise: NoiseConfig, sampler: SamplerConfig, *, clip: float | None, learn_sigma: bool
) -> SchedulerMixin:
    """Build the scheduler of a sampler, over the 1000 steps of training.

    Timesteps use "trailing" spacing: from the last timestep, which is pure noise like the initial
    sample, down to the image in equal strides. The other spacings start at a timestep with some
    image content, or end before the image.

    Args:
        noise: Noise config with which the model was trained.
        sampler: Name of the sampler; its steps and guidance are arguments of `sample`.
        clip: Predicted images are clipped to [-clip, clip]; None for latents. DPM-Solver supports
            only a clip of 1, because of diffusers, and flow matching never clips.
        learn_sigma: Whether the model predicts variances, which only DDPM uses.

    Raises:
        ValueError: If a field is out of range, or the sampler does not match the noise.
    """
    noise.check()
    sampler.check(noise)
    if clip is not None:
        check_positive(clip=clip)
    chosen = sampler.resolved(noise)
    if chosen == "euler":
        return FlowMatchEulerDiscreteScheduler(num_train_timesteps=STEPS)
    fields = _noise_fields(noise) | {"timestep_spacing": "trailing"}
    if chosen == "dpm":
        if clip == 1:
            fields |= {"thresholding": True, "sample_max_value": 1.0}  # the same as clipping
        if noise.betas == "cosine":
            fields["lambda_min_clipped"] = COSINE_LOG_SNR
        return DPMSolverMultistepScheduler(algorithm_type="dpmsolver++", **fields)
    fields["clip_sample"] = clip is not None
    if clip is not None:
        fields["clip_sample_range"] = clip
    if chosen == "ddim":
        return DDIMScheduler(**fields)
    return DDPMScheduler(variance_type="learned_range" if learn_sigma else "fixed_small", **fields)


def check_scheduler(scheduler: Any, noise: NoiseConfig) -> None:
    """Raise ValueError if a scheduler is unsupported, or does not match the noise of training."""
    if not isinstance(scheduler, tuple(SCHEDULERS.values())):
        known = [kind.__name__ for kind in SCHEDULERS.values()]
        check_choice("scheduler", type(scheduler).__name__, known)
    for name, expected in _noise_fields(noise).items():
        value = scheduler.config.get(name)
        if value != expected:
            raise ValueError(
                f"scheduler is {named_type(scheduler)} with {name}={value!r}, but the model "
                f"was trained with noise.prediction={noise.prediction!r} and "
                f"noise.betas={noise.betas!r}, expected {expected!r}"
            )
    is_flow = isinstance(scheduler, FlowMatchEulerDiscreteScheduler)
    if is_flow != (noise.prediction == "flow"):
        raise ValueError(
            f"scheduler is {named_type(scheduler)}, but the model was trained with "
            f"noise.prediction={noise.prediction!r}, expected "
            + ("one with betas" if is_flow else FlowMatchEulerDiscreteScheduler.__name__)
        )


def prepare_scheduler(scheduler: Any, steps: int) -> Any:
    """Copy a scheduler, and set the timesteps of the copy.

    Raises:
        ValueError: If steps is out of range, or DDIM cannot take that many equal strides.
    """
    if not 1 <= steps <= STEPS:
        raise ValueError(f"steps is {steps}, expected 1 to {STEPS}")
    scheduler = copy.deepcopy(scheduler)
    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        # equal strides from 1 to 0; the last stride of the scheduler's own schedule is almost zero
        scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / steps, steps).tolist())
        return scheduler
    with warnings.catch_warnings():
        # diffusers converts tensors to arrays in a way that is deprecated in numpy
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        scheduler.set_timesteps(steps)
        if isinstance(scheduler, DDIMScheduler):
            _check_strides(scheduler, steps)
        valid = scheduler.timesteps[scheduler.timesteps >= 0]
        if len(valid) < len(scheduler.timesteps):  # e.g. for 61 steps, diffusers rounds one to -1
            scheduler.set_timesteps(timesteps=valid.tolist())
    if isinstance(scheduler, DPMSolverMultistepScheduler):
        scheduler.register_to_config(variance_type=None)  # otherwise it reads only 3 channels
    return scheduler


def _noise_fields(noise: NoiseConfig) -> dict[str, Any]:
    """Return the fields of a scheduler's config that define the noise."""
    fields: dict[str, Any] = {"num_train_timesteps": STEPS}
    if noise.prediction == "flow":
        return fields
    return fields | BETAS[noise.betas] | {"prediction_type": PREDICTIONS[noise.prediction]}


def _check_strides(scheduler: DDIMScheduler, steps: int) -> None:
    """Check that DDIM, which always steps back by 1000 // steps, reaches its timesteps."""
    stride, timesteps = STEPS // steps, scheduler.timesteps
    if bool((timesteps[:-1] - timesteps[1:] == stride).all()) and timesteps[-1] < stride:
        return
    spacing = scheduler.config["timestep_spacing"]
    divisors = [number for number in range(1, STEPS + 1) if STEPS % number == 0]
    below, above = (max(n for n in divisors if n <= steps), min(n for n in divisors if n >= steps))
    if below == above or spacing != "trailing":
        raise ValueError(
            f"scheduler has timestep_spacing={spacing!r}, with which DDIM of diffusers misses its "
            "timesteps, expected 'trailing'"
        )
    raise ValueError(
        f"steps is {steps}, but DDIM takes equal strides over {STEPS} timesteps, expected {below} "
        f"or {above}, or another sampler"
    )


@torch.no_grad()
def sample(
    model: Any,
    scheduler: Any,
    *,
    size: tuple[int, ...],
    seeds: Sequence[Seed],
    labels: Sequence[int] | Labels | None = None,
    steps: int = 50,
    guidance: float | Callable[[], float] = 1.0,
    device: torch.device | None = None,
    callback: Callback | None = None,
    latents: Grids | None = None,
    on_step_end: StepEnd | None = None,
) -> Grids:
    """Sample one image per seed. Each image depends only on its seed and label, not on the batch.

    Noise is always drawn on the CPU, so it is bit-identical on every device and in every batch. The
    output of the model may be rounded differently in other batches.

    Args:
        model: A `Denoiser`, or a callable with the same arguments and config. It is called in
            evaluation mode, and its mode is restored afterwards.
        scheduler: A diffusers scheduler that matches the noise used in training; not modified.
        size: Size of the model's images along each axis, such as height and width.
        seeds: Seeds, or generators, which continue from their state.
        labels: One class per image, or num_classes for no class. None means no class for all.
        steps: Number of sampling steps.
        guidance: Scale of classifier-free guidance, arXiv:2207.12598, or a function that returns
            the scale of the next step. 1 disables it.
        device: Device to sample on; None for the device of the model's weights.
        callback: Called after each step with the number of completed steps.
        latents: Initial noise [B, channels, *size], instead of noise drawn from the seeds, which
            then provide only the noise that a scheduler adds.
        on_step_end: Called after each step with its index from 0, its timestep and the sample;
            returns the sample to continue with.

    Returns:
        Images as the model was trained on them: standardized pixels, or scaled latents.

    Raises:
        ValueError: If a label is unknown, or the number of labels differs from that of seeds; if
            patches do not divide the size; if a number is out of range; if guidance is requested
            from a model without classes, or trained only with classes; or if the scheduler needs
            variances that the model does not predict.
    """
    config: DenoiserConfig = model.config
    scale = guidance if callable(guidance) else lambda: guidance
    _check_guidance(config, scale(), has_labels=labels is not None)
    classes = _check_labels(config, labels, count=len(seeds))
    _check_size(config, size)
    _check_variances(config, scheduler)
    scheduler = prepare_scheduler(scheduler, steps)
    weight = next(iter(model.parameters()), None) if isinstance(model, nn.Module) else None
    dtype = torch.float32 if weight is None else weight.dtype
    device = device or torch.device("cpu" if weight is None else weight.device)
    generators = [_generator(seed) for seed in seeds]
    shape = (1, config.channels, *size)
    if latents is None:
        noise = [torch.randn(shape, generator=each, device=each.device) for each in generators]
        x = torch.cat([each.to(device) for each in noise])
    else:
        expected = (len(seeds), *shape[1:])
        if latents.shape != expected or not latents.is_floating_point():
            raise ValueError(
                f"latents has shape {tuple(latents.shape)} and dtype {latents.dtype}, expected "
                f"{expected} floating-point numbers"
            )
        x = latents.to(device, torch.float32)
    x = x.double() if dtype == torch.float64 else x
    if classes is not None:
        classes = classes.to(device)
    with _evaluating(model):
        for done, t in enumerate(scheduler.timesteps, 1):
            times = torch.full((len(x),), t.item(), dtype=t.dtype, device=device)
            _check_guidance(config, current := scale(), has_labels=classes is not None)
            predicted = _predict(model, x, times, classes, guidance=current, dtype=dtype)
            is_last = done == len(scheduler.timesteps)
            x = _step(scheduler, predicted, t, x, generators, is_last=is_last)
            if on_step_end is not None:
                x = on_step_end(done - 1, t, x)
            if callback is not None:
                callback(done)
    return x


def _predict(
    model: Any,
    x: Grids,
    times: Tensor,
    labels: Labels | None,
    *,
    guidance: float,
    dtype: torch.dtype,
) -> DenoiserOutput:
    """Call the model once, on a doubled batch for guidance; return the output in x's dtype."""
    if labels is None or guidance == 1:
        return model(x.to(dtype), times, labels).to(x.dtype)
    none = torch.full_like(labels, model.config.num_classes)
    both = model(
        torch.cat([x, x]).to(dtype), torch.cat([times, times]), torch.cat([labels, none])
    ).to(x.dtype)
    channels = x.shape[1]
    conditional, unconditional = both.chunk(2)
    guided = unconditional[:, :channels] + guidance * (conditional - unconditional)[:, :channels]
    return torch.cat([guided, conditional[:, channels:]], dim=1)


def _step(
    scheduler: Any,
    predicted: DenoiserOutput,
    t: Tensor,
    x: Grids,
    generators: list[torch.Generator],
    *,
    is_last: bool,
) -> Grids:
    is_ddpm = isinstance(scheduler, DDPMScheduler)
    if not (is_ddpm and scheduler.config.variance_type in LEARNED):
        predicted = predicted[:, : x.shape[1]]
    options: dict[str, Any] = {"generator": generators}
    if isinstance(scheduler, DDIMScheduler):  # recompute noise from the clipped image, as in ADM
        options["use_clipped_model_output"] = bool(scheduler.config.clip_sample)
    result = scheduler.step(predicted, t, x, **options)
    if is_last and is_ddpm:  # diffusers adds noise even here, unless the timestep is 0
        return result.pred_original_sample
    return result.prev_sample


def _check_guidance(config: DenoiserConfig, guidance: float, *, has_labels: bool) -> None:
    """Check that the model and the labels allow this scale of guidance."""
    if not 0 <= guidance < float("inf"):
        raise ValueError(f"guidance is {guidance}, expected 0 or more")
    if guidance == 1:
        return
    if config.num_classes == 0:
        why = "the model has no classes"
    elif config.label_dropout == 0:
        why = f"the model was trained with label_dropout={config.label_dropout}"
    elif not has_labels:
        why = "labels is None"
    else:
        return
    raise ValueError(f"guidance is {guidance}, but {why}, expected 1")


def _check_labels(
    config: DenoiserConfig, labels: Sequence[int] | Labels | None, *, count: int
) -> Labels | None:
    """Check labels against the model, and return them as a tensor."""
    if count < 1:
        raise ValueError("seeds is empty, expected one for each image")
    has_no_class = config.num_classes == 0 or config.label_dropout > 0
    if labels is None:
        if not has_no_class:
            raise ValueError(
                "labels is None, but the model was trained with "
                f"label_dropout={config.label_dropout}, expected a class for each image"
            )
        return None
    classes = torch.as_tensor(labels, device="cpu")
    if config.num_classes == 0:
        raise ValueError("labels are given, but the model has no classes, expected None")
    if classes.shape != (count,) or classes.is_floating_point():
        raise ValueError(
            f"labels has shape {tuple(classes.shape)} and dtype {classes.dtype}, expected "
            f"({count},) integers, one for each seed"
        )
    last = config.num_classes if has_no_class else config.num_classes - 1
    for label in classes.tolist():
        if not 0 <= label <= last:
            none = f", or {config.num_classes} for none" if has_no_class else ""
            raise ValueError(
                f"labels contains {label}, expected 0 to {config.num_classes - 1}{none}"
            )
    return classes.long()


def _check_size(config: DenoiserConfig, size: tuple[int, ...]) -> None:
    if len(size) != len(config.patch_size):
        raise ValueError(f"size is {size}, expected {len(config.patch_size)} axes, as in the model")
    check_positive(**{f"size[{axis}]": side for axis, side in enumerate(size)})


def _check_variances(config: DenoiserConfig, scheduler: Any) -> None:
    variance_type = scheduler.config.get("variance_type")
    if not isinstance(scheduler, DDPMScheduler) or variance_type not in LEARNED:
        return
    if not config.learn_sigma or variance_type != "learned_range":
        predicts = "a range of variances" if config.learn_sigma else "no variances"
        expected = "learned_range" if config.learn_sigma else "fixed_small"
        raise ValueError(
            f"scheduler has variance_type={variance_type!r}, but the model predicts {predicts}, "
            f"expected {expected!r}"
        )


def _generator(seed: Seed) -> torch.Generator:
    return torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Put all modules of a model into evaluation mode, and restore their modes afterwards."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    modes = {module: module.training for module in modules}
    try:
        for module in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
