"""What generation.json holds: how near generated images come to real ones."""

from dataclasses import dataclass

FID_50K = 50_000
MOST_CONFUSED = 20  # classes


@dataclass(frozen=True, kw_only=True)
class GenerationScore:
    """Of the images made with one guidance scale."""

    guidance: float | None
    """None where the images were made elsewhere, or no class can be asked for."""
    distance: float
    """Frechet distance to the real images; see `GenerationScores.distance_name`."""
    spatial_distance: float | None
    """The same of features that know places; None where there are none, on either side."""
    class_score: float | None
    """exp E KL(p(y|x) || p(y)); None where the features come without classes."""
    class_score_spread: float | None
    """Over ten parts of the images."""
    precision: float | None
    """None where there are no single real images, but statistics of them."""
    recall: float | None
    as_asked: float | None = None
    """Share of the images that the classifier tells to be of the class that was asked for."""
    asked: tuple[int, ...] = ()
    """Images of each class that was asked for, where a classifier tells which they are of."""
    right: tuple[int, ...] = ()
    """How many of them it tells to be of that class."""
    confusion: tuple[tuple[int, ...], ...] = ()
    """Images by the class asked for and the class told, where there are 20 classes at most."""
    folder: str = ""
    """What is kept of the images, below the outcome's folder."""


@dataclass(frozen=True, kw_only=True)
class RealScore:
    """Of the real images, as a measure for the others."""

    name: str
    count: int | None
    """None where statistics do not tell."""
    class_score: float | None
    as_labelled: float | None
    """Share that the classifier tells to be of the class that they are of."""


@dataclass(frozen=True, kw_only=True)
class GenerationScores:
    """Of one source of images."""

    name: str
    """Of the model, or the file or folder."""
    samples: int
    """At each guidance scale."""
    features: str
    """What compares images."""
    is_inception: bool
    """Whether they are the features of FID."""
    is_singular: bool
    """Whether there were no more images than features, on either side."""
    real: RealScore
    sampler: str | None
    """None where the images were made elsewhere."""
    steps: int | None
    labels: str | None
    seed: int | None
    class_names: tuple[str, ...]
    onescan: str
    scores: tuple[GenerationScore, ...]
    """From the smallest guidance scale to the largest."""

    @property
    def distance_name(self) -> str:
        """What the distance may be called: FID for Inception's features alone.

        It is FID-50K if 50,000 images were compared.
        """
        if not self.is_inception:
            return f"Frechet distance in features of {self.features}"
        return "FID-50K" if self.samples == FID_50K else "FID"

    @property
    def short_names(self) -> dict[str, str]:
        """What stands above the columns of tables, by field."""
        if self.is_inception:
            names = {"distance": self.distance_name, "spatial_distance": "sFID"}
            return names | {"class_score": "Inception Score"} | PLAIN
        names = {"distance": "Frechet distance", "spatial_distance": "spatial distance"}
        return names | {"class_score": "class score"} | PLAIN


PLAIN = {"precision": "precision", "recall": "recall", "as_asked": "as asked"}
