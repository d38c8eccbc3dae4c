"""Benchmarks against other implementations and their options. Does not import torch."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, get_args

Dtype = Literal["float32", "bfloat16", "float16"]
AskedBackend = Literal["auto", "torch", "triton"]
LONGEST_TIME_LIMIT_S = 50_000.0  # many budgets are waited for, in milliseconds of 32 bits
MOST = 2**31 - 1  # what counts in 32 bits, as in kernels and in torch's threads
CausalSize = Literal["small", "45m", "150m", "380m", "1.45b"]


@dataclass(frozen=True, kw_only=True)
class ContestOptions(ABC):
    """Options common to all benchmarks."""

    batch_size: int = 4
    """Sequences per call."""
    dtype: Dtype = "float32"
    """Data type of inputs and weights."""
    device: str = "auto"
    """Device: cpu, cuda, ...; auto uses a GPU if there is one."""
    backend: AskedBackend = "auto"
    """Backend of onescan's ops."""
    compile: bool = False
    """Compile every candidate with torch.compile, separately for each size."""
    gradients: bool = True
    """Also measure forward and backward."""
    rounds: int = 5
    """Minimum number of rounds; each round times every candidate once."""
    seconds: float = 2.0
    """Minimum total time of the rounds, in seconds."""
    time_limit_s: float = 60.0
    """Skip larger sizes for a candidate whose call takes longer than this, in seconds."""
    threads: int | None = None
    """CPU threads per candidate; by default torch's own number."""
    candidates: tuple[str, ...] = ()
    """Candidates to measure; ratios are relative to the first. By default all."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """What contestants are measured over."""

    @property
    def axis(self) -> str:
        """The option that holds the sizes."""
        return "tokens"

    def check(self) -> None:
        """Raise ValueError for a number out of its range, or a name twice."""
        for name in ("batch_size", "rounds", "time_limit_s", "threads"):
            number = getattr(self, name)
            if number is not None and not 0 < number < float("inf"):
                raise ValueError(f"{name} is {number}, expected a number above 0")
        if not 0 <= self.seconds < float("inf"):
            raise ValueError(f"seconds is {self.seconds}, expected 0 or more")
        if self.time_limit_s > LONGEST_TIME_LIMIT_S:
            raise ValueError(
                f"time_limit_s is {self.time_limit_s}, expected at most {LONGEST_TIME_LIMIT_S:.0f}"
            )
        from onescan.checks import check_choice  # imports torch, which help does without

        check_choice("dtype", self.dtype, get_args(Dtype))
        check_choice("backend", self.backend, get_args(AskedBackend))
        if len(set(self.candidates)) < len(self.candidates):
            raise ValueError(f"candidates is {self.candidates}, expected each once")
        if not self.sizes or len(set(self.sizes)) < len(self.sizes):
            raise ValueError(f"{self.axis} is {self.sizes}, expected at least one, and each once")
        for size in self.sizes:
            if size < 1:
                raise ValueError(f"{self.axis} has {size}, expected numbers above 0")
            if size > MOST:
                raise ValueError(f"{self.axis} has {size}, expected at most {MOST}")
        _check_most(batch_size=self.batch_size, rounds=self.rounds, threads=self.threads or 1)


@dataclass(frozen=True, kw_only=True)
class OneScanOptions(ContestOptions):
    """One additive scan over all tokens, compared with other bidirectional attention."""

    tokens: tuple[int, ...] = (256, 1024, 4096, 16384)
    """Sequence lengths."""
    num_heads: int = 6
    """Number of heads."""
    head_dim: int = 64
    """Width of a head."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.tokens

    def check(self) -> None:
        """Raise ValueError as the base does, and for widths."""
        super().check()
        _check_positive(num_heads=self.num_heads, head_dim=self.head_dim)


@dataclass(frozen=True, kw_only=True)
class DecayOptions(OneScanOptions):
    """Bidirectional attention with decay that depends on the token."""

    decay: Literal["scalar", "diagonal"] = "scalar"
    """One decay per head (scalar), or one per key channel (diagonal)."""
    normalize: Literal["none", "sum"] = "sum"
    """How onescan normalizes; LION divides by the sum, flash-linear-attention does not divide."""
    chunk_size: int = 64
    """Tokens per chunk of onescan's chunk form."""

    def check(self) -> None:
        """Raise ValueError as the base does, and for chunks."""
        super().check()
        _check_positive(chunk_size=self.chunk_size)
        from onescan.checks import check_choice  # imports torch, which help does without

        check_choice("decay", self.decay, ("scalar", "diagonal"))
        check_choice("normalize", self.normalize, ("none", "sum"))


@dataclass(frozen=True, kw_only=True)
class CausalOptions(ContestOptions):
    """Causal language models trained on random tokens, or their ops alone."""

    tokens: tuple[int, ...] = (512, 1024, 2048, 4096)
    """Sequence lengths."""
    batch_size: int = 1
    """Sequences per call."""
    gradients: bool = True
    """For models, measure training instead of inference; for ops, also measure forward and
    backward."""
    model_size: CausalSize = "small"
    """Width and depth of the models, equal for all but Mamba-2, which has twice as many blocks
    because they have no MLP."""
    level: Literal["model", "op"] = "model"
    """Whole models, or only their token-mixing ops."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.tokens

    def check(self) -> None:
        """Raise ValueError as the base does, and for choices."""
        super().check()
        from onescan.checks import check_choice  # imports torch, which help does without

        check_choice("model_size", self.model_size, get_args(CausalSize))
        check_choice("level", self.level, ("model", "op"))


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(ContestOptions):
    """One decoding step of a causal language model after a context; never with gradients."""

    tokens: tuple[int, ...] = (1_000, 10_000, 100_000)
    """Context lengths."""
    batch_size: int = 1
    """Sequences per call."""
    gradients: bool = False
    """Must be False: decoding has no gradients."""
    model_size: CausalSize = "45m"
    """Width and depth of the models."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.tokens

    def check(self) -> None:
        """Raise ValueError as the base does, and for what decoding has not."""
        super().check()
        from onescan.checks import check_choice  # imports torch, which help does without

        check_choice("model_size", self.model_size, get_args(CausalSize))
        if self.gradients:
            raise ValueError("gradients is True, expected False: a step of decoding has none")


@dataclass(frozen=True, kw_only=True)
class ModelsOptions(ContestOptions):
    """Image classifiers: inference and, with gradients, training."""

    image_size: tuple[int, ...] = (224,)
    """Sides of the square images, in pixels."""
    batch_size: int = 8
    """Images per call."""
    gradients: bool = True
    """Also measure training."""
    presets: tuple[str, ...] = (
        "lightnet_tiny",
        "lion_lit_tiny",
        "lion_d_tiny",
        "lion_s_tiny",
        "deit_tiny",
        "timm/deit_tiny",
    )
    """Models listed by `onescan models`; timm/deit_tiny, timm/deit_small and timm/deit_base are
    timm's."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.image_size

    @property
    def axis(self) -> str:
        return "image_size"

    def check(self) -> None:
        """Raise ValueError as the base does, and for presets."""
        super().check()
        if not self.presets or len(set(self.presets)) < len(self.presets):
            raise ValueError(f"presets is {self.presets}, expected at least one, and each once")


@dataclass(frozen=True, kw_only=True)
class Contest:
    """A benchmark: the texts of its report, and the module of its candidates."""

    title: str
    summary: str
    lead: str
    options: type[ContestOptions]
    module: str
    """Has `contestants(options)`, and imports torch."""
    axis: str
    """What is measured over, as it stands below a picture."""
    items: str
    """What a call has many of, as in "tokens per second"; "" where none are counted."""
    at: str = "at {} tokens"
    """A size in a sentence."""
    letter: str = "T"
    """What powers are of, in formulas."""
    power_of: str = "the number of tokens"
    """The letter in words."""


CONTESTS = {
    "one-scan": Contest(
        title="One scan",
        summary="additive attention by one scan and two causal scans, and softmax attention",
        lead="Bidirectional attention: one scan, two causal scans, and softmax attention. "
        "Source: LightNet, arXiv:2405.21022, Fig. 2.",
        options=OneScanOptions,
        module="onescan.bench.contestants.one_scan",
        axis="tokens",
        items="",
    ),
    "decay": Contest(
        title="Bidirectional decay",
        summary="bidirectional attention with decay, softmax attention, and two causal kernels",
        lead="Bidirectional attention whose weights decay with distance, at a rate that depends on "
        "the tokens. Source: LION, arXiv:2502.16249.",
        options=DecayOptions,
        module="onescan.bench.contestants.decay",
        axis="tokens",
        items="",
    ),
    "causal": Contest(
        title="Causal language models",
        summary="training speed of causal language models, or speed of their ops",
        lead="Causal language models of equal width and depth, on random tokens. "
        "Source: LightNet, arXiv:2405.21022, Table 4.",
        options=CausalOptions,
        module="onescan.bench.contestants.causal",
        axis="tokens",
        items="tokens",
    ),
    "decode": Contest(
        title="Decoding",
        summary="time and memory per decoded token, over context lengths",
        lead="Cost of one more token after a context: a state of constant size compared with a "
        "growing cache.",
        options=DecodeOptions,
        module="onescan.bench.contestants.decode",
        axis="context length",
        items="tokens",
        at="after {} tokens",
        power_of="the context length",
    ),
    "models": Contest(
        title="Image classifiers",
        summary="training and inference speed of image classifiers",
        lead="Image classifiers with random weights, on random images.",
        options=ModelsOptions,
        module="onescan.bench.contestants.images",
        axis="side of the image, pixels",
        items="images",
        at="for images of side {}",
        letter="S",
        power_of="the side of the image, so that S^2 is in proportion to its pixels",
    ),
}


def _check_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} is {number}, expected a number above 0")
    _check_most(**numbers)


def _check_most(**numbers: int) -> None:
    for name, number in numbers.items():
        if number > MOST:
            raise ValueError(f"{name} is {number}, expected at most {MOST}")
