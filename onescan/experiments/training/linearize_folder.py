"""Linearize a saved transformers encoder on text, on a table of texts or on a folder of images.

Data, loss, metrics and evaluation are those of onescan's own tasks. Adapters give a transformers
model the interface of a native model, which these tasks expect.
"""

import math
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from onescan.checkpoint.files import check_writable, write_atomically
from onescan.checkpoint.hub import find_folder
from onescan.checkpoint.run_folder import LINEARIZED
from onescan.checks import LOAD_ERRORS, check_choice, check_positive, check_whole, in_a_line
from onescan.experiments.data import DeitAugmentConfig, derive_seed
from onescan.experiments.data.base import listed
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
from onescan.experiments.training.folder import write_json
from onescan.experiments.training.linearize import Linearized, Report, linearize
from onescan.experiments.training.processed_images import image_format, open_images, pair
from onescan.inference.loading import is_run
from onescan.inputs.images import ImageFormat
from onescan.inputs.tokenizer import load_tokenizer
from onescan.messages import missing_package, plural
from onescan.nn.multihead import KINDS
from onescan.nn.replace import Replacement, build_replacements
from onescan.shapes import Tokens
from onescan.zoo import resolve

DEFAULT_LENGTH, MIN_LENGTH = 128, 6  # tokens per text
RESULTS = "linearize.json"
NUMBERED = re.compile("LABEL_[0-9]+")
IMAGES, MASKED, CLASSES = "ImageClassification", "MaskedLM", "SequenceClassification"
DECODERS = ("CausalLM", "LMHeadModel")


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
    options = _check(source, data, out, config)
    source = str(find_folder(source))
    model, processor = _load(source)
    attention = _replaceable(model, config, options)
    task, adapter, grid = _open(model, processor, attention[0], source, data, config)
    task.steps_per_epoch(config.batch_size)  # checks that there are enough examples
    adapter.to(device)
    original = evaluate(adapter, task).metrics
    loader = Loader(
        task.train,
        task.batches(step=0, batch_size=config.batch_size, seed=config.seed),
        workers=choose_workers(None, task.train),
    )
    torch.manual_seed(derive_seed(config.seed, "model"))
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


def _check(source: str, data: str, out: Path, config: LinearizeConfig) -> dict[str, Any]:
    """Check the arguments before anything is read; return the options of the attention layers."""
    for name, path in (("model", source), ("data", data)):
        if not path.strip():
            raise ValueError(f"{name} is {path!r}, expected a path or a name")
    check_choice("kind", config.kind, KINDS)
    if config.decay is not None and config.kind == "lightnet":
        raise ValueError(f"decay is {config.decay!r} with kind='lightnet', expected None")
    check_whole(0, transfer_steps=config.transfer_steps, steps=config.steps)
    check_whole(1, batch_size=config.batch_size)
    if config.length is not None:
        check_whole(1, length=config.length)
    if config.softmax_every is not None:
        check_whole(2, softmax_every=config.softmax_every)
    check_positive(
        transfer_learning_rate=config.transfer_learning_rate, learning_rate=config.learning_rate
    )
    if os.path.lexists(out):
        raise FileExistsError(f"{out} already exists, expected a new folder")
    check_writable("out", out, folder=True)
    if (run_path := Path(resolve(source))).exists() and is_run(run_path):
        raise ValueError(
            f"model {source!r} is a native onescan model, expected a transformers model; if it has "
            "softmax attention, use onescan train linearize_vit or linearize_gpt2"
        )
    return {} if config.decay is None else {"decay": config.decay}


def _replaceable(model: Any, config: LinearizeConfig, options: dict[str, Any]) -> list[str]:
    """Return the names of the modules to replace.

    Raises:
        ValueError: If they cannot be replaced, or if the options do not fit.
    """
    arguments = Replacement(kind=config.kind, options=options)
    with warnings.catch_warnings(action="ignore"):  # `linearize` warns
        return list(build_replacements(model, arguments, exclude=config.exclude))


def _transformers() -> Any:
    """Import transformers."""
    try:
        import transformers
    except ImportError as error:
        raise missing_package("onescan linearize", "transformers", "text", error) from error
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
        "notes": outcome.notes,
        "replaced": outcome.linearized.replaced,
        "kept": outcome.linearized.kept,
        "transfer_losses": {
            name: losses[-1:] for name, losses in outcome.linearized.transfer_losses.items()
        },
    }
    write_json(folder / RESULTS, results)


def _load(source: str) -> tuple[Any, Any]:
    """Load a model with a supported head, and its tokenizer or image processor."""
    transformers = _transformers()
    safe: Any = {"trust_remote_code": False}
    try:
        name = _architecture(transformers.PreTrainedConfig.get_config_dict(source)[0])
        auto: Any = getattr(transformers, f"AutoModelFor{name.rpartition('For')[2]}")
        model, info = auto.from_pretrained(
            source, use_safetensors=True, dtype=torch.float32, output_loading_info=True, **safe
        )
        if missing := sorted(info["missing_keys"]):
            raise ValueError(
                f"its files lack {plural(len(missing), 'tensor')} of {type(model).__name__}, such "
                f"as {missing[0]}; they may belong to a model with another head or number of layers"
            )
        if name.endswith(IMAGES):
            processor = transformers.AutoImageProcessor.from_pretrained(source, **safe)
        else:
            processor = transformers.AutoTokenizer.from_pretrained(source, **safe)
            _check_tokenizer(processor, model)
        if not name.endswith(MASKED):
            _check_problem(model.config)
    except LOAD_ERRORS as error:
        raise ValueError(f"model {source!r} cannot be linearized: {in_a_line(error)}") from error
    return model, processor


def _architecture(fields: dict[str, Any]) -> str:
    """Return the class of a saved model, from the fields of its config.json."""
    if fields.get("model_type") == LINEARIZED:
        raise ValueError("its attention is already linear")
    names = fields.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ValueError(
            f"architectures is {names!r} in its config.json, expected a list with the name of the "
            "model's class"
        )
    if names[0].endswith(DECODERS):
        raise ValueError(
            f"it is {names[0]}, a decoder, and only encoders are supported; for GPT-2, use onescan "
            "convert MODEL --out FOLDER, then onescan train linearize_gpt2 --init-from FOLDER "
            "--data.path FILE"
        )
    if not names[0].endswith((IMAGES, MASKED, CLASSES)):
        raise ValueError(
            f"it is {names[0]}, expected a class whose name ends in For{MASKED}, For{CLASSES} or "
            f"For{IMAGES}; for other models, call onescan.linearize in Python"
        )
    return names[0]


def _check_tokenizer(tokenizer: Any, model: Any) -> None:
    """Raise ValueError if a tokenizer has no words, or more tokens than the model."""
    ids, size = set(tokenizer.get_vocab().values()), getattr(model.config, "vocab_size", math.inf)
    if len(ids - set(tokenizer.all_special_ids)) <= 1:  # perhaps a space
        raise ValueError(
            "its tokenizer has only special tokens: are files of the tokenizer missing, such as "
            "tokenizer.json?"
        )
    if max(ids) >= size:
        raise ValueError(
            f"its tokenizer has token ids up to {max(ids)}, but the model has {size} tokens"
        )


def _check_problem(config: Any) -> None:
    """Raise ValueError unless a classifier chooses one of several classes."""
    if config.problem_type not in (None, "single_label_classification"):
        raise ValueError(
            f"problem_type is {config.problem_type!r} in its config.json, expected "
            "'single_label_classification': each example has one class"
        )
    if config.num_labels < 2:  # noqa: PLR2004
        raise ValueError(f"it has {plural(config.num_labels, 'class')}, expected two or more")


class Adapter(nn.Module):
    """A transformers model with the interface of a native one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model


class ClassAdapter(Adapter):
    """A classifier whose classes are in the order of the data.

    Args:
        model: The transformers model.
        order: The model's class of each class of the data.
    """

    order: Tensor

    def __init__(self, model: Any, order: list[int]) -> None:
        super().__init__(model)
        self.register_buffer("order", torch.tensor(order))

    def forward(self, x: Tensor, keep: Tensor | None = None, *, segments: None = None) -> Tensor:
        if keep is None:
            logits: Tensor = self.model(pixel_values=x).logits
        else:
            logits = self.model(input_ids=x, attention_mask=keep.long()).logits
        return logits[:, self.order]


class WholeRows(MaskedLanguageModelling):
    """Masked language modeling in which tokens read the whole row, as in transformers models."""

    def apply(
        self, model: nn.Module, masked: Tokens, documents: Int[Tensor, "B row"], **options: Any
    ) -> Any:
        device = next(model.parameters()).device
        return model(masked.to(device), (documents >= 0).to(device), **options)


class MaskedAdapter(Adapter):
    """A masked language model."""

    def forward(
        self, tokens: Tensor, keep: Tensor, *, positions: Tensor | None = None, read_outs: int = 1
    ) -> Any:
        assert read_outs == 1
        logits = self.model(input_ids=tokens, attention_mask=keep.long()).logits
        return logits if positions is None else logits.flatten(0, 1)[None, positions]


def _open(
    model: Any, processor: Any, attention: str, source: str, data: str, config: LinearizeConfig
) -> tuple[Task, Adapter, dict[str, Any]]:
    """Open the data; return the task, the adapter, and the shape of the tokens and their prefix.

    Args:
        model: The model, on the CPU.
        processor: Its tokenizer or image processor.
        attention: Name of an attention module of the model.
        source: Folder of the model.
        data: Path of the data.
        config: Settings.
    """
    name = type(model).__name__
    if name.endswith(IMAGES):
        format = image_format(model, processor)
        grid = _grid(model, attention, format)
        images = open_images(data, format, config)
        pad = min(format.height, format.width) // 8  # as is usual for CIFAR
        augment = DeitAugmentConfig(num_ops=0, random_erasing=0.0, pad=pad)
        task: Any = ImageClassificationConfig(augment=augment if config.augment else None)
        return *_classify(model, task, images), grid
    length = _length(model, config.length)
    _check_length(model, processor, length)
    text: Any = {
        "path": data,
        "tokenizer": source,
        "length": length,
        "text_column": config.text_column,
        "test_fraction": config.test_fraction,
        "on_error": config.on_error,
    }
    if name.endswith(CLASSES):
        table = TextTableConfig(**text, label_column=config.label_column or "label").build()
        return *_classify(model, SequenceClassificationConfig(), table), {}
    framed = load_tokenizer(source).frame is not None
    corpus = TextDatasetConfig(**text, add_special_tokens=framed).build()
    masked = MaskedLanguageModellingConfig()
    masked.build(corpus)  # checks the tokenizer
    rows = WholeRows(masked, corpus)
    rows.notes = corpus.notes
    return rows, MaskedAdapter(model), {}


def _classify(model: Any, config: Any, splits: Any) -> tuple[Task, Adapter]:
    """Build the task and the adapter of a classifier."""
    order, notes = match_classes(model.config, splits.class_names)
    task: Task = config.build(splits)
    task.notes = (*splits.notes, *notes)
    return task, ClassAdapter(model, order)


# Texts


def _length(model: Any, length: int | None) -> int:
    """Return the number of tokens per text, by default at most `DEFAULT_LENGTH`.

    Raises:
        ValueError: If the model has fewer positions.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is None:
        return length or DEFAULT_LENGTH
    for name, module in model.named_modules():
        first = getattr(module, "padding_idx", None)
        if name.rpartition(".")[2] == "position_embeddings" and first is not None:
            positions -= first + 1  # positions begin after the padding id
            break
    if length is not None and length > positions:
        raise ValueError(f"length is {length}, but the model has {positions} positions")
    return length or min(DEFAULT_LENGTH, positions)


def _check_length(model: Any, tokenizer: Any, length: int) -> None:
    """Raise ValueError if the model cannot read a text of this many tokens."""
    if length < MIN_LENGTH:
        raise ValueError(f"length is {length}, expected {MIN_LENGTH} or more")
    token = max(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    tokens = torch.full((1, length), token)
    _try(model, f"a text of {length} tokens", input_ids=tokens, attention_mask=tokens * 0 + 1)


def _try(model: Any, what: str, **inputs: Tensor) -> None:
    """Raise ValueError if a model raises an error."""
    try:
        with torch.no_grad():
            model.eval()(**inputs)
    except LOAD_ERRORS as error:
        raise ValueError(f"the model cannot read {what}: {in_a_line(error)}") from error


# Images


def _grid(model: Any, attention: str, format: ImageFormat) -> dict[str, Any]:
    """Return the shape of a model's patches and the number of tokens before them, if it has any.

    Raises:
        ValueError: If the model cannot read images of this format.
    """
    seen: list[int] = []
    hook = model.get_submodule(attention).register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(next(iter((*args, *kwargs.values()))).shape[1]),
        with_kwargs=True,
    )
    what = f"images of {format.height} x {format.width} pixels, as its image processor makes them"
    images = torch.zeros(1, format.channels, format.height, format.width)
    _try(model, what, pixel_values=images)
    hook.remove()
    patch = getattr(getattr(model.config, "vision_config", model.config), "patch_size", None)
    if patch is None or not seen:
        return {}
    sizes = zip((format.height, format.width), pair(patch), strict=True)
    shape = tuple(pixels // patch_pixels for pixels, patch_pixels in sizes)
    prefix = seen[0] - math.prod(shape)
    return {"shape": shape, "prefix": prefix} if prefix >= 0 else {}


# Classes


def match_classes(config: Any, names: tuple[str, ...]) -> tuple[list[int], list[str]]:
    """Match the classes of the data with those of a model, by name or by number.

    If the model's classes are only numbered, its config gets the names of the data.

    Args:
        config: Config of the model.
        names: Names of the classes of the data.

    Returns:
        The model's class of each class of the data; and notes.

    Raises:
        ValueError: If they are not the same classes.
    """
    count = config.num_labels
    known = [str(config.id2label.get(i)) for i in range(count)]
    if sorted(known) == sorted(names):
        return [known.index(name) for name in names], []
    is_numbered = all(map(NUMBERED.fullmatch, known))
    ordered = sorted(names, key=_by_number)
    are_indices = all(re.fullmatch("[0-9]+", name) for name in names) and (
        [int(name) for name in ordered] == list(range(count))
    )
    is_match = are_indices or (is_numbered and not any(map(NUMBERED.fullmatch, names)))
    if len(names) != count or not is_match:
        raise ValueError(
            f"data has the classes {listed(names)}, but the model has "
            f"{plural(count, 'class') if is_numbered else listed(known)}"
        )
    order, notes = [ordered.index(name) for name in names], []
    if not (is_numbered and are_indices):
        pairs = [f"{name} is {known[i]}" for i, name in enumerate(ordered)]
        notes = [f"classes of the data, and of the model: {listed(pairs)}"]
    if is_numbered and not are_indices:
        config.id2label = dict(enumerate(ordered))
        config.label2id = {name: i for i, name in enumerate(ordered)}
    return order, notes


def _by_number(name: str) -> list[str | int]:
    """Return the key that sorts names by the numbers in them."""
    parts = re.split("([0-9]+)", name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)]


def _batches(loader: Loader, task: Task, seed: int, device: torch.device) -> Iterator[Batch]:
    """Yield the batches, augmented and masked."""
    for step, batch in enumerate(loader):
        step_seed = derive_seed(seed, "step", step)
        yield task.corrupt(task.augment(task.to_device(batch, device), step_seed), step_seed)
