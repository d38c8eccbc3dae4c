"""Noisy volumes with spheres and cubes, generated without a download."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor

from onescan.checks import check_whole
from onescan.experiments.data.arrays import ArraySplits
from onescan.experiments.data.base import DataConfig, Example, LoadedBatch
from onescan.experiments.data.images import ImageSet
from onescan.experiments.data.order import derive_seed
from onescan.inputs.arrays import ArrayFormat
from onescan.inputs.targets import Target

NAMES = ("background", "sphere", "cube")
MIN_RADIUS = 4  # voxels
WHITE = 255
MIN_SIZE = 2 * MIN_RADIUS + 1


@dataclass(frozen=True, kw_only=True)
class SolidsConfig(DataConfig):
    """Volumes that contain spheres and cubes in noise; the target is the class of each voxel.

    Volumes are generated as bytes of shape [1, size, size, size] when they are read. Those of the
    training split are new in every epoch, while those of the test split stay the same. Spheres and
    cubes have the same brightness and range of sizes. Where solids overlap, the later one is
    visible.
    """

    size: int = 20
    """Size of a volume along each axis, in voxels."""
    solids: int = 2
    """Number of spheres and cubes per volume."""
    brightness: int = 96
    """Brightness that solids add to the noise, from 1 to 254. Noise is uniformly distributed from 0
    to 255 minus this value, so smaller values make the task harder."""
    train_volumes: int = 300
    """Training volumes per epoch."""
    test_volumes: int = 60
    """Test volumes."""
    seed: int = 0
    """Random seed of the test volumes. The training volumes depend on `training.seed`."""

    def build(self) -> ArraySplits:
        """Check the fields and return the splits.

        Raises:
            ValueError: If a field is out of range.
        """
        for name, least in (
            ("size", MIN_SIZE),
            ("solids", 1),
            ("brightness", 1),
            ("train_volumes", 1),
            ("test_volumes", 1),
            ("seed", 0),
        ):
            check_whole(least, **{f"data.{name}": getattr(self, name)})
        if self.brightness >= WHITE:
            raise ValueError(f"data.brightness is {self.brightness}, expected 1 to {WHITE - 1}")
        train, test = (
            Solids(config=self, count=count) for count in (self.train_volumes, self.test_volumes)
        )
        noise = (WHITE - self.brightness) / WHITE
        return ArraySplits(
            train=train,
            test=test,
            class_names=NAMES,
            format=ArrayFormat(
                channels=1,
                shape=(self.size,) * 3,
                mean=(noise / 2,),
                std=(noise / 12**0.5,),
                is_bytes=True,
            ),
            target=Target(kind="class_map"),
        )


@dataclass(frozen=True, kw_only=True)
class Solids(ImageSet):
    """Volumes of one split, generated when they are read.

    Attributes:
        config: Size, number of solids, brightness and random seed.
        count: Number of volumes.
    """

    config: SolidsConfig
    count: int

    def __len__(self) -> int:
        return self.count

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        volumes, masks = zip(*map(self._volume, examples), strict=True)
        return LoadedBatch((torch.stack(volumes).unsqueeze(1), torch.stack(masks)))

    def _volume(self, example: Example) -> tuple[Tensor, Int[Tensor, "size size size"]]:
        """Generate a volume and the class of each voxel, with integers only."""
        config, size = self.config, self.config.size
        is_test = example.seed is None
        seed = ("test solids", config.seed, example.source) if is_test else ("solids", example.seed)
        generator = torch.Generator().manual_seed(derive_seed(*seed))
        draw = partial(torch.randint, generator=generator)
        axes = torch.meshgrid(*[torch.arange(size)] * 3, indexing="ij")
        classes = torch.zeros(size, size, size, dtype=torch.long)
        largest = max(size // 4, MIN_RADIUS)
        for _ in range(config.solids):
            radius = int(draw(MIN_RADIUS, largest + 1, ()))
            center = draw(radius, size - radius, (3,)).tolist()
            offsets = torch.stack([axis - at for axis, at in zip(axes, center, strict=True)])
            is_cube = bool(draw(2, ()))
            inside = (
                offsets.abs().amax(dim=0) <= radius * 4 // 5  # about the volume of the sphere
                if is_cube
                else offsets.square().sum(dim=0) <= radius**2
            )
            classes[inside] = 2 if is_cube else 1
        noise = draw(WHITE - config.brightness + 1, (size, size, size))
        return (noise + config.brightness * (classes > 0)).byte(), classes
