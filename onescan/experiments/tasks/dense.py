"""Base class of tasks whose model predicts a class or values at each position of a grid."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from onescan.checks import check_positive
from onescan.configs import ModelConfig
from onescan.experiments.data import ArraySplits, ImageSplits
from onescan.experiments.data.array_maps import IGNORED
from onescan.experiments.data.share import Share
from onescan.experiments.tasks.base import Batch, Metrics, Rows, Task, TaskConfig
from onescan.experiments.tasks.grid import NOUNS, GridTask
from onescan.inference.windows import predict_large
from onescan.inputs.images import AnyGrid, unit_pixels
from onescan.messages import named_type, plural
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.shapes import GridOutputs

Maps = Shaped[Tensor, "B *_"]  # a class, or values, at each position
PerExample = Float[Tensor, " B"]


@dataclass(frozen=True, kw_only=True)
class DenseTaskConfig(TaskConfig):
    """Settings of all tasks that predict a class or values at each position."""

    flip_axes: tuple[int, ...] = ()
    """Axes along which half of the training examples are mirrored, together with their targets: 0
    is the first axis after the channels, which is the height of images."""
    window: tuple[int, ...] = ()
    """Size of a window along each axis, for examples that are too large for memory. Training reads
    a random window of each example; evaluation and prediction use a sliding window and average the
    outputs where windows overlap. () uses whole examples."""
    window_overlap: float = 0.5
    """Overlap of neighboring windows, as a fraction of the window size, at least 0 and below 1."""
    evaluation_batch_size: int = 16
    """Examples per evaluation batch; affects memory, not results."""

    def check_settings(self, data: ImageSplits | ArraySplits) -> None:
        """Raise ValueError if a setting of all dense tasks is out of range."""
        check_positive(**{"task.evaluation_batch_size": self.evaluation_batch_size})
        axes = data.format.axes
        if not set(self.flip_axes) <= set(range(axes)):
            raise ValueError(f"task.flip_axes is {self.flip_axes}, expected axes 0 to {axes - 1}")
        if len(self.window) not in (0, axes):
            raise ValueError(
                f"task.window is {self.window}, expected {plural(axes, 'size')}, or ()"
            )
        check_positive(**{f"task.window[{axis}]": size for axis, size in enumerate(self.window)})
        if not 0 <= self.window_overlap < 1:
            raise ValueError(
                f"task.window_overlap is {self.window_overlap}, expected 0 or more and less than 1"
            )

    def check_model(self, model: ModelConfig) -> None:
        if isinstance(model, ImageClassifierConfig):  # models of users may fit
            raise ValueError(
                f"model is {named_type(model)}, expected a DensePredictorConfig, which predicts a "
                "class or values at each position"
            )


class DenseTask(GridTask):
    """A task with a target at each position of signals, images or volumes."""

    def __init__(self, data: ImageSplits | ArraySplits, config: Any) -> None:
        super().__init__(data, augment=None, evaluation_batch_size=config.evaluation_batch_size)
        self.window: tuple[int, ...] = config.window
        self.train = data.train.windowed(self.window)
        self.overlap: float = config.window_overlap
        self.flip_axes: tuple[int, ...] = config.flip_axes

    def shard(self, share: Share) -> None:
        Task.shard(self, share)

    def augment(self, batch: Batch, seed: int) -> Batch:
        """Cut a random window out of each example, and mirror half of them along each axis."""
        batch = (unit_pixels(batch[0]), *batch[1:])
        if not (self.window or self.flip_axes):
            return batch
        generator = torch.Generator().manual_seed(seed)
        sizes = tuple(batch[0].shape[2:])
        window = self.window or sizes
        examples = []
        for row, real in enumerate(_real_sizes(batch)):
            box: list[Any] = [...]
            reverse: list[int] = []
            for axis, (length, size) in enumerate(zip(real, window, strict=True)):
                first = int(torch.randint(max(length - size, 0) + 1, (), generator=generator))
                is_mirrored = bool(torch.rand((), generator=generator) < 0.5)  # noqa: PLR2004
                box.append(slice(first, min(first + size, length)))
                reverse += [axis - len(sizes)] * (is_mirrored and axis in self.flip_axes)
            examples.append([part[row][tuple(box)].flip(reverse) for part in batch])
        return tuple(
            _padded(parts, value)
            for parts, value in zip(zip(*examples, strict=True), self._padding, strict=False)
        )

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Float[Tensor, ""], Metrics]:
        scores = self._scores(self._apply(model, batch), batch[0])
        losses, counts = self.losses(scores, batch[1])
        return (losses * counts).sum() / counts.sum().clamp(min=1), {}

    def count_labels(self, batch: Batch) -> int:
        return int(self.known(batch[1]).sum())

    @property
    def _padding(self) -> tuple[float, ...]:
        """Values that complete grids, maps and masks of examples of different sizes."""
        return 0.0, float(IGNORED) if self.target.kind == "class_map" else math.nan, float(False)

    def predicted_maps(self, model: nn.Module, batch: Batch) -> Maps:
        """Return the predicted class, or the values in their units, at each position."""
        predictions = self.target.predictions(self._predicted(model, batch))
        return predictions.argmax(dim=1) if self.target.kind == "class_map" else predictions

    @abstractmethod
    def known(self, maps: Maps) -> Shaped[Tensor, "B *_"]:
        """Return True where the target is known."""

    @abstractmethod
    def losses(self, scores: GridOutputs, maps: Maps) -> tuple[PerExample, Int[Tensor, " B"]]:
        """Return the mean loss over the known targets of each example, and their number."""

    def _predicted(self, model: nn.Module, batch: Batch) -> GridOutputs:
        """Apply the model in evaluation mode, window by window if the examples are larger.

        Examples of different sizes are predicted one by one.
        """
        grids = batch[0]
        inputs = self._model_input(grids)
        if not self.format.is_ragged:
            return self._scores(predict_large(model, inputs, self.window, self.overlap), grids)
        outputs = []
        for row, real in enumerate(_real_sizes(batch)):
            box: Any = (slice(row, row + 1), ..., *map(slice, real))
            outputs.append(predict_large(model, inputs[box], self.window, self.overlap)[0])
        return self._scores(_padded(outputs, 0.0, tuple(grids.shape[2:])), grids)

    def _scores(self, outputs: Any, grids: AnyGrid) -> GridOutputs:
        count = len(self.class_names)
        expected = (len(grids), count, *grids.shape[2:])
        if not isinstance(outputs, Tensor) or outputs.shape != expected:
            described = tuple(outputs.shape) if isinstance(outputs, Tensor) else named_type(outputs)
            raise ValueError(
                f"the model returns {described} for grids of shape {tuple(grids.shape)} with "
                f"{plural(count, NOUNS[self.target.kind])}; expected model.out_channels {count}"
            )
        return outputs.float()


def mean_loss(rows: Rows) -> float:
    """Return the mean loss over the known targets of all examples.

    Raises:
        ValueError: If there are none.
    """
    positions = rows["positions"]
    if not positions.any():
        raise ValueError("no position of the test examples has a target, expected at least one")
    return ((rows["losses"].double() * positions).sum() / positions.sum()).item()


def _real_sizes(batch: Batch) -> list[tuple[int, ...]]:
    """Return the size of each example along each axis, without padding."""
    grids, _, *keep = batch
    if not keep:
        return [tuple(grids.shape[2:])] * len(grids)
    along = (keep[0].movedim(axis, 1) for axis in range(1, keep[0].ndim))
    lines = [real.reshape(*real.shape[:2], -1).any(dim=2).sum(dim=1).tolist() for real in along]
    return list(zip(*lines, strict=True))


def _padded(parts: Sequence[Tensor], value: float, sizes: tuple[int, ...] | None = None) -> Tensor:
    """Stack examples, completed to a size along the last axes, or to the largest of them."""
    shapes = zip(*(part.shape for part in parts), strict=True)
    shape = tuple(map(max, shapes))
    shape = shape if sizes is None else (*shape[: -len(sizes)], *sizes)
    padded = parts[0].new_full((len(parts), *shape), value)
    for row, part in enumerate(parts):
        inside: Any = (row, *map(slice, part.shape))
        padded[inside] = part
    return padded
