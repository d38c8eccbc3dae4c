"""The part that tasks share whose model predicts a class or values at each position of a grid."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from onescan.checks import check_positive
from onescan.configs import ModelConfig
from onescan.experiments.data import ArraySplits, ImageSplits
from onescan.experiments.data.share import Share
from onescan.experiments.tasks.base import Batch, Metrics, Rows, Task, TaskConfig
from onescan.experiments.tasks.grid import NOUNS, GridTask
from onescan.inference.windows import predict_large
from onescan.inputs.images import AnyGrid, unit_pixels
from onescan.messages import named_type, plural
from onescan.models.dense_predictor import DensePredictorConfig
from onescan.shapes import GridOutputs

Maps = Shaped[Tensor, "B *_"]  # a class, or values, at each position
PerExample = Float[Tensor, " B"]


@dataclass(frozen=True, kw_only=True)
class DenseTaskConfig(TaskConfig):
    """Settings of all tasks that predict a class or values at each position."""

    flip_axes: tuple[int, ...] = ()
    """Axes along which half of the training examples are mirrored, with their targets: 0 is the
    first axis after the channels, which is the height of images."""
    window: tuple[int, ...] = ()
    """Size of a window along each axis, for examples that are too large for memory. Training reads
    a random window of each example; evaluation and prediction go window by window and average the
    outputs where windows overlap. () uses whole examples."""
    window_overlap: float = 0.5
    """Share of a window that the next one contains too, at least 0 and below 1."""
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
        if not isinstance(model, DensePredictorConfig):
            raise ValueError(
                f"model is {named_type(model)}, expected a DensePredictorConfig, which predicts "
                "each position"
            )


class DenseTask(GridTask):
    """A task with a target at each position of signals, images or volumes."""

    def __init__(self, data: ImageSplits | ArraySplits, config: Any) -> None:
        super().__init__(data, augment=None, evaluation_batch_size=config.evaluation_batch_size)
        self.window: tuple[int, ...] = config.window
        self.overlap: float = config.window_overlap
        self.flip_axes: tuple[int, ...] = config.flip_axes

    def shard(self, share: Share) -> None:
        Task.shard(self, share)

    def augment(self, batch: Batch, seed: int) -> Batch:
        """Cut a random window out of each example, and mirror half of them along each axis."""
        grids, maps = unit_pixels(batch[0]), batch[1]
        generator = torch.Generator().manual_seed(seed)
        sides = grids.shape[2:]
        if self.window:
            sizes = [min(pair) for pair in zip(self.window, sides, strict=True)]
            first = [
                torch.randint(side - size + 1, (len(grids),), generator=generator).tolist()
                for side, size in zip(sides, sizes, strict=True)
            ]
            boxes: list[Any] = [
                (..., *(slice(at, at + size) for at, size in zip(corner, sizes, strict=True)))
                for corner in zip(*first, strict=True)
            ]
            grids, maps = (
                torch.stack([each[box] for each, box in zip(whole, boxes, strict=True)])
                for whole in (grids, maps)
            )
        for axis in self.flip_axes:
            is_mirrored = torch.rand(len(grids), generator=generator) < 0.5  # noqa: PLR2004
            grids, maps = (
                _mirrored(each, is_mirrored.to(each.device), axis - len(sides))
                for each in (grids, maps)
            )
        return grids, maps

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Float[Tensor, ""], Metrics]:
        scores = self._scores(model(self._model_input(batch[0])), batch[0])
        losses, counts = self.losses(scores, batch[1])
        return (losses * counts).sum() / counts.sum().clamp(min=1), {}

    def count_labels(self, batch: Batch) -> int:
        return int(self.known(batch[1]).sum())

    def predicted_maps(self, model: nn.Module, grids: AnyGrid) -> Maps:
        """Return the predicted class, or the values in their units, at each position."""
        predictions = self.target.predictions(self._predicted(model, grids))
        return predictions.argmax(dim=1) if self.target.kind == "class_map" else predictions

    @abstractmethod
    def known(self, maps: Maps) -> Shaped[Tensor, "B *_"]:
        """Return True where the target is known."""

    @abstractmethod
    def losses(self, scores: GridOutputs, maps: Maps) -> tuple[PerExample, Int[Tensor, " B"]]:
        """Return the mean loss over the known targets of each example, and their number."""

    def _predicted(self, model: nn.Module, grids: AnyGrid) -> GridOutputs:
        """Apply the model in evaluation mode, window by window if the examples are larger."""
        inputs = self._model_input(grids)
        return self._scores(predict_large(model, inputs, self.window, self.overlap), grids)

    def _scores(self, outputs: Any, grids: AnyGrid) -> GridOutputs:
        count = len(self.class_names)
        expected = (len(grids), count, *grids.shape[2:])
        if not isinstance(outputs, Tensor) or outputs.shape != expected:
            found = tuple(outputs.shape) if isinstance(outputs, Tensor) else named_type(outputs)
            raise ValueError(
                f"the model returns {found} for grids of shape {tuple(grids.shape)} with "
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


def _mirrored(each: Tensor, is_mirrored: Shaped[Tensor, " B"], axis: int) -> Tensor:
    shape = (-1, *[1] * (each.ndim - 1))
    return torch.where(is_mirrored.view(shape), each.flip(axis), each)
