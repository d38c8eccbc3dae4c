"""Apply a trained model that predicts a class or values at each position."""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from onescan.inference.loading import Checkpoint
from onescan.inference.windows import predict_large
from onescan.inputs import ImageFormat, read_image
from onescan.inputs.image_files import read_header
from onescan.inputs.volumes import Volume, VolumeFormat, read_values, resample
from onescan.shapes import Grids

BYTE = 256
OVERLAP = 0.5  # of windows, if the run does not set it
# Golden angle, as a fraction of the circle. Its multiples are distinct, so they are the hues of all
# classes but the first one, which is black.
GOLDEN_ANGLE = 0.381966

Outputs = Float[Tensor, "outputs *sides"]


@torch.no_grad()
def predict_map(checkpoint: Checkpoint, grid: Grids, *, batch_size: int = 4) -> Outputs:
    """Predict the probability of each class, or the values, at each position.

    A model that was trained with windows reads windows of the same size.

    Args:
        checkpoint: A trained model, as `load` returns it.
        grid: One grid of any size, standardized by the format, of shape [1, C, *sides].
        batch_size: Windows per batch; affects memory, and results only by rounding.

    Raises:
        ValueError: If the grid has another shape.
    """
    axes = getattr(checkpoint.format, "axes", grid.ndim - 2)
    if grid.ndim != axes + 2 or len(grid) != 1:
        raise ValueError(
            f"grid has shape {tuple(grid.shape)}, expected [1, channels, *sides] with {axes} axes"
        )
    task: Any = checkpoint.run.get("task")
    settings = task if isinstance(task, dict) else {}
    window = tuple(settings.get("window", ()))
    overlap = settings.get("window_overlap", OVERLAP)
    model = checkpoint.model
    device = next(model.parameters()).device
    outputs = predict_large(model, grid.to(device), window, overlap, batch_size=batch_size)
    return checkpoint.target.predictions(outputs)[0].cpu()


def predict_file(checkpoint: Checkpoint, path: str | Path, *, batch_size: int = 4) -> Outputs:
    """Predict the probability of each class, or the values, at each pixel of an image file.

    The image is resized for the model, and the prediction to the size of the upright image. The
    batch size is that of `predict_map`.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not an image file or is damaged, or the model does not read images.
    """
    format = checkpoint.format
    if not isinstance(format, ImageFormat):
        raise ValueError(f"the model reads arrays (.npz or .npy files), not '{path}'")
    outputs = predict_map(checkpoint, read_image(path, format)[None], batch_size=batch_size)
    header = read_header(Path(path))
    size = (header.height, header.width)
    return interpolate(outputs[None], size, mode="bilinear", antialias=True)[0]


def predict_volume(checkpoint: Checkpoint, volume: Volume, *, batch_size: int = 4) -> Outputs:
    """Predict the probability of each class at each voxel of a volume.

    The volume is resampled for the model, and the probabilities to the size of the volume. The
    batch size is that of `predict_map`.

    Returns:
        Probabilities of shape [classes, *sides], with the axes of `VolumeFormat`.

    Raises:
        ValueError: If the volume is damaged or has other channels than the training data, or the
            model does not read volumes.
    """
    format = checkpoint.format
    if not isinstance(format, VolumeFormat):
        raise ValueError(f"the model does not read NIfTI files, such as {volume.file}")
    values = format.model_input(read_values(volume, format))
    outputs = predict_map(checkpoint, values[None], batch_size=batch_size)
    return resample(outputs, volume.sides)


def map_picture(classes: Int[Tensor, "height width"]) -> Image.Image:
    """Return an image whose pixel values are the classes, in colors if there are at most 256."""
    if int(classes.max()) >= BYTE:
        return Image.fromarray(classes.numpy().astype("uint16"))
    picture = Image.fromarray(classes.numpy().astype("uint8"), mode="P")
    picture.putpalette(class_colors(BYTE).flatten().tolist())
    return picture


def class_colors(count: int) -> Int[Tensor, "classes 3"]:
    """Return colors of classes, from 0 to 255: black, and then distinct hues."""
    import colorsys

    colors = [(0.0, 0.0, 0.0)]
    colors += [
        colorsys.hsv_to_rgb((GOLDEN_ANGLE * i) % 1, 0.75, 1.0 if i % 2 else 0.7)
        for i in range(1, count)
    ]
    return (torch.tensor(colors[:count]) * 255).round().long()
