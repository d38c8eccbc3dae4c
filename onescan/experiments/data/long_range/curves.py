"""Dashed curves in a square image: grown dash by dash, kept apart from each other, and drawn.

Points are complex numbers, x + iy in pixels, with x to the right and y down from the upper left
corner. Directions are complex numbers of length 1.
"""

import math
from dataclasses import dataclass
from itertools import accumulate, chain
from random import Random
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Complex, UInt8
from PIL import Image, ImageDraw

from onescan.experiments.data.long_range.rng import random_below

GrayImage = UInt8[np.ndarray, "side side"]  # 0 is black, 255 is white
Points = Complex[np.ndarray, "*points"]
Free = Bool[np.ndarray, "*points"]
Stencil = Bool[np.ndarray, "cells cells"]

CELLS = 2  # per pixel, along each axis
DIRECTIONS = 15  # candidates for the next dash
STARTS = 16  # candidates for a first dash
SPACING = 0.75  # between the points that stand for a line, relative to the clearance
MAX_UNDO = 4  # dashes removed at once where a curve cannot continue

GRAY, WHITE = 190, 255  # of dashes and of discs
OVERSAMPLING = 4  # drawn this many times larger, and averaged


@dataclass(frozen=True, kw_only=True)
class CurveStyle:
    """Dimensions of dashed curves, in pixels."""

    dash: float
    """Length of a dash."""
    gap: float
    """Distance along the curve between the end of a dash and the start of the next."""
    clearance: float
    """Minimum distance between the center lines of two curves, accurate to a fifth. Must exceed the
    gap."""
    continuity: float
    """Smoothness: from dash to dash, a curve bends by up to 90 degrees divided by this."""


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """Dimensions of curves and discs in images of one size, in pixels."""

    style: CurveStyle
    """Style of all curves."""
    thickness: float
    """Thickness of a dash."""
    radius: float
    """Radius of a disc."""
    distractor_dashes: int
    """Total number of dashes of the distractor curves."""


DIMENSIONS = {
    32: Dimensions(
        style=CurveStyle(dash=2.0, gap=1.5, clearance=3.0, continuity=1.0),
        thickness=1.0,
        radius=1.5,
        distractor_dashes=20,
    ),
    64: Dimensions(
        style=CurveStyle(dash=5.0, gap=2.0, clearance=4.0, continuity=1.4),
        thickness=1.0,
        radius=2.5,
        distractor_dashes=22,
    ),
    128: Dimensions(
        style=CurveStyle(dash=5.0, gap=5.0, clearance=8.0, continuity=1.8),
        thickness=1.5,
        radius=3.0,
        distractor_dashes=35,
    ),
    256: Dimensions(
        style=CurveStyle(dash=5.0, gap=6.0, clearance=10.0, continuity=1.8),
        thickness=2.0,
        radius=5.0,
        distractor_dashes=30,
    ),
}
"""Dimensions by image side, from the files of the Long Range Arena where those define them.

The clearance is our choice, and so are gap and thickness at 32 and the continuity at 64: with these
values, two curves of 14 dashes fit and can be distinguished.
"""


class Dash(NamedTuple):
    """One dash of a curve."""

    start: complex
    end: complex


Curve = tuple[Dash, ...]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Contents of an image, in pixels."""

    side: int
    curves: tuple[Curve, ...]
    """The two long curves, then the distractors."""
    discs: tuple[complex, complex]
    """Centers of the discs: tips of the long curves."""
    label: int
    """1 if both discs are on one curve, 0 if on two."""


def draw(scene: Scene) -> GrayImage:
    """Draw a scene: gray dashes and white discs on black."""
    dimensions = DIMENSIONS[scene.side]
    width, radius = round(OVERSAMPLING * dimensions.thickness), OVERSAMPLING * dimensions.radius
    image = Image.new("L", (OVERSAMPLING * scene.side, OVERSAMPLING * scene.side))
    pen = ImageDraw.Draw(image)
    for start, end in chain(*scene.curves):
        ends = [OVERSAMPLING * part for part in (start.real, start.imag, end.real, end.imag)]
        pen.line(ends, fill=GRAY, width=width)
    for center in scene.discs:
        pen.circle((OVERSAMPLING * center.real, OVERSAMPLING * center.imag), radius, fill=WHITE)
    return np.asarray(image.reduce(OVERSAMPLING))


class FreeSpace:
    """Grid of the cells of a square image where a new curve may lie.

    Args:
        side: Side of the image, in pixels.
        margin: Minimum distance of all curves from the image's edge, in pixels.
        style: Style of the curves.
    """

    def __init__(self, *, side: int, margin: float, style: CurveStyle) -> None:
        self.side, self.margin, self.style = side, margin, style
        # Points tested for the next dash lie outside the image by less than the frame.
        frame = math.ceil((style.dash + 3 * style.gap + style.clearance) * CELLS) + 1
        cells, edge = side * CELLS + 2 * frame, frame + math.ceil(margin * CELLS)
        self.corner = complex(frame, frame)
        self.free = np.zeros((cells, cells), dtype=bool)
        self.free[edge:-edge, edge:-edge] = True
        self.stencil = _outside_disc(style.clearance * CELLS)
        self.stencils = math.ceil(style.dash / (SPACING * style.clearance))
        angles = np.linspace(-1, 1, DIRECTIONS + 2)[1:-1] * math.pi / 2
        self.bends = np.exp(1j * angles / style.continuity)
        self.weights = np.cos(angles) ** 2
        count = math.ceil((style.dash + 2 * style.gap) / (SPACING * style.clearance)) + 1
        self.along = np.linspace(-style.gap, style.dash + style.gap, count)  # of a first dash
        ahead = np.linspace(style.gap / 2, style.dash + 1.5 * style.gap, count)
        self.candidates = self.bends[:, None] * ahead  # from a pivot, for each possible next dash

    def grow(self, dashes: int, rng: Random, *, attempts: int) -> Curve | None:
        """Add a curve, or return None if there was no room for it.

        From dash to dash the curve bends in the middle of the gap, by an angle drawn from the free
        ones with the published weights cos(continuity * angle)^2. Where no angle is free, the last
        few dashes are removed.

        Before and after every curve, the length of a gap beyond the clearance stays free in line
        with it, so that no curve appears to continue as another.

        Args:
            dashes: Number of dashes.
            rng: Source of random numbers.
            attempts: Maximum number of dashes tried.
        """
        curve: list[Dash] = []
        history = [self.free]  # the grid before each dash
        for _ in range(attempts):
            dash = self._next(curve[-1], rng) if curve else self._first(rng)
            if dash is None:
                del curve[-1 - random_below(rng, MAX_UNDO) :]
                del history[len(curve) + 1 :]
                self.free = history[-1]
                continue
            self.free = self.free.copy()
            if curve:  # a dash must not block its own successor, only later ones
                self._occupy(curve[-1])
            curve.append(dash)
            history.append(self.free)
            if len(curve) == dashes:
                self._occupy(dash)
                return tuple(curve)
        self.free = history[0]
        return None

    def _first(self, rng: Random) -> Dash | None:
        """Draw points and directions for a first dash; None if none is free."""
        width = self.side - 2 * self.margin
        corner = complex(self.margin, self.margin)
        drawn = np.array([rng.random() for _ in range(3 * STARTS)]).reshape(3, STARTS)
        starts = corner + width * (drawn[0] + 1j * drawn[1])
        directions = np.exp(2j * math.pi * drawn[2])
        free = self._are_free(starts[:, None] + directions[:, None] * self.along).all(axis=1)
        if not free.any():
            return None
        start, direction = (complex(values[free.argmax()]) for values in (starts, directions))
        return Dash(start, start + self.style.dash * direction)

    def _next(self, last: Dash, rng: Random) -> Dash | None:
        """Draw one of the free dashes that may follow; None if there is none."""
        direction = (last.end - last.start) / self.style.dash
        pivot = last.end + self.style.gap / 2 * direction
        free = self._are_free(pivot + direction * self.candidates).all(axis=1)
        cumulative = list(accumulate((self.weights * free).tolist()))
        threshold = rng.random() * cumulative[-1]
        chosen = next((i for i, weight in enumerate(cumulative) if weight > threshold), None)
        if chosen is None:
            return None
        direction *= complex(self.bends[chosen])
        start = pivot + self.style.gap / 2 * direction
        return Dash(start, start + self.style.dash * direction)

    def _are_free(self, points: Points) -> Free:
        cells = points * CELLS + self.corner
        columns, rows = (part.astype(np.intp) for part in (cells.real, cells.imag))
        return self.free.ravel()[rows * len(self.free) + columns]

    def _occupy(self, dash: Dash) -> None:
        """Mark the cells within the clearance of a dash as occupied."""
        size = len(self.stencil)
        for part in range(self.stencils + 1):
            point = dash.start + part / self.stencils * (dash.end - dash.start)
            cell = point * CELLS + self.corner
            row, column = int(cell.imag) - size // 2, int(cell.real) - size // 2
            self.free[row : row + size, column : column + size] &= self.stencil


def _outside_disc(radius: float) -> Stencil:
    """Mark the cells of a square that are more than a radius, in cells, from its center."""
    extent = math.ceil(radius)
    row, column = np.ogrid[-extent : extent + 1, -extent : extent + 1]
    return row**2 + column**2 > radius**2
