"""Options of the evaluation commands, in a module that imports neither torch nor the models."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from tyro.conf import Fixed, Suppress

MIN_SAMPLES = 10  # one for each split of the Inception Score
MIN_COMPARED = 4  # an image and its three nearest neighbors
# The tasks of LightNet, arXiv:2405.21022, Table 9, and the metric of each. The table does not name
# its metrics. These are the usual ones, and match its row for OPT with 2.7B parameters: accuracy
# normalized by the length of the answers (acc_norm) for HellaSwag, ARC-Challenge and OpenBookQA.
COMMONSENSE = {
    "piqa": "acc",
    "hellaswag": "acc_norm",
    "winogrande": "acc",
    "arc_easy": "acc",
    "arc_challenge": "acc_norm",
    "openbookqa": "acc_norm",
}
TASK_SETS = {"commonsense": tuple(COMMONSENSE)}


@dataclass(frozen=True, kw_only=True)
class LengthsConfig:
    """Options of `evaluate --lengths`."""

    lengths: tuple[int, ...] = ()
    """Context lengths to evaluate, in tokens; they may exceed the training length."""
    text: str | None = None
    """Text file, folder or hub dataset; by default the run's test text."""
    max_tokens: int | None = None
    """Number of tokens to use from the start of the text; by default all."""

    def check(self) -> None:
        """Raise ValueError if a number is out of range."""
        from onescan.checks import check_distinct, check_positive  # imports torch, which is slow

        check_distinct(lengths=self.lengths)
        for length in self.lengths:
            check_positive(lengths=length)
        if self.max_tokens is not None:
            check_positive(max_tokens=self.max_tokens)


@dataclass(frozen=True, kw_only=True)
class TasksConfig:
    """Options of `evaluate --tasks`."""

    tasks: str = ""
    """Names of lm-eval tasks, separated by commas; commonsense selects the six tasks of
    LightNet's Table 9."""
    include_path: Path | None = None
    """Folder with your own tasks as lm-eval YAML files."""
    limit: int | None = None
    """Number of examples per task; by default all."""
    num_fewshot: int | None = None
    """Number of few-shot examples; by default as the task defines."""
    batch_size: Annotated[int, Fixed, Suppress] = 32
    """Requests per batch; affects memory, and results only of sampled texts."""

    @property
    def names(self) -> list[str]:
        """Names of the tasks, each once, with sets expanded."""
        given = [name.strip() for name in self.tasks.split(",") if name.strip()]
        names = (name for each in given for name in TASK_SETS.get(each, (each,)))
        return list(dict.fromkeys(names))

    def check(self) -> None:
        """Raise ValueError if a number is out of range or the folder does not exist."""
        from onescan.checks import check_positive  # imports torch, which is slow

        check_positive(batch_size=self.batch_size)
        if self.limit is not None:
            check_positive(limit=self.limit)
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ValueError(f"num_fewshot is {self.num_fewshot}, expected 0 or more")
        if self.include_path is not None and not self.include_path.is_dir():
            raise ValueError(f"include_path is '{self.include_path}', which is not a folder")


Sampler = Literal["ddpm", "ddim", "dpm", "euler"]  # as in onescan.models.denoiser
ClassDistribution = Literal["uniform", "reference"]


@dataclass(frozen=True, kw_only=True)
class SamplesConfig:
    """Options of `evaluate --samples`."""

    samples: int | None = None
    """Number of images to generate, or to read from existing images; FID-50K uses 50000."""
    features: str = ""
    """Feature extractor: a run folder of a trained classifier, or a TorchScript file such as
    NVIDIA's inception-2015-12-05.pt, for FID."""
    guidance_scale: tuple[float, ...] = ()
    """Scales of classifier-free guidance to evaluate; by default the run's."""
    sampler: Sampler | None = None
    """Sampler; by default the run's."""
    steps: int | None = None
    """Denoising steps per image; by default the run's."""
    reference: str = "train"
    """Real images to compare with: train or test for the run's data; a folder, parquet file or hub
    dataset; or an .npz file of images or statistics."""
    class_distribution: ClassDistribution = "uniform"
    """Classes of the generated images: uniform, or distributed as in the reference."""
    precision_recall_samples: int = 10000
    """Number of real and of generated images, drawn at random, for precision and recall."""
    batch_size: Annotated[int, Fixed, Suppress] = 64
    """Images per batch; affects memory, and results only by rounding."""
    seed: int = 0
    """Random seed; each image has its own seed derived from it."""

    def check(self) -> None:
        """Raise ValueError if a setting is missing or out of range."""
        from onescan.checks import check_choice, check_distinct, check_positive

        if self.samples is None or self.samples < MIN_SAMPLES:
            raise ValueError(f"samples is {self.samples}, expected at least {MIN_SAMPLES}")
        if not self.features:
            raise ValueError(
                f"features is {self.features!r}, expected a run of a classifier or a TorchScript "
                "file"
            )
        if self.guidance_scale:
            check_distinct(guidance_scale=self.guidance_scale)
        for scale in self.guidance_scale:
            if not 0 <= scale < float("inf"):
                raise ValueError(f"guidance_scale contains {scale}, expected 0 or more")
        check_choice("class_distribution", self.class_distribution, get_args(ClassDistribution))
        check_positive(batch_size=self.batch_size)
        if self.steps is not None:
            check_positive(steps=self.steps)
        if self.precision_recall_samples < MIN_COMPARED:
            raise ValueError(
                f"precision_recall_samples is {self.precision_recall_samples}, expected at least "
                f"{MIN_COMPARED}"
            )
        if not self.reference:
            raise ValueError("reference is '', expected train, test or a path")


@dataclass(frozen=True, kw_only=True)
class NeedleConfig:
    """Options of the needle-in-a-haystack evaluation."""

    lengths: tuple[int, ...] = (1024, 2048, 4096)
    """Total context lengths in tokens, including needle, question and answer."""
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Positions of the needle: 0 is the start of the haystack, 1 the end."""
    trials: int = 4
    """Needles per length, each in a different part of the haystack; the same at all depths."""
    needle: str = "The magic number of {name} is {number}."
    """Sentence to hide, on a line of its own."""
    question: str = "The magic number of {name} is"
    """Prompt at the end, on a new line, to be completed with the number."""
    digits: int = 4
    """Digits of the number."""
    prefill_chunk_size: int = 1024
    """Tokens processed at once; affects memory, and results only by rounding."""
    seed: int = 0
    """Random seed of names, numbers and haystack positions."""


def short_name(checkpoint: str | Path) -> str:
    """Return the last two parts of the path of a checkpoint's folder, or the name of a hub model.

    >>> short_name("/home/me/runs/mine/seed-0/best.safetensors"), short_name("my-model")
    ('mine/seed-0', 'my-model')
    """
    path = Path(checkpoint)
    path = path.parent if path.suffix == ".safetensors" else path
    return "/".join((path.resolve() if path.is_dir() else path).parts[-2:])
