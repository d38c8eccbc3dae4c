"""What a model can be asked, as options of a command."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

LEAST_SAMPLES = 10  # as the Inception Score is of ten parts
LEAST_COMPARED = 4  # as the third nearest neighbour is looked for
# names of ours; LightNet, arXiv:2405.21022, Table 9
SETS = {
    "commonsense": (
        "piqa",
        "hellaswag",
        "winogrande",
        "arc_easy",
        "arc_challenge",
        "openbookqa",
    )
}


@dataclass(frozen=True, kw_only=True)
class LengthsConfig:
    """What is measured over lengths."""

    lengths: tuple[int, ...] = ()
    """tokens of a row, several; they may be many times those of training"""
    text: str | None = None
    """a file or a folder, or a name on the hub; without it, the run's own held-out text"""
    tokens: int | None = None
    """of the text, the first ones; without it, all"""

    def check(self) -> None:
        """Raise ValueError for a length or a number of tokens out of range."""
        from onescan.checks import check_positive  # torch, for which help does not wait

        if not self.lengths or len(set(self.lengths)) < len(self.lengths):
            raise ValueError(f"lengths is {self.lengths}, expected at least one, and each once")
        for length in self.lengths:
            check_positive(lengths=length)
        if self.tokens is not None:
            check_positive(tokens=self.tokens)


@dataclass(frozen=True, kw_only=True)
class TasksConfig:
    """What a language model is asked."""

    tasks: str = ""
    """names of lm-eval's tasks, a,b,c; commonsense is the six of LightNet's Table 9"""
    include_path: Path | None = None
    """a folder with tasks of your own, as lm-eval's YAML files"""
    limit: int | None = None
    """examples of each task, the first ones; without it, all"""
    shots: int | None = None
    """solved examples before each question; without it, as the task says"""
    batch_size: int = 32
    """requests at once; changes the memory, and no result but of sampled texts"""

    @property
    def names(self) -> list[str]:
        """Each task once, with sets of ours spelt out."""
        words = [word.strip() for word in self.tasks.split(",") if word.strip()]
        return list(dict.fromkeys(name for word in words for name in SETS.get(word, (word,))))

    def check(self) -> None:
        """Raise ValueError for a number out of its range, or a folder that is not there."""
        from onescan.checks import check_positive  # torch, for which help does not wait

        check_positive(batch_size=self.batch_size)
        if self.limit is not None:
            check_positive(limit=self.limit)
        if self.shots is not None and self.shots < 0:
            raise ValueError(f"shots is {self.shots}, expected 0 or more")
        if self.include_path is not None and not self.include_path.is_dir():
            raise ValueError(f"include_path is '{self.include_path}', which is no folder")


Sampler = Literal["ddpm", "ddim", "dpm", "euler"]  # onescan.models.denoiser has what they are
AskedLabels = Literal["even", "reference"]


@dataclass(frozen=True, kw_only=True)
class SamplesConfig:
    """How images are made and judged."""

    samples: int | None = None
    """images to make, or to read where they are made already; FID-50K is of 50000"""
    features: str = ""
    """what compares images: a run of ours that is a classifier; or a file of TorchScript, such as
    NVIDIA's inception-2015-12-05.pt, for FID"""
    guidance: tuple[float, ...] = ()
    """scales of classifier-free guidance, measured one after the other; without it, the run's"""
    sampler: Sampler | None = None
    """without it, the run's"""
    steps: int | None = None
    """calls of the model for each image; without it, the run's"""
    reference: str = "train"
    """real images to compare with: train or test, of the run's data; or a folder, a parquet file,
    a name on the hub, or a .npz file of images or statistics as evaluators read them"""
    labels: AskedLabels = "even"
    """classes to ask for: each equally often, or as often as in the reference"""
    compared: int = 10000
    """images of each side whose neighbourhoods precision and recall compare, drawn by lot"""
    batch: int = 64
    """images at once; changes the memory, and the result by rounding alone"""
    seed: int = 0
    """what images are made from, each from a seed of its own"""

    def check(self) -> None:
        """Raise ValueError for what is missing, or out of range."""
        from onescan.checks import check_choice, check_positive  # torch, for which help waits not

        if self.samples is None or self.samples < LEAST_SAMPLES:
            raise ValueError(f"samples is {self.samples}, expected {LEAST_SAMPLES} at least")
        if not self.features:
            raise ValueError("features is '', expected a classifier's run, or a file for FID")
        if len(set(self.guidance)) < len(self.guidance):
            raise ValueError(f"guidance is {self.guidance}, expected each scale once")
        for scale in self.guidance:
            if not 0 <= scale < float("inf"):
                raise ValueError(f"guidance has {scale}, expected 0 or more")
        check_choice("labels", self.labels, get_args(AskedLabels))
        check_positive(batch=self.batch)
        if self.steps is not None:
            check_positive(steps=self.steps)
        if self.compared < LEAST_COMPARED:
            raise ValueError(f"compared is {self.compared}, expected {LEAST_COMPARED} at least")
        if not self.reference:
            raise ValueError("reference is '', expected train, test or a path")


@dataclass(frozen=True, kw_only=True)
class NeedleConfig:
    """What is hidden, where, and how often."""

    lengths: tuple[int, ...] = (1024, 2048, 4096)
    """Tokens of a whole text: haystack, needle, question and answer."""
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Where the needle is: 0 is before the haystack, 1 after it."""
    trials: int = 4
    """Needles for each length, each in a haystack of its own, the same at all depths."""
    needle: str = "The magic number of {name} is {number}."
    """What is hidden, on a line of its own."""
    question: str = "The magic number of {name} is"
    """What stands at the end, on a new line; the number is to follow."""
    digits: int = 4
    """Of a number."""
    piece: int = 1024
    """Tokens read at once; changes the memory, and the result by rounding alone."""
    seed: int = 0
    """What names, numbers and haystacks are drawn from."""
