"""Apply a trained model to images, and classify texts."""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from onescan.inputs import ArrayFormat, Format, ImageFormat, PairFormat, TextFormat, read_image
from onescan.inputs.pairs import PairEncoder
from onescan.inputs.sequences import pad_tokens
from onescan.inputs.targets import CLASSES, Target
from onescan.models.denoiser import Denoiser


@torch.no_grad()
def classify(
    model: nn.Module, paths: Sequence[str | Path], format: Format, target: Target = CLASSES
) -> Float[Tensor, "images outputs"]:
    """Read image files and return the probability of each class or label, or the values.

    Args:
        model: Model in evaluation mode, as `load` returns it.
        paths: Image files of any size.
        format: Format that the model was trained on, as `load` returns it.
        target: What the model predicts, as `load` returns it.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If there are no paths, a file is not a complete image, or the model does not
            classify images.
    """
    if not paths:
        raise ValueError("paths is empty, expected at least one image file")
    format = image_format(format, paths[0])
    _check_classifier(model)
    device = next(model.parameters()).device
    images = (read_image(path, format)[None].to(device) for path in paths)
    return torch.cat([target.predictions(model(image)).cpu() for image in images])


def image_format(format: Format, path: str | Path) -> ImageFormat:
    """Return the format of a model that reads image files.

    Raises:
        ValueError: If the model does not read image files. The message names `path`.
    """
    if not isinstance(format, ImageFormat):
        raise ValueError(f"the model reads {_inputs(format)}, not '{path}'")
    return format


def _inputs(format: Format) -> str:
    """Describe what a model reads, for messages.

    >>> from onescan.inputs import ArrayFormat
    >>> _inputs(ArrayFormat(channels=2, shape=(200,), mean=(0.0, 0.0), std=(1.0, 1.0)))
    'arrays (.npz or .npy files)'
    """
    if isinstance(format, ArrayFormat):
        return "arrays (.npz or .npy files)"
    return "text" if isinstance(format, PairFormat | TextFormat) else "other data"


def _check_classifier(model: nn.Module) -> None:
    if isinstance(model, Denoiser):
        raise ValueError("the model is a Denoiser, which generates images, expected a classifier")


@torch.no_grad()
def classify_texts(
    model: nn.Module, texts: Sequence[str], encoder: PairEncoder, *, batch_size: int = 64
) -> Float[Tensor, "texts classes"]:
    """Return the probability of each class for texts.

    Args:
        model: Text classifier in evaluation mode, as `load` returns it.
        texts: One or more texts.
        encoder: Encoder of its format, as `PairFormat.open` returns it.
        batch_size: Texts per batch; affects memory, and results only by rounding.

    Raises:
        ValueError: If a text has no tokens.
    """
    device = next(model.parameters()).device
    rows = []
    for start in range(0, len(texts), batch_size):
        batch = texts[start : start + batch_size]
        tokens, keep = pad_tokens([encoder.encode(text)[0] for text in batch])
        rows.append(model(tokens.to(device), keep.to(device)).float().softmax(dim=1).cpu())
    return torch.cat(rows)
