"""Arrays of any number of axes as a model's input."""

from dataclasses import dataclass, field

import torch

from onescan.inputs.images import AnyGrid, GridFormat, check_constants, unit_pixels


@dataclass(frozen=True, kw_only=True)
class ArrayFormat(GridFormat):
    """The arrays a model was trained on: their shape, and the constants that standardize them."""

    channels: int
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    is_bytes: bool | None = field(default=None, compare=False)  # None in older runs
    """Whether the arrays were bytes, scaled to 0 to 1. None scales bytes, but not other types."""
    is_ragged: bool = False
    """Whether the arrays had different sizes, of which `shape` is the largest along each axis."""

    @property
    def axes(self) -> int:
        return len(self.shape)

    @property
    def needs_float64(self) -> bool:
        """Whether rounding to float32 before standardizing would change the result."""
        low, high = FLOAT32_SCALES
        return any(
            not low < std < high or abs(mean) > MAX_OFFSET * std
            for mean, std in zip(self.mean, self.std, strict=True)
        )

    def __post_init__(self) -> None:
        if not 1 <= len(self.shape) <= MAX_AXES or min(self.channels, *self.shape) < 1:
            raise ValueError(
                f"channels and shape are {self.channels} and {self.shape}, expected numbers above "
                f"0, and 1 to {MAX_AXES} axes"
            )
        check_constants(self.channels, mean=self.mean, std=self.std)

    @property
    def reads_pixels(self) -> bool:
        return bool(self.is_bytes)

    def in_training_range(self, values: AnyGrid) -> AnyGrid:
        if self.is_bytes:
            return super().in_training_range(values)
        if values.dtype == torch.uint8 and self.is_bytes is None:
            return unit_pixels(values)
        return values


IMAGE_AXES, MAX_AXES = 2, 8
MAX_OFFSET = 16.0  # standard deviations; values with a larger mean are read in float64


FLOAT32_SCALES = 2.0**-100, 2.0**100  # standard deviations of values that float32 represents well
