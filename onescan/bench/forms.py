"""What each form of a model's mixer costs: one forward over image sizes, and over chunk sizes."""

import math
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from tqdm import tqdm

from onescan import __version__, configs
from onescan.bench.form_costs import Cost, FormCosts, LeftOut, Machine, Variant, going_on
from onescan.bench.timing import measure
from onescan.checks import check_choice, check_positive
from onescan.configs import ModelConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.training.distributed import Ranks, choose_device
from onescan.training.folder import write_json

FORMS = "forms.json"
CHUNK = "chunk"  # the form that has a chunk size


@dataclass(frozen=True, kw_only=True)
class FormsConfig:
    """Options of the benchmark of a model's forms."""

    image_sizes: tuple[int, ...] = (224, 320, 448, 640, 896, 1248)
    """Sides of the square images, in pixels."""
    forms: tuple[str, ...] = ()
    """Forms of the mixer to measure; by default all that the model supports."""
    chunk_sizes: tuple[int, ...] = (16, 64, 256)
    """Tokens per chunk; the chunk form is measured with each."""
    batch_size: int = 1
    """Images per call."""
    time_limit_s: float = 60.0
    """Skip larger images for a form whose forward pass takes longer than this, in seconds."""
    device: str = "auto"
    """Device: cpu, cuda, ...; auto uses a GPU if there is one."""


def measure_forms(
    name: str, model: ModelConfig, asked: FormsConfig, folder: Path, *, progress: bool = False
) -> FormCosts:
    """Measure a forward without gradients, each time in a new process, and keep it in forms.json.

    What the folder's forms.json already holds is not measured again.

    Args:
        name: of the model.
        model: an image classifier whose mixer has a field `form`.
        asked: what to measure.
        folder: where forms.json is, or will be.
        progress: whether to draw a bar on stderr.

    Raises:
        ValueError: the model has no forms, or not one that is asked for; its patches do not divide
            an image; a number is not positive; there is no such device; or the folder holds
            measurements of something else.
        OSError: forms.json cannot be written.
    """
    asked = _check(name, model, asked)
    machine = _machine(asked.device)
    fresh = FormCosts(name=name, model=model, batch_size=asked.batch_size, machine=machine)
    known = going_on(folder / FORMS, fresh)
    write_json(folder / FORMS, configs.to_dict(known))  # or it fails before the first measurement
    plan = [(variant, size) for variant in _variants(asked) for size in sorted(asked.image_sizes)]
    with tqdm(total=len(plan), unit=" forwards", disable=not progress) as bar:
        for variant, size in plan:
            bar.set_description(f"{variant.name}, {size} pixels")
            if not known.gave_up(variant):
                known = _with_one(known, variant, size, asked)
                write_json(folder / FORMS, configs.to_dict(known))
            bar.update()
    return known


def configured(model: ModelConfig, variant: Variant, size: int) -> ModelConfig:
    """The model in one form, for square images of one size."""
    changes: dict[str, Any] = {"image_size": (size, size), "mixer.form": variant.form}
    if variant.chunk_size is not None:
        changes["mixer.chunk_size"] = variant.chunk_size
    return configs.replace(model, changes)


def _with_one(known: FormCosts, variant: Variant, size: int, asked: FormsConfig) -> FormCosts:
    """Add what a variant costs on images of one size, or why that is left out."""
    costs = known.of(variant)
    if any(cost.size == size for cost in costs):
        return known
    slow = [c for c in costs if c.size < size and c.median_ms > 1000 * asked.time_limit_s]
    if slow:
        took = f"at {slow[0].size} one took {slow[0].median_ms / 1000:.3g} s"
        return _without(known, LeftOut(variant=variant, size=size, why=took))
    each = configured(known.model, variant, size)
    try:
        median_ms, peak_mib = measure(_prepare, each, asked.batch_size, asked.device)
    except RuntimeError:
        died = "its process died: memory may have run out"
        return _without(known, LeftOut(variant=variant, size=size, why=died))
    cost = Cost(variant=variant, size=size, median_ms=median_ms, peak_mib=peak_mib)
    return replace(known, costs=(*known.costs, cost))


def _without(known: FormCosts, what: LeftOut) -> FormCosts:
    return replace(known, left_out=(*known.left_out, what))


def _prepare(
    model: ImageClassifierConfig, batch_size: int, device_name: str
) -> Callable[[], object]:
    device = choose_device(device_name, Ranks())
    network = model.build().eval().to(device)
    images = torch.rand(batch_size, model.channels, *model.image_size, device=device)

    @torch.no_grad()
    def forward() -> object:
        return network(images)

    return forward


def _variants(asked: FormsConfig) -> Iterator[Variant]:
    for form in asked.forms:
        if form == CHUNK:
            yield from (Variant(form=form, chunk_size=size) for size in asked.chunk_sizes)
        else:
            yield Variant(form=form)


def _check(name: str, model: ModelConfig, asked: FormsConfig) -> FormsConfig:
    """What is asked for, spelt out."""
    if not isinstance(model, ImageClassifierConfig) or not hasattr(model.mixer, "form"):
        raise ValueError(f"{name} has no forms, expected an image classifier whose mixer has some")
    check_positive(batch_size=asked.batch_size, time_limit_s=asked.time_limit_s)
    known = get_args(get_type_hints(type(model.mixer))["form"])[1:]  # the first is "auto"
    for form in asked.forms:
        check_choice("form", form, known)
    if not asked.forms:
        asked = replace(asked, forms=tuple(form for form in known if _runs(model, form)))
    for argument in ("image_sizes", "forms", "chunk_sizes"):
        values = getattr(asked, argument)
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{argument} is {values}, expected at least one, and each once")
    for size in asked.image_sizes:
        if size < 1 or any(size % side for side in model.patch_size):
            patch = " x ".join(map(str, model.patch_size))
            raise ValueError(
                f"image_sizes has {size}, expected a multiple of the patch size {patch}"
            )
    for variant in _variants(asked):
        _try(model, variant)
    return asked


def _runs(model: ImageClassifierConfig, form: str) -> bool:
    try:
        _try(model, Variant(form=form))
    except ValueError:
        return False
    return True


def _try(model: ImageClassifierConfig, variant: Variant) -> None:
    """Let a form refuse what it cannot do, on an image of few patches that has no pixels."""
    with torch.device("meta"), torch.no_grad():
        small = configured(model, variant, math.lcm(*model.patch_size))
        assert isinstance(small, ImageClassifierConfig)
        small.build().eval()(torch.zeros(1, small.channels, *small.patch_size))


def _machine(device_name: str) -> Machine:
    device = choose_device(device_name, Ranks())
    return Machine(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        platform=platform.platform(),
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        onescan=__version__,
    )
