"""From noise to images: a denoiser called step by step, as a scheduler says."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from torch import Tensor, nn

from onescan.integrations.diffusers.schedulers import at_the_start
from onescan.models.denoiser import DenoiserConfig
from onescan.shapes import DenoiserOutput, Images, Labels

Chance = int | torch.Generator
Show = Callable[[int], object]
LEARNT = ("learned", "learned_range")  # what a scheduler calls variances that a model tells


@torch.no_grad()
def draw(
    model: Any,
    scheduler: Any,
    *,
    size: tuple[int, int],
    seeds: Sequence[Chance],
    labels: Sequence[int] | Labels | None = None,
    steps: int = 50,
    guidance: float = 1.0,
    device: torch.device | None = None,
    show: Show | None = None,
) -> Images:
    """Draw one image for each seed: a function of its seed and label, whatever is drawn beside it.

    To the last bit that holds for the noise, which is drawn on the CPU for every device; what the
    model makes of it is rounded differently in other batches.

    Args:
        model: a `Denoiser`, or what is called as one is and has its config. It is applied in
            evaluation mode, and left in the mode that it was in.
        scheduler: one of diffusers' that fits the model's noise; it stays as it is.
        size: height and width of what is denoised.
        seeds: numbers, or generators, which go on from where they are.
        labels: a class for each image, or the config's num_classes for none; None for none in all.
        steps: calls of the model.
        guidance: how far to go from what the model tells of any class toward what it tells of the
            label, arXiv:2207.12598: with 1 no class is asked for what any would be, and the
            label's own answer stands as it is.
        device: where to; None is where the model's weights are.
        show: called after each step with the number of steps done.

    Returns:
        Images as the model knows them: pixels standardized, or latents scaled.

    Raises:
        ValueError: labels that there are not, or another number than of seeds; a size that patches
            do not divide; a number out of range; guidance of a model that knows no image without a
            class, or none with one; a scheduler that wants variances which the model does not tell.
    """
    config: DenoiserConfig = model.config
    chosen = _checked(config, labels, count=len(seeds), guidance=guidance)
    _check_size(config, size)
    _check_variances(config, scheduler)
    walk = at_the_start(scheduler, steps)
    weight = next(iter(model.parameters()), None) if isinstance(model, nn.Module) else None
    dtype = torch.float32 if weight is None else weight.dtype
    device = device or torch.device("cpu" if weight is None else weight.device)
    generators = [_generator(seed) for seed in seeds]
    shape = (1, config.channels, *size)
    noise = [torch.randn(shape, generator=each, device=each.device) for each in generators]
    x = torch.cat([each.to(device) for each in noise])
    x = x.double() if dtype == torch.float64 else x
    if chosen is not None:
        chosen = chosen.to(device)
    with _evaluating(model):
        for done, t in enumerate(walk.timesteps, 1):
            times = torch.full((len(x),), t.item(), dtype=t.dtype, device=device)
            told = _told(model, x, times, chosen, guidance=guidance, dtype=dtype)
            x = _step(walk, told, t, x, generators, is_last=done == len(walk.timesteps))
            if show is not None:
                show(done)
    return x


def _told(
    model: Any,
    x: Images,
    times: Tensor,
    labels: Labels | None,
    *,
    guidance: float,
    dtype: torch.dtype,
) -> DenoiserOutput:
    """What the model tells, in the dtype of x; with guidance all it takes is one batch of twice."""
    if labels is None or guidance == 1:
        return model(x.to(dtype), times, labels).to(x.dtype)
    none = torch.full_like(labels, model.config.num_classes)
    twice = model(
        torch.cat([x, x]).to(dtype), torch.cat([times, times]), torch.cat([labels, none])
    ).to(x.dtype)
    channels = x.shape[1]
    asked, of_any = twice.chunk(2)
    told = of_any[:, :channels] + guidance * (asked - of_any)[:, :channels]
    return torch.cat([told, asked[:, channels:]], dim=1)


def _step(
    walk: Any,
    told: DenoiserOutput,
    t: Tensor,
    x: Images,
    generators: list[torch.Generator],
    *,
    is_last: bool,
) -> Images:
    is_ddpm = isinstance(walk, DDPMScheduler)
    if not (is_ddpm and walk.config.variance_type in LEARNT):
        told = told[:, : x.shape[1]]
    beside: dict[str, Any] = {"generator": generators}
    if isinstance(walk, DDIMScheduler):  # noise that agrees with the clipped image, as in ADM
        beside["use_clipped_model_output"] = bool(walk.config.clip_sample)
    result = walk.step(told, t, x, **beside)
    if is_last and is_ddpm:  # diffusers adds noise even then, unless the timestep is 0
        return result.pred_original_sample
    return result.prev_sample


def _checked(
    config: DenoiserConfig, labels: Sequence[int] | Labels | None, *, count: int, guidance: float
) -> Labels | None:
    """The labels as a tensor, where they and the guidance can be asked for."""
    if count < 1:
        raise ValueError("seeds is empty, expected one for each image")
    if not 0 <= guidance < float("inf"):
        raise ValueError(f"guidance is {guidance}, expected 0 or more")
    knows_none = config.num_classes == 0 or config.label_dropout > 0
    trained = f"the model was trained with label_dropout={config.label_dropout}"
    if guidance != 1 and (config.num_classes == 0 or not knows_none):
        why = "the model has no classes" if config.num_classes == 0 else trained
        raise ValueError(f"guidance is {guidance}, but {why}, expected 1")
    if labels is None:
        if not knows_none:
            raise ValueError(f"labels is None, but {trained}, expected a class for each image")
        if guidance != 1:
            raise ValueError(f"guidance is {guidance}, but labels is None, expected 1")
        return None
    chosen = torch.as_tensor(labels, device="cpu")
    if config.num_classes == 0:
        raise ValueError("labels are given, but the model has no classes, expected None")
    if chosen.shape != (count,) or chosen.is_floating_point():
        raise ValueError(
            f"labels has shape {tuple(chosen.shape)} and dtype {chosen.dtype}, expected ({count},) "
            "whole numbers, one for each seed"
        )
    last = config.num_classes if knows_none else config.num_classes - 1
    for label in chosen.tolist():
        if not 0 <= label <= last:
            none = f", or {config.num_classes} for none" if knows_none else ""
            raise ValueError(f"labels has {label}, expected 0 to {config.num_classes - 1}{none}")
    return chosen.long()


def _check_size(config: DenoiserConfig, size: tuple[int, int]) -> None:
    if any(side < p or side % p for side, p in zip(size, config.patch_size, strict=True)):
        raise ValueError(
            f"size is {size[0]} x {size[1]}, expected multiples of the model's patches, "
            f"{config.patch_size[0]} x {config.patch_size[1]}"
        )


def _check_variances(config: DenoiserConfig, scheduler: Any) -> None:
    wanted = scheduler.config.get("variance_type")
    if not isinstance(scheduler, DDPMScheduler) or wanted not in LEARNT:
        return
    if not config.learn_sigma or wanted != "learned_range":
        tells = "a range of variances" if config.learn_sigma else "no variances"
        expected = "learned_range" if config.learn_sigma else "fixed_small"
        raise ValueError(
            f"scheduler has variance_type={wanted!r}, but the model tells {tells}, expected "
            f"{expected!r}"
        )


def _generator(seed: Chance) -> torch.Generator:
    return torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Put each part of a model into evaluation mode for a while."""
    parts = model.modules() if isinstance(model, nn.Module) else ()
    modes = {part: part.training for part in parts}
    try:
        for part in modes:
            part.training = False
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
