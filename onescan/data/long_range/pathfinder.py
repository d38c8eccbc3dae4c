"""Pathfinder of the Long Range Arena: are two discs joined by one dashed curve?

Images are drawn from the published description (arXiv:1805.08315, arXiv:1906.01558, in the sizes of
arXiv:2011.04006). Each holds two long curves of equal length, two discs on tips of them, and short
curves that distract. A scene is drawn without its label, with a tip where both other tips, the
curve's own and one of the other curve, are about equally far from it and from the image's middle;
only then the label says which of the two gets the second disc. So the discs' places and the number
of white pixels tell next to nothing. (The published generator starts both curves near each other.)
"""

from dataclasses import dataclass
from itertools import product
from random import Random
from typing import NamedTuple

import numpy as np
from jaxtyping import Complex, Float

from onescan.checks import check_choice
from onescan.data.long_range.chance import below, example_chance
from onescan.data.long_range.curves import Canvas, Curve
from onescan.data.long_range.scenes import MEASURES, GreyImage, Scene, draw

Tips = Complex[np.ndarray, " cuts"]
Misfit = Float[np.ndarray, "cuts cuts"]

CONTOUR_LENGTHS = {"curv_baseline": 6, "curv_contour_length_9": 9, "curv_contour_length_14": 14}
"""Dashes of a long curve, by the name of the published set: easy, intermediate, hard."""

LRA_COUNTS = {"train": 160_000, "val": 20_000, "test": 20_000}
"""How many examples of a size and length make a set of the Long Range Arena."""

SPARE = 2  # dashes that a long curve is drawn with and cut by
PATIENCE = 4  # dashes tried for each of a curve
NEAR = 1 / 16  # how much the distances of the discs may differ, as a part of the side


class Pair(NamedTuple):
    """Two long curves, and three of their tips that discs may lie on."""

    curves: tuple[Curve, Curve]
    anchor: complex
    joined: complex  # the other tip of the same curve
    apart: complex  # a tip of the other curve


@dataclass(frozen=True, kw_only=True)
class PathfinderConfig:
    """Variant of Pathfinder in the Long Range Arena; Path-X is side 128."""

    side: int = 32
    """Side of the image, in pixels: 32, 64, 128 or 256."""
    contour_length: int = 14
    """Dashes of a long curve: 6, 9 or 14. Distractor curves have a third of it."""
    seed: int = 0
    """Random seed of all examples."""


class Pathfinder:
    """Images and whether their discs are joined, as many as one asks for.

    Of examples 0 and 1, 2 and 3, and so on, one is joined and one is not, in an order by chance.

    Raises:
        ValueError: side or contour_length is none of the published ones.

    >>> image, label = Pathfinder(PathfinderConfig(contour_length=6)).example("train", 0)
    >>> image.shape
    (32, 32)
    """

    def __init__(self, config: PathfinderConfig | None = None) -> None:
        self.config = config or PathfinderConfig()
        check_choice("side", self.config.side, MEASURES)
        check_choice("contour_length", self.config.contour_length, CONTOUR_LENGTHS.values())
        self.measures = MEASURES[self.config.side]

    def example(self, split: str, index: int) -> tuple[GreyImage, int]:
        """Draw one example: a function of the config, the split and the index alone.

        Args:
            split: train, val or test.
            index: from 0; there is no last one.

        Returns:
            The image, and 1 if its discs are joined, else 0.

        Raises:
            ValueError: split is unknown, or index is no whole number from 0.
        """
        scene = self.scene(split, index)
        return draw(scene), scene.label

    def scene(self, split: str, index: int) -> Scene:
        """Draw what `example` shows, before it is an image."""
        chance = self._chance("scene", split, index)
        first = below(self._chance("label", split, index // 2), 2)
        label = (first + index) % 2
        canvas, pair = self._long_curves(chance)
        return Scene(
            side=self.config.side,
            curves=(*pair.curves, *self._short_curves(canvas, chance)),
            discs=(pair.anchor, pair.joined if label else pair.apart),
            label=label,
        )

    def _chance(self, name: str, split: str, index: int) -> Random:
        return example_chance(f"pathfinder {name}", seed=self.config.seed, split=split, index=index)

    def _long_curves(self, chance: Random) -> tuple[Canvas, Pair]:
        """Draw two long curves, anew until discs can be put on them."""
        dashes = self.config.contour_length + SPARE
        while True:
            canvas = Canvas(
                side=self.config.side, rim=self.measures.radius + 0.5, style=self.measures.style
            )
            first = canvas.grow(dashes, chance, patience=PATIENCE * dashes)
            second = canvas.grow(dashes, chance, patience=PATIENCE * dashes) if first else None
            pair = self._cut(first, second) if first and second else None
            if pair:
                return canvas, pair

    def _cut(self, *curves: Curve) -> Pair | None:
        """Cut two curves to their length where it fits best, or say that it does not."""
        length = self.config.contour_length
        cuts = [[curve[at : at + length] for at in range(SPARE + 1)] for curve in curves]
        tips = [np.array([(cut[0].start, cut[-1].end) for cut in each]).T for each in cuts]
        pair, least = None, NEAR * self.config.side
        for one, end, far in product(range(2), repeat=3):
            misfit = self._misfit(tips[one][end], tips[one][1 - end], tips[1 - one][far])
            here, there = np.unravel_index(misfit.argmin(), misfit.shape)
            if misfit[here, there] <= least:
                least = misfit[here, there]
                pair = Pair(
                    curves=(cuts[one][here], cuts[1 - one][there]),
                    anchor=complex(tips[one][end, here]),
                    joined=complex(tips[one][1 - end, here]),
                    apart=complex(tips[1 - one][far, there]),
                )
        return pair

    def _misfit(self, anchor: Tips, joined: Tips, apart: Tips) -> Misfit:
        """Say how unlike two tips are: in the distance from a third, and from the image's middle.

        Args:
            anchor: the third tip, for each cut of one curve.
            joined: the other tip of the same cut.
            apart: a tip of the other curve, for each of its cuts.

        Returns:
            Pixels, for each cut of one curve and each of the other; infinite where discs would
            be too close.
        """
        middle = complex(self.config.side, self.config.side) / 2
        near, far = abs(joined - anchor)[:, None], abs(apart - anchor[:, None])
        unlike = np.maximum(
            abs(near - far), abs(abs(joined - middle)[:, None] - abs(apart - middle))
        )
        room = 2 * self.measures.radius + self.measures.style.clearance
        return np.where(np.minimum(near, far) < room, np.inf, unlike)

    def _short_curves(self, canvas: Canvas, chance: Random) -> list[Curve]:
        """Draw the distracting curves; those for which there is no place are left out."""
        dashes = self.config.contour_length // 3
        curves = [
            canvas.grow(dashes, chance, patience=PATIENCE * dashes)
            for _ in range(self.measures.distracting // dashes)
        ]
        return [curve for curve in curves if curve is not None]
