"""Benchmarks that set ours beside others', and their options, in a module without torch."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, get_args

Dtype = Literal["float32", "bfloat16", "float16"]
AskedBackend = Literal["auto", "torch", "triton"]
LONGEST_BUDGET_S = 50_000.0  # many budgets are waited for, in milliseconds of 32 bits
MOST = 2**31 - 1  # what counts in 32 bits, as in kernels and in torch's threads
CausalSize = Literal["small", "45m", "150m", "380m", "1.45b"]


@dataclass(frozen=True, kw_only=True)
class ContestOptions(ABC):
    """What is measured, in all benchmarks of contestants."""

    batch: int = 4
    """sequences of a call"""
    dtype: Dtype = "float32"
    """of inputs and weights"""
    device: str = "auto"
    """cpu, cuda, ...; auto is a GPU where there is one"""
    backend: AskedBackend = "auto"
    """what runs our ops"""
    compile: bool = False
    """every contestant as torch.compile makes it, anew for each size"""
    gradients: bool = True
    """measure forward and backward too"""
    rounds: int = 5
    """at least so many; in a round each contestant has a turn"""
    seconds: float = 2.0
    """rounds go on for at least so long"""
    budget_s: float = 60.0
    """what takes longer than this in a call is not tried at larger sizes"""
    threads: int | None = None
    """of a contestant on a CPU; without it, as many as torch takes"""
    names: tuple[str, ...] = ()
    """contestants, of which the first is what the others are compared to; without it, all"""

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
        for name in ("batch", "rounds", "budget_s", "threads"):
            number = getattr(self, name)
            if number is not None and not 0 < number < float("inf"):
                raise ValueError(f"{name} is {number}, expected a number above 0")
        if not 0 <= self.seconds < float("inf"):
            raise ValueError(f"seconds is {self.seconds}, expected 0 or more")
        if self.budget_s > LONGEST_BUDGET_S:
            raise ValueError(
                f"budget_s is {self.budget_s}, expected at most {LONGEST_BUDGET_S:.0f}"
            )
        from onescan.checks import check_choice  # imports torch, which help does without

        check_choice("dtype", self.dtype, get_args(Dtype))
        check_choice("backend", self.backend, get_args(AskedBackend))
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"names is {self.names}, expected each once")
        if not self.sizes or len(set(self.sizes)) < len(self.sizes):
            raise ValueError(f"{self.axis} is {self.sizes}, expected at least one, and each once")
        for size in self.sizes:
            if size < 1:
                raise ValueError(f"{self.axis} has {size}, expected numbers above 0")
            if size > MOST:
                raise ValueError(f"{self.axis} has {size}, expected at most {MOST}")
        _check_most(batch=self.batch, rounds=self.rounds, threads=self.threads or 1)


@dataclass(frozen=True, kw_only=True)
class OneScanOptions(ContestOptions):
    """One scan of all tokens, and what else lets each read all others."""

    tokens: tuple[int, ...] = (256, 1024, 4096, 16384)
    """of a sequence"""
    heads: int = 6
    """of a token"""
    width: int = 64
    """of a head"""

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.tokens

    def check(self) -> None:
        """Raise ValueError as the base does, and for widths."""
        super().check()
        _check_positive(heads=self.heads, width=self.width)


@dataclass(frozen=True, kw_only=True)
class DecayOptions(OneScanOptions):
    """Decay in both directions, chosen by each token."""

    decay: Literal["scalar", "diagonal"] = "scalar"
    """one for each head, or one for each of its key channels"""
    normalize: Literal["none", "sum"] = "sum"
    """what ours divide by, as in LION; flash-linear-attention does not divide"""
    chunk_size: int = 64
    """tokens of a chunk of ours"""

    def check(self) -> None:
        """Raise ValueError as the base does, and for chunks."""
        super().check()
        _check_positive(chunk_size=self.chunk_size)
        from onescan.checks import check_choice  # imports torch, which help does without

        check_choice("decay", self.decay, ("scalar", "diagonal"))
        check_choice("normalize", self.normalize, ("none", "sum"))


@dataclass(frozen=True, kw_only=True)
class CausalOptions(ContestOptions):
    """Whole causal language models that learn from random tokens, or their ops alone."""

    tokens: tuple[int, ...] = (512, 1024, 2048, 4096)
    """of a sequence"""
    batch: int = 1
    """sequences of a call"""
    gradients: bool = True
    """of models measure training, and without it inference; of ops, forward and backward too"""
    size: CausalSize = "small"
    """of the models: width and depth, the same for all but Mamba-2, which has twice as many blocks
    as they have no MLP"""
    level: Literal["model", "op"] = "model"
    """whole models, or what mixes their tokens, alone"""

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.tokens

    def check(self) -> None:
        """Raise ValueError as the base does, and for choices."""
        super().check()
        from onescan.checks import check_choice  # imports torch, which help does without

        check_choice("size", self.size, get_args(CausalSize))
        check_choice("level", self.level, ("model", "op"))


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(ContestOptions):
    """One further token of a causal language model, after so many; without gradients always."""

    tokens: tuple[int, ...] = (1_000, 10_000, 100_000)
    """that were read or written before"""
    batch: int = 1
    """sequences of a call"""
    gradients: bool = False
    """must stay so: a step of decoding has none"""
    size: CausalSize = "45m"
    """of the models"""

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.tokens

    def check(self) -> None:
        """Raise ValueError as the base does, and for what decoding has not."""
        super().check()
        from onescan.checks import check_choice  # imports torch, which help does without

        check_choice("size", self.size, get_args(CausalSize))
        if self.gradients:
            raise ValueError("gradients is True, expected False: a step of decoding has none")


@dataclass(frozen=True, kw_only=True)
class ModelsOptions(ContestOptions):
    """Image classifiers: inference, and training where gradients are asked for."""

    size: tuple[int, ...] = (224,)
    """sides of the square images, in pixels"""
    batch: int = 8
    """images of a call"""
    gradients: bool = True
    """measure training too"""
    presets: tuple[str, ...] = (
        "lightnet_tiny",
        "lion_lit_tiny",
        "lion_d_tiny",
        "lion_s_tiny",
        "deit_tiny",
        "timm/deit_tiny",
    )
    """models of `onescan models`; timm/deit_tiny, timm/deit_small and timm/deit_base are timm's"""

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.size

    @property
    def axis(self) -> str:
        return "size"

    def check(self) -> None:
        """Raise ValueError as the base does, and for presets."""
        super().check()
        if not self.presets or len(set(self.presets)) < len(self.presets):
            raise ValueError(f"presets is {self.presets}, expected at least one, and each once")


@dataclass(frozen=True, kw_only=True)
class Contest:
    """A benchmark: what its page says of it, and where its contestants are."""

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
        summary="one scan, two causal scans and softmax attention over lengths",
        lead="Every token reads all others: by one sum for all of them, by two causal scans, and "
        "by softmax attention. Source: LightNet, arXiv:2405.21022, Fig. 2.",
        options=OneScanOptions,
        module="onescan.bench.contestants.one_scan",
        axis="tokens",
        items="",
    ),
    "decay": Contest(
        title="Decay in both directions",
        summary="bidirectional decayed attention, softmax attention, and causal kernels twice",
        lead="Every token reads all others, less of those far away, as it chooses itself. "
        "Source: LION, arXiv:2502.16249.",
        options=DecayOptions,
        module="onescan.bench.contestants.decay",
        axis="tokens",
        items="",
    ),
    "causal": Contest(
        title="Causal language models",
        summary="speed of causal language models in training, or of their ops alone",
        lead="Whole language models of equal width and depth, on random tokens. "
        "Source: LightNet, arXiv:2405.21022, Table 4.",
        options=CausalOptions,
        module="onescan.bench.contestants.causal",
        axis="tokens",
        items="tokens",
    ),
    "decode": Contest(
        title="Decoding",
        summary="time and memory of a further token after so many",
        lead="What one more token costs after so many: a state of fixed size beside a cache that "
        "grows.",
        options=DecodeOptions,
        module="onescan.bench.contestants.decode",
        axis="tokens before",
        items="tokens",
        at="after {} tokens",
        power_of="the number of tokens before",
    ),
    "models": Contest(
        title="Image classifiers",
        summary="images per second of image classifiers, training and inference",
        lead="Whole image classifiers, with random weights and images.",
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
