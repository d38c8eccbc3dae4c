"""Linearize a saved transformers encoder on text, on a table of texts or on a folder of images.

Data, loss, metrics and evaluation are those of onescan's own tasks. Adapters give a transformers
model the interface of a native model, which these tasks expect.
"""

import json
import math
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onescan.checkpoint.files import write_atomically, write_text_atomically
from onescan.checkpoint.hub import find_folder
from onescan.checks import LOAD_ERRORS, check_choice, check_positive, in_a_line
from onescan.experiments.data import DeitAugmentConfig, ImageDatasetConfig, derive_seed
from onescan.experiments.data.text import TextDatasetConfig
from onescan.experiments.data.text_table import TextTableConfig
from onescan.experiments.linearize_config import LinearizeConfig
from onescan.experiments.tasks import (
    Batch,
    ImageClassificationConfig,
    MaskedLanguageModelling,
    MaskedLanguageModellingConfig,
    SequenceClassificationConfig,
    Task,
)
from onescan.experiments.training.data import Loader, choose_workers
from onescan.experiments.training.evaluation import evaluate
from onescan.experiments.training.linearize import Linearized, Report, linearize
from onescan.inputs.tokenizer import load_tokenizer
from onescan.messages import missing_package
from onescan.nn.multihead import KINDS
from onescan.nn.replace import find_attention
from onescan.shapes import Tokens

# model types whose positions begin after the padding id
OFFSET = ("camembert", "data2vec-text", "esm", "roberta", "xlm-roberta", "xlm-roberta-xl", "xmod")
LENGTH = 128
RESULTS = "linearize.json"
IMAGES, MASKED, CLASSES = "ImageClassification", "MaskedLM", "SequenceClassification"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of `linearize_folder`.

    Attributes:
        linearized: What was replaced, and the losses.
        original: Metrics of the original model on the held-out examples.
        linear: Metrics of the linear model on the same examples.
        notes: What was left out or inferred when the data was opened.
    """

    linearized: Linearized
    original: dict[str, float]
    linear: dict[str, float]
    notes: tuple[str, ...]


def linearize_folder(
    source: str,
    data: str,
    out: Path,
    config: LinearizeConfig,
    *,
    device: torch.device,
    report: Report | None = None,
) -> Outcome:
    """Linearize a saved model, and save the result for `load_linearized`.

    Args:
        source: Folder or hub name of a transformers model, ...ForMaskedLM,
            ...ForSequenceClassification or ...ForImageClassification, with its tokenizer or image
            processor.
        data: Text, a table of texts and labels, or a folder of images, one subfolder per class.
        out: Folder to write, which must not exist.
        config: Settings.
        device: Device to train on.
        report: See `linearize`.

    Raises:
        ValueError: If the model or the data cannot be read, or if they do not fit each other.
        FileExistsError: If the output folder exists.
        FileNotFoundError: If there is no such model.
    """
    check_positive(batch_size=config.batch_size)
    if config.length is not None:
        check_positive(length=config.length)
    options = _options(config)
    if out.exists():
        raise FileExistsError(f"{out} already exists, expected a new folder")
    source = str(find_folder(source))
    model, processor = _load(source)
    torch.manual_seed(derive_seed(config.seed, "model"))
    model.to(device)
    task, adapter = _task(model, source, data, config)
    grid = _grid(model, config.exclude) if isinstance(adapter, ImageAdapter) else {}
    original = evaluate(adapter, task).metrics
    loader = Loader(
        task.train,
        task.batches(step=0, batch_size=config.batch_size, seed=config.seed),
        workers=choose_workers(None, task.train),
    )
    with closing(loader):
        done = linearize(
            model,
            _batches(loader, task, config.seed, device),
            config.kind,
            **grid,
            **options,
            exclude=config.exclude,
            softmax_every=config.softmax_every,
            transfer_steps=config.transfer_steps,
            transfer_learning_rate=config.transfer_learning_rate,
            steps=config.steps,
            learning_rate=config.learning_rate,
            loss=lambda _, batch: task.loss(adapter, batch)[0],
            report=report,
        )
    model.eval()
    outcome = Outcome(
        linearized=done,
        original=original,
        linear=evaluate(adapter, task).metrics,
        notes=tuple(task.notes),
    )
    write_atomically(out, lambda partial: _save(model, processor, config, outcome, partial))
    return outcome


def _options(config: LinearizeConfig) -> dict[str, Any]:
    """Return the options of the attention layers."""
    check_choice("kind", config.kind, KINDS)
    if config.decay is None:
        return {}
    if config.kind == "lightnet":
        raise ValueError(f"decay is {config.decay!r} with kind='lightnet', expected None")
    return {"decay": config.decay}


def _transformers() -> Any:
    """Import transformers."""
    try:
        import transformers
    except ImportError as error:
        raise missing_package("onescan linearize", "transformers", "text") from error
    return transformers


def _save(
    model: Any, processor: Any, config: LinearizeConfig, outcome: Outcome, folder: Path
) -> None:
    from onescan.integrations.transformers import save_linearized

    save_linearized(model, folder, processor=processor)
    results = {
        "settings": asdict(config),
        "original": outcome.original,
        "linear": outcome.linear,
        "replaced": outcome.linearized.replaced,
        "kept": outcome.linearized.kept,
        "transfer_losses": {
            name: losses[-1:] for name, losses in outcome.linearized.transfer_losses.items()
        },
    }
    write_text_atomically(folder / RESULTS, json.dumps(results, indent=2) + "\n")


def _load(source: str) -> tuple[Any, Any]:
    """Load a model with a supported head, and its tokenizer or image processor."""
    transformers = _transformers()
    safe: Any = {"trust_remote_code": False}
    try:
        fields = transformers.AutoConfig.from_pretrained(source, **safe)
        name = (fields.architectures or ["of unknown class"])[0]
        if not name.endswith((IMAGES, MASKED, CLASSES)):
            raise ValueError(
                f"it is {name}, expected a class whose name ends in For{MASKED}, For{CLASSES} or "
                f"For{IMAGES}; for other models, call onescan.linearize in Python"
            )
        reads_images = name.endswith(IMAGES)
        auto: Any = getattr(transformers, f"AutoModelFor{name.rpartition('For')[2]}")
        model = auto.from_pretrained(source, use_safetensors=True, dtype=torch.float32, **safe)
        kind: Any = transformers.AutoImageProcessor if reads_images else transformers.AutoTokenizer
        processor = kind.from_pretrained(source, **safe)
    except LOAD_ERRORS as error:
        raise ValueError(f"model {source!r} cannot be linearized: {in_a_line(error)}") from error
    return model, processor


class ImageAdapter(nn.Module):
    """A transformers image classifier with the interface of a native one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=images).logits
        return logits


class TextAdapter(nn.Module):
    """A transformers text classifier with the interface of a native one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, keep: Tensor, *, segments: Tensor | None = None) -> Tensor:
        assert segments is None
        logits: Tensor = self.model(input_ids=tokens, attention_mask=keep.long()).logits
        return logits


class WholeRows(MaskedLanguageModelling):
    """Masked language modeling in which tokens read the whole row, as in transformers models."""

    def apply(self, model: nn.Module, masked: Tokens, documents: Tokens, **options: Any) -> Any:
        device = next(model.parameters()).device
        return model(masked.to(device), (documents >= 0).to(device), **options)


class MaskedAdapter(nn.Module):
    """A transformers masked language model with the interface of a native one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, keep: Tensor, *, positions: Tensor | None = None, read_outs: int = 1
    ) -> Any:
        assert read_outs == 1
        logits = self.model(input_ids=tokens, attention_mask=keep.long()).logits
        return logits if positions is None else logits.flatten(0, 1)[None, positions]


def _task(
    model: Any, source: str, data: str, config: LinearizeConfig
) -> tuple[Task, ImageAdapter | TextAdapter | MaskedAdapter]:
    """Open the data, and build the task and the adapter of the model."""
    name = type(model).__name__
    if name.endswith(IMAGES):
        images = ImageDatasetConfig(path=data, **_image_format(model, source)).build()
        _check_classes(model, images.class_names)
        augment = DeitAugmentConfig(num_ops=0, random_erasing=0.0, pad=_pad(model))
        task: Any = ImageClassificationConfig(augment=augment if config.augment else None)
        return task.build(images), ImageAdapter(model)
    length = _length(model, config.length)
    if name.endswith(CLASSES):
        table = TextTableConfig(path=data, tokenizer=source, length=length).build()
        _check_classes(model, table.class_names)
        return SequenceClassificationConfig().build(table), TextAdapter(model)
    framed = load_tokenizer(source).frame is not None
    text = TextDatasetConfig(
        path=data, tokenizer=source, length=length, add_special_tokens=framed
    ).build()
    masked = MaskedLanguageModellingConfig()
    masked.build(text)  # checks the tokenizer
    return WholeRows(masked, text), MaskedAdapter(model)


def _length(model: Any, length: int | None) -> int:
    """Return the number of tokens per text, by default at most `LENGTH`.

    Raises:
        ValueError: If the model has fewer positions.
    """
    most = getattr(model.config, "max_position_embeddings", None)
    if most is None:
        return length or LENGTH
    if model.config.model_type in OFFSET:
        most -= model.config.pad_token_id + 1
    if length is not None and length > most:
        raise ValueError(f"length is {length}, but the model has {most} positions")
    return length or min(LENGTH, most)


def _pad(model: Any) -> int:
    """Return the padding before random crops: an eighth of the image, as is usual for CIFAR."""
    return int(min(_pair(model.config.image_size)) // 8)


def _pair(size: Any) -> tuple[int, int]:
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(height), int(width)


def _image_format(model: Any, source: str) -> dict[str, Any]:
    """Return how the image processor of a model standardizes images, for `ImageDatasetConfig`."""
    processor: Any = _transformers().AutoImageProcessor.from_pretrained(source)
    for name in ("image_mean", "image_std"):
        if getattr(processor, name, None) is None:
            raise ValueError(f"model {source!r} has an image processor without {name}")
    crop = None
    if getattr(processor, "do_center_crop", False):
        side, whole = processor.crop_size["height"], processor.size.get("shortest_edge")
        crop = side / whole if whole else None
    return {
        "image_size": _pair(model.config.image_size),
        "channels": model.config.num_channels,
        "mean": tuple(processor.image_mean),
        "std": tuple(processor.image_std),
        "class_names": _class_names(model),
        "test_crop": crop,
        "train_crop": None,
    }


def _class_names(model: Any) -> tuple[str, ...]:
    """Return the names of a model's classes; empty if they are only numbered."""
    names = tuple(model.config.id2label[i] for i in range(model.config.num_labels))
    return () if all(name.startswith("LABEL_") for name in names) else names


def _check_classes(model: Any, names: tuple[str, ...]) -> None:
    """Raise ValueError if the data has other classes than the model."""
    known, count = _class_names(model), model.config.num_labels
    if len(names) != count or (known and set(known) != set(names)):
        raise ValueError(
            f"data has the classes {', '.join(names)}, but the model has "
            f"{', '.join(known) if known else f'{count} classes'}"
        )
    if known and known != names:
        raise ValueError(f"the model has the classes in another order: {', '.join(known)}")


def _grid(model: Any, exclude: Collection[str]) -> dict[str, Any]:
    """Return the shape of a model's patches and the number of tokens before them."""
    patch = getattr(model.config, "patch_size", None)
    if patch is None:
        return {}
    sides = zip(_pair(model.config.image_size), _pair(patch), strict=True)
    shape = tuple(side // size for side, size in sides)
    seen: list[int] = []
    module = model.get_submodule(next(iter(find_attention(model, exclude, causal=False))))
    hook = module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(next(iter((*args, *kwargs.values()))).shape[1]),
        with_kwargs=True,
    )
    images = torch.zeros(1, model.config.num_channels, *_pair(model.config.image_size))
    with torch.no_grad():
        model.eval()(pixel_values=images.to(next(model.parameters()).device))
    hook.remove()
    prefix = seen[0] - math.prod(shape)
    return {"shape": shape, "prefix": prefix} if prefix >= 0 else {}


def _batches(loader: Loader, task: Task, seed: int, device: torch.device) -> Iterator[Batch]:
    """Yield the batches, augmented and masked."""
    for step, batch in enumerate(loader):
        step_seed = derive_seed(seed, "step", step)
        yield task.corrupt(task.augment(task.to_device(batch, device), step_seed), step_seed)
