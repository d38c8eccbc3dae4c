"""The runs of the study: the models, the papers' claims, and the order of training.

A suite compares models of equal size on one data set with one training budget. A sweep chooses the
learning rate of each family of models. Its runs have a separate seed, and are evaluated on held-out
training data. Each model is trained with two seeds first, and with a third if that can decide a
claim.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from onescan import configs
from onescan.configs import ModelConfig
from onescan.experiments.data import DeitAugmentConfig
from onescan.experiments.recipes import find_recipe
from onescan.experiments.tasks import ImageClassificationConfig
from onescan.experiments.training import MachineConfig, RunConfig, TrainingConfig
from onescan.layers.basic import MLPConfig
from onescan.layers.decays import NoDecayConfig
from onescan.layers.mixers import (
    HybridMixerConfig,
    LionMixerConfig,
    SoftmaxMixerConfig,
)
from onescan.layers.position import SinusoidalPositionConfig
from onescan.models.presets import LIGHTNET_ABLATIONS, preset
from onescan.models.size import parameters_by_part

TOLERANCE = 0.03  # relative difference allowed between parameter counts of compared models
SEEDS, MAX_SEEDS, SWEEP_SEED = 2, 3, 100
MAY_DIFFER = (
    "name",
    "model",
    "training.learning_rate",
)  # fields that may differ between compared runs
MAX_EXTENSIONS = 2  # of a sweep whose best learning rate is the lowest or the highest
MINUTE = 60.0
STANDARD_ERRORS = 2.0  # that a mean difference must exceed to decide a claim

# Paths in the data folder. Sweeps read only the training data.
CIFAR10, CIFAR10_TRAIN = "cifar10", "cifar10-train.parquet"
SHAKESPEARE, SHAKESPEARE_TRAIN = "tinyshakespeare.txt", "tinyshakespeare-train.txt"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model in a suite."""

    title: str
    family: str
    """Name of the group of models that share a learning rate."""
    run: RunConfig
    """Config of the run. The queue replaces its learning rate and seed."""
    step_seconds: float | None = None
    """Measured time of a training step, in suites that compare models at equal training time."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Models that are compared on one data set with one training budget."""

    title: str
    description: str
    """Description of the models, data and budget for the results page."""
    metric: Literal["accuracy", "loss"]
    learning_rates: tuple[float, ...]
    """Learning rates that each sweep compares first; see `swept_rates`."""
    sweep: Mapping[str, Any]
    """Config fields that differ in sweeps, by dotted name."""
    variants: Mapping[str, Variant]
    order: tuple[tuple[str, ...], ...]
    """Groups of variants in training order. The third seeds of a claim follow the group that
    completes its pair of models."""
    lengths: tuple[int, ...] = ()
    """Context lengths at which language models are evaluated after training."""

    @property
    def equal_time(self) -> bool:
        """Whether the budget is a training time instead of a number of steps."""
        return any(variant.step_seconds is not None for variant in self.variants.values())


class Claim(NamedTuple):
    """A paper's claim that one model is better than another, or as good."""

    text: str
    reported: str
    """The paper's own results and where they appear."""
    suite: str
    better: str
    worse: str
    margin: float = 0.0
    """For claims that one model is as good as another: how much worse its metric may be."""


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """A run in the queue."""

    suite: str
    variant: str
    family: str
    seed: int
    config: RunConfig
    is_sweep: bool = False
    rate_is_known: bool = True
    """Whether the sweep that chooses the learning rate has finished."""

    @property
    def name(self) -> str:
        """Name of the run and of its result file."""
        if self.is_sweep:
            return sweep_name(self.suite, self.family, self.config.training.learning_rate)
        return f"{self.suite}-{self.variant}-{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a finished run, as stored in its file."""

    name: str
    suite: str
    variant: str
    family: str
    seed: int
    is_sweep: bool
    learning_rate: float
    parameters: int
    steps: int
    evaluations: list[dict[str, float]]
    """Step, epoch, metrics and training seconds so far of each evaluation. Empty if the run
    diverged."""
    error: str = ""
    """Why training stopped early, such as a loss that is not finite. Empty if it did not."""
    perplexities: dict[str, float]
    """Perplexity by context length. Empty except for language models."""
    wall_seconds: float
    cpu_seconds: float
    commit: str
    config: dict[str, Any]
    """The complete config, with paths relative to the data folder."""
    data: dict[str, str]
    """SHA-256 hash of each data file."""
    environment: dict[str, Any]

    def final(self, metric: str) -> float:
        """Return a metric of the last evaluation; NaN if the run diverged."""
        return self.evaluations[-1][metric] if self.evaluations else math.nan


Results = Mapping[str, Result]


class Verdict(NamedTuple):
    """What the paired differences over seeds say about a claim.

    Attributes:
        outcome: Whether the claim is confirmed, refuted or undecided.
        mean: Mean difference. Positive values support the claim.
        error: Standard error of the mean. NaN for fewer than two seeds.
        seeds: Number of differences.
    """

    outcome: Literal["confirmed", "refuted", "undecided"]
    mean: float
    error: float
    seeds: int


def verdict_of(differences: Sequence[float]) -> Verdict:
    """Return the verdict on a claim from its paired differences over seeds.

    It is undecided unless there are at least three differences and the absolute value of their mean
    exceeds twice its standard error.

    >>> verdict_of([1.0, 1.1, 0.9]).outcome, verdict_of([-1.0, -1.1, -0.9]).outcome
    ('confirmed', 'refuted')
    >>> verdict_of([1.0, 1.1]).outcome, verdict_of([1.0, -0.5, 0.2]).outcome
    ('undecided', 'undecided')
    """
    count = len(differences)
    if not all(map(math.isfinite, differences)):  # a run diverged
        return Verdict("undecided", math.nan, math.nan, count)
    mean = statistics.fmean(differences) if count else math.nan
    error = statistics.stdev(differences) / math.sqrt(count) if count > 1 else math.nan
    if count < MAX_SEEDS or not abs(mean) > STANDARD_ERRORS * error:
        return Verdict("undecided", mean, error, count)
    return Verdict("confirmed" if mean > 0 else "refuted", mean, error, count)


ONE_THREAD = MachineConfig(device="cpu", workers=0)  # so that CPU time includes reading data

ABLATIONS = {
    "without_decay": "without decay",
    "without_tpe": "without MD-TPE",
    "without_lrpe": "without MD-LRPE",
}
LEAK = {"with_leak": "with leak"}
NORM_AND_GATE = {"without_norm": "without norm", "full_rank_gate": "with a full-rank gate"}


# CIFAR-10


def _image_model(name: str, **changes: Any) -> ModelConfig:
    """Return a preset with about 0.48 million parameters for images of 32 x 32 pixels."""
    sizes = {
        "num_classes": 10,
        "image_size": 32,
        "patch_size": 4,
        "width": 96,
        "depth": 4,
        "mixer.num_heads": 4,
        "drop_path": 0.0,
        "init_std": 0.05,
    }
    return preset(name, **{**sizes, **changes})


def _image_run(model: ModelConfig) -> RunConfig:
    run = find_recipe("cifar10_lightnet")()
    data = configs.replace(run.data, {"path": CIFAR10})
    augment = DeitAugmentConfig(pad=4, num_ops=0, random_erasing=0.0)
    return replace(
        run,
        name="study",
        machine=ONE_THREAD,
        data=data,
        model=model,
        task=ImageClassificationConfig(label_smoothing=0.1, augment=augment),
        training=TrainingConfig(epochs=8, batch_size=128, evaluate_every=2.0),
    )


@cache
def _images() -> Suite:
    lightnet = _image_model(
        "lightnet_tiny",
        **{
            "mixer.gate_rank": 32,
            "position.hidden_states": 16,
            "position.bidirectional": True,
        },
    )
    softmax = {"mixer": SoftmaxMixerConfig(num_heads=4), "mlp.ratio": 2.88}
    hybrid = HybridMixerConfig(linear=lightnet.mixer, attention=SoftmaxMixerConfig(num_heads=4))
    wide = {"mlp.ratio": 4.33}  # gives about as many parameters as LightNet has
    ldn = _image_model("ldn_base", width=128)
    natural = _image_model("lion_s_natural_tiny", **wide)
    models = {
        "lightnet": ("LightNet", "lightnet", lightnet),
        **{
            f"lightnet_{name}": (
                f"LightNet {title}",
                "lightnet",
                configs.replace(lightnet, LIGHTNET_ABLATIONS[name]),
            )
            for name, title in (ABLATIONS | NORM_AND_GATE).items()
        },
        "softmax": (
            "LightNet with softmax attention",
            "softmax",
            configs.replace(lightnet, softmax),
        ),
        "deit": ("DeiT", "deit", _image_model("deit_tiny", **wide)),
        "ldn": ("LDN", "ldn", ldn),
        "ldn_without_diffusion": (
            "LDN without diffusion",
            "ldn",
            configs.replace(ldn, {"mixer.diffusion": False}),
        ),
        "vit": ("ViT", "vit", _image_model("vit_base", width=128, **{"mlp.ratio": 1.5})),
        "lion_s_natural": ("LION-s natural", "lion", natural),
        "lion_s_natural_forward": (
            "LION-s natural, forward only",
            "lion",
            configs.replace(natural, {"mixer.direction": "forward"}),
        ),
        "lion_lit": ("LION-lit", "lion_lit", _image_model("lion_lit_tiny", **wide)),
        "tnl": ("TNL (two scans)", "tnl", _image_model("tnl_tiny", **{"mixer.gate_rank": 32})),
        "hybrid": (
            "LightNet, softmax in every fourth block",
            "lightnet",
            configs.replace(lightnet, {"mixer": hybrid}),
        ),
        "lion_d_natural": (
            "LION-d natural",
            "lion",
            _image_model("lion_d_natural_tiny", **wide),
        ),
        **{
            f"lion_s_natural_{decay_at}": (
                f"LION-s natural, {decay_at} decay",
                "lion",
                configs.replace(natural, {"mixer.decay_at": decay_at}),
            )
            for decay_at in ("target", "symmetric")
        },
    }
    return Suite(
        title="CIFAR-10",
        description=(
            "Models have about 0.48 million parameters and patches of 4 x 4 pixels. They are "
            "trained for 8 epochs on 50,000 images with batch size 128, random shifts of up to 4 "
            "pixels and horizontal flips. Accuracy is measured on the test images after the last "
            "epoch. The runs that choose learning rates have only 2 epochs, so these rates may be "
            "too high for 8 epochs."
        ),
        metric="accuracy",
        learning_rates=(1e-3, 2e-3, 4e-3),
        sweep={"training.epochs": 2, "data.path": CIFAR10_TRAIN},
        variants={
            name: Variant(title=title, family=family, run=_image_run(model))
            for name, (title, family, model) in models.items()
        },
        order=(
            ("lightnet", "lightnet_without_decay", "softmax", "deit"),
            (
                "lightnet_without_norm",
                "lightnet_full_rank_gate",
                "lightnet_without_tpe",
                "lightnet_without_lrpe",
            ),
            ("ldn", "ldn_without_diffusion", "vit"),
            ("lion_s_natural", "lion_s_natural_forward", "lion_lit", "tnl"),
            (
                "hybrid",
                "lion_d_natural",
                "lion_s_natural_target",
                "lion_s_natural_symmetric",
            ),
        ),
    )


# Byte-level language models on Shakespeare


def _text_run(name: str, **changes: Any) -> RunConfig:
    """Return a recipe on Shakespeare, optionally with other model fields."""
    run = find_recipe(name)()
    return replace(
        run,
        name="study",
        machine=ONE_THREAD,
        model=configs.replace(run.model, changes),
        data=configs.replace(run.data, {"path": SHAKESPEARE}),
        training=replace(run.training, evaluate_every=2.0),
    )


@cache
def _text() -> Suite:
    # Learned positions beyond the training length would be unused parameters.
    tokens: dict[str, Any] = {"position.max_tokens": 128}
    lightnet = _text_run("shakespeare_lightnet")
    gpt2 = _text_run("shakespeare_gpt2", **tokens)
    linear = LionMixerConfig(
        num_heads=4, direction="forward", decay=NoDecayConfig(), feature_map="elu_plus_one"
    )
    runs = {
        "lightnet": ("LightNet", "lightnet", lightnet),
        **{
            f"lightnet_{name}": (
                f"LightNet {title}",
                "lightnet",
                _text_run(f"shakespeare_lightnet/{name}"),
            )
            for name, title in (ABLATIONS | LEAK).items()
        },
        "lion_s": ("Causal LION-s", "lion", _text_run("shakespeare_lion_s", **{"mlp.ratio": 4.2})),
        "linear_attention": (
            "Linear attention",
            "linear_attention",
            replace(gpt2, model=configs.replace(gpt2.model, {"mixer": linear})),
        ),
        "gpt2": ("GPT-2", "gpt2", gpt2),
    }
    return Suite(
        title="Byte-level language models on Shakespeare",
        description=(
            "Models have about 0.85 million parameters. They are trained for 2,400 steps of 16 "
            "sequences of 128 bytes, about five passes over the training text. The loss is "
            "measured on the last tenth of the text after the last step. Perplexity per byte is "
            "measured on up to 65,537 of its bytes at several context lengths T, in bytes. It is "
            "missing where a model does not support the length. The runs that choose learning "
            "rates are as long as the others."
        ),
        metric="loss",
        learning_rates=(1.5e-3, 3e-3, 6e-3),
        sweep={"data.path": SHAKESPEARE_TRAIN},
        variants={
            name: Variant(title=title, family=family, run=run)
            for name, (title, family, run) in runs.items()
        },
        order=(
            ("lightnet", "lightnet_without_tpe", "lightnet_without_lrpe", "lightnet_without_decay"),
            ("lion_s", "linear_attention", "gpt2"),
            ("lightnet_with_leak",),
        ),
        lengths=(32, 128, 512, 2048, 8192),
    )


@cache
def _masked() -> Suite:
    bert = _text_run("wikitext2_mlm_bert", **{"position.max_tokens": 128})
    runs = {
        "lightnet": ("LightNet", _text_run("wikitext2_mlm_lightnet")),
        "lion_s": ("LION-s", _text_run("wikitext2_mlm_lion_s", **{"mlp.ratio": 4.2})),
        "bert": ("BERT", bert),
    }
    return Suite(
        title="Masked language models on Shakespeare",
        description=(
            "Models have about 0.87 million parameters. They are trained for 2,400 steps of 16 "
            "sequences of 128 bytes, in which 15% of the words are masked. The loss is measured on "
            "the masked bytes of the last tenth of the text after the last step. The runs that "
            "choose learning rates are as long as the others."
        ),
        metric="loss",
        learning_rates=(1.5e-3, 3e-3, 6e-3),
        sweep={"data.path": SHAKESPEARE_TRAIN},
        variants={
            name: Variant(title=title, family=name, run=run) for name, (title, run) in runs.items()
        },
        order=(("lightnet", "lion_s", "bert"),),
    )


# Digits on textured images at equal training time

SIDES, MINUTES = (64, 128), (5, 15)
STEP_TIMES = Path(__file__).with_name("study_step_times.json")  # written by `study.py measure`
EVALUATIONS = 5  # during each run, or somewhat more in sweeps, whose epochs are shorter
STEPS_PER_EPOCH = 89  # full batches of 16 in 1,437 training images


@cache
def canvas_models() -> dict[str, tuple[str, ModelConfig]]:
    """Return the title and the config of each model that is compared at equal time, by name."""
    lightnet: Any = find_recipe("canvas_digits")().model
    return {
        "lightnet": ("LightNet", lightnet),
        "softmax": (
            "LightNet with softmax attention",
            configs.replace(
                lightnet, {"mixer": SoftmaxMixerConfig(num_heads=4), "mlp.ratio": 2.88}
            ),
        ),
        "lion_s_natural": (
            "LION-s natural",
            replace(
                lightnet,
                mixer=LionMixerConfig(num_heads=4, scan="natural"),
                mlp=MLPConfig(ratio=232 / 48),
                position=None,
            ),
        ),
        # Learned positions would have three times as many parameters as the rest of the model.
        "deit": (
            "DeiT with sinusoidal positions",
            replace(
                lightnet,
                mixer=SoftmaxMixerConfig(num_heads=4),
                mlp=MLPConfig(ratio=237 / 48),
                position=SinusoidalPositionConfig(),
            ),
        ),
    }


def canvas_run(name: str, side: int) -> RunConfig:
    """Return the recipe canvas_digits with another model and image size."""
    run = find_recipe("canvas_digits")()
    _, model = canvas_models()[name]
    return replace(
        run,
        name="study",
        machine=ONE_THREAD,
        model=configs.replace(model, {"image_size": (side, side)}),
        data=configs.replace(run.data, {"size": side, "scale": side // 16}),
    )


def _timed_variant(name: str, side: int, minutes: float, step_seconds: float) -> Variant:
    """Return a run with as many steps as fit in the given time, and evenly spaced evaluations."""
    title, _ = canvas_models()[name]
    steps = EVALUATIONS * max(1, round(minutes * MINUTE / step_seconds / EVALUATIONS))
    every = steps / EVALUATIONS / STEPS_PER_EPOCH
    changes = {"steps": steps, "evaluate_every": every, "checkpoint_every": every}
    run = configs.replace(
        canvas_run(name, side), {f"training.{field}": value for field, value in changes.items()}
    )
    return Variant(
        title=f"{title}, {side} x {side}, {minutes:g} min",
        family=name,
        run=run,
        step_seconds=step_seconds,
    )


@cache
def _time() -> Suite:
    seconds = json.loads(STEP_TIMES.read_text(encoding="utf-8"))["seconds"]
    return Suite(
        title="Digits on textured images at equal training time",
        description=(
            "Models have about 0.07 million parameters and patches of 2 x 2 pixels. Images have 64 "
            "x 64 pixels (1,024 tokens) or 128 x 128 pixels (4,096 tokens), and digits take up "
            "half their height and width. Training steps were timed for all models in turn, with "
            "one thread on an otherwise idle machine, by `study.py measure`. Each model is trained "
            "for as many steps as fit in 5 or 15 minutes. Each line in the figure is one run, with "
            "a learning rate schedule that ends with the run. Learning rates are chosen by runs of "
            "5 minutes on images of 64 x 64 pixels."
        ),
        metric="accuracy",
        learning_rates=(1e-3, 2e-3, 4e-3),
        sweep={"data.validate": True},
        variants={
            f"{name}_{side}_{minutes}min": _timed_variant(
                name, side, minutes, seconds[f"{name}_{side}"]
            )
            for side in SIDES
            for name in canvas_models()
            for minutes in MINUTES
        },
        order=tuple(
            tuple(f"{name}_{side}_{minutes}min" for name in canvas_models())
            for side in reversed(SIDES)
            for minutes in reversed(MINUTES)
        ),
    )


SUITES = {"images": _images, "text": _text, "masked": _masked, "time": _time}

# Groups of variants in training order: name of the suite, and index in its `order`.
ORDER = (
    ("images", 0),
    ("text", 0),
    ("images", 1),
    ("images", 2),
    ("text", 1),
    ("images", 3),
    ("masked", 0),
    ("images", 4),
    *(("time", index) for index in range(len(SIDES) * len(MINUTES))),
    ("text", 2),
)

CLAIMS = (
    Claim(
        "LightNet is more accurate than DeiT",
        "74.46 vs. 72.20 (LightNet, Table 1)",
        *("images", "lightnet", "deit"),
    ),
    Claim(
        "LightNet's attention is as good as softmax attention in the same network",
        "not reported",
        *("images", "lightnet", "softmax"),
        margin=0.01,
    ),
    Claim(
        "Additive decay helps on images",
        "74.46 vs. 71.85 (LightNet, Table 1)",
        *("images", "lightnet", "lightnet_without_decay"),
    ),
    Claim(
        "MD-TPE helps on images",
        "74.46 vs. 73.97 (LightNet, Table 1)",
        *("images", "lightnet", "lightnet_without_tpe"),
    ),
    Claim(
        "MD-LRPE helps on images",
        "74.46 vs. 74.02 (LightNet, Table 1)",
        *("images", "lightnet", "lightnet_without_lrpe"),
    ),
    Claim(
        "The norm after attention helps on images",
        "74.46 vs. 73.46 (LightNet, Table 7)",
        *("images", "lightnet", "lightnet_without_norm"),
    ),
    Claim(
        "A low-rank gate is as good as a full-rank gate",
        "74.46 vs. 73.92 (LightNet, Table 7)",
        *("images", "lightnet", "lightnet_full_rank_gate"),
        margin=0.01,
    ),
    Claim(
        "LightNet with one scan is more accurate than TNL with two scans",
        "74.46 vs. 72.89 (LightNet, Table 1)",
        *("images", "lightnet", "tnl"),
    ),
    Claim(
        "LDN is more accurate than ViT",
        "80.9 vs. 77.5 on CIFAR-10 (LDN, Table 4)",
        *("images", "ldn", "vit"),
    ),
    Claim(
        "Diffusion helps LDN",
        "80.9 vs. 78.0 on CIFAR-10 (LDN, Table 4)",
        *("images", "ldn", "ldn_without_diffusion"),
    ),
    Claim(
        "Bidirectional LION-s natural is more accurate than forward-only LION-s natural",
        "80.07 vs. 70.24 on CIFAR-100 (LION, Table 16)",
        *("images", "lion_s_natural", "lion_s_natural_forward"),
    ),
    Claim(
        "LION-s natural is more accurate than LION-lit",
        "80.07 vs. 73.61 on CIFAR-100 (LION, Tables 14 and 16)",
        *("images", "lion_s_natural", "lion_lit"),
    ),
    Claim(
        "MD-TPE helps in language models",
        "perplexity 4.59 vs. 4.69 (LightNet, Table 6)",
        *("text", "lightnet", "lightnet_without_tpe"),
    ),
    Claim(
        "MD-LRPE helps in language models",
        "perplexity 4.59 vs. 4.69 (LightNet, Table 6)",
        *("text", "lightnet", "lightnet_without_lrpe"),
    ),
    Claim(
        "Additive decay helps in language models",
        "perplexity 4.59 vs. 4.62 (LightNet, Table 6)",
        *("text", "lightnet", "lightnet_without_decay"),
    ),
    Claim(
        "LightNet is a better language model than a Transformer",
        "perplexity 23.75 vs. 24.78 (LightNet, Table 5)",
        *("text", "lightnet", "gpt2"),
    ),
    Claim(
        "LightNet is a better language model than linear attention (1 + elu)",
        "perplexity 23.75 vs. 28.05 (LightNet, Table 5)",
        *("text", "lightnet", "linear_attention"),
    ),
    Claim(
        "Causal LION-s is a better language model than linear attention",
        "perplexity 18.16 vs. 21.07 (LION, Fig. 5)",
        *("text", "lion_s", "linear_attention"),
    ),
)


# The queue


def find_suite(name: str) -> Suite:
    """Return a suite by name."""
    return SUITES[name]()


def planned_runs(results: Results) -> list[StudyRun]:
    """Return all runs in training order, including finished ones.

    Third seeds are included only if they can decide a claim.
    """
    runs: dict[str, StudyRun] = {}
    scheduled: set[tuple[str, str]] = set()
    for suite, index in ORDER:
        names = find_suite(suite).order[index]
        families = dict.fromkeys(find_suite(suite).variants[name].family for name in names)
        group = [run for family in families for run in _sweep(suite, family, results)]
        group += [_run(suite, name, seed, results) for seed in range(SEEDS) for name in names]
        scheduled |= {(suite, name) for name in names}
        for claim in CLAIMS:
            pair = [(claim.suite, claim.better), (claim.suite, claim.worse)]
            if scheduled >= set(pair) and can_be_decided(claim, results):
                group += [_run(*model, SEEDS, results) for model in pair]
        runs |= {run.name: run for run in group if run.name not in runs}
    return list(runs.values())


def differences(claim: Claim, results: Results) -> dict[int, float]:
    """Return the difference for each seed that both models were trained with, plus the margin.

    Positive differences support the claim.
    """
    metric = find_suite(claim.suite).metric
    sign = 1.0 if metric == "accuracy" else -1.0
    by_seed = {}
    for seed in range(MAX_SEEDS):
        pair = [f"{claim.suite}-{name}-{seed}" for name in (claim.better, claim.worse)]
        if all(name in results for name in pair):
            better, worse = (results[name].final(metric) for name in pair)
            by_seed[seed] = sign * (better - worse) + claim.margin
    return by_seed


def can_be_decided(claim: Claim, results: Results) -> bool:
    """Return whether a third seed can decide a claim, given the first two.

    It cannot if the first two differences have different signs: for any third difference, the
    absolute value of the mean is then at most twice its standard error.
    """
    by_seed = differences(claim, results)
    return by_seed.keys() >= set(range(SEEDS)) and math.prod(by_seed[i] for i in range(SEEDS)) > 0


def sweep_name(suite: str, family: str, rate: float) -> str:
    """Return the name of a run in a sweep."""
    return f"{suite}-sweep-{family}-{rate:g}"


def swept_rates(suite: str, family: str, results: Results) -> list[float]:
    """Return the learning rates of a sweep, in ascending order.

    While the best rate is the lowest or the highest, the sweep is extended beyond it by a factor of
    two, at most `MAX_EXTENSIONS` times.
    """
    rates = sorted(find_suite(suite).learning_rates)
    for _ in range(MAX_EXTENSIONS):
        best = _best_rate(suite, family, rates, results)
        if best == rates[0]:
            rates.insert(0, best / 2)
        elif best == rates[-1]:
            rates.append(best * 2)
    return rates


def chosen_rate(suite: str, family: str, results: Results) -> float | None:
    """Return the learning rate with the best final metric.

    Returns:
        None if a run of the sweep has no result yet, or all of them diverged.
    """
    return _best_rate(suite, family, swept_rates(suite, family, results), results)


def _best_rate(suite: str, family: str, rates: Sequence[float], results: Results) -> float | None:
    names = [sweep_name(suite, family, rate) for rate in rates]
    metric = find_suite(suite).metric
    sign = 1.0 if metric == "accuracy" else -1.0
    finished = [results[name] for name in names if name in results]
    converged = [result for result in finished if math.isfinite(result.final(metric))]
    if len(finished) < len(names) or not converged:
        return None
    return max(converged, key=lambda result: sign * result.final(metric)).learning_rate


def _sweep(suite: str, family: str, results: Results) -> Iterator[StudyRun]:
    """Yield the sweep of a family: one run of its first variant at each learning rate."""
    definition = find_suite(suite)
    name = next(name for name, variant in definition.variants.items() if variant.family == family)
    for rate in swept_rates(suite, family, results):
        changes = {**definition.sweep, "training.learning_rate": rate, "training.seed": SWEEP_SEED}
        yield StudyRun(
            suite=suite,
            variant=name,
            family=family,
            seed=SWEEP_SEED,
            config=configs.replace(definition.variants[name].run, changes),
            is_sweep=True,
        )


def _run(suite: str, name: str, seed: int, results: Results) -> StudyRun:
    variant = find_suite(suite).variants[name]
    rate = chosen_rate(suite, variant.family, results)
    training = replace(variant.run.training, seed=seed)
    if rate is not None:
        training = replace(training, learning_rate=rate)
    return StudyRun(
        suite=suite,
        variant=name,
        family=variant.family,
        seed=seed,
        config=replace(variant.run, training=training),
        rate_is_known=rate is not None,
    )


def check_results(results: Results) -> None:
    """Check that results are those of the runs that the queue has under their names.

    Raises:
        ValueError: If a result is of an unknown run, or of other settings.
    """
    runs: dict[str, StudyRun] = {}
    for suite in SUITES:
        variants = find_suite(suite).variants
        families = dict.fromkeys(variant.family for variant in variants.values())
        suite_runs = [run for family in families for run in _sweep(suite, family, results)]
        suite_runs += [
            _run(suite, name, seed, results) for name in variants for seed in range(MAX_SEEDS)
        ]
        runs |= {run.name: run for run in suite_runs}
    for name, result in results.items():
        if name not in runs:
            raise ValueError(f"{name} has a result, but it is not a run of the study: remove it")
        if changes := list(_changed_settings(runs[name], result)):
            raise ValueError(
                f"the result of {name} has other settings than the queue ({', '.join(changes)}): "
                "remove it, and train the run again"
            )


def _changed_settings(run: StudyRun, result: Result) -> Iterator[str]:
    """Yield the names of settings in which a result differs from its run in the queue."""
    for name in ("suite", "variant", "family", "seed", "is_sweep"):
        if getattr(run, name) != getattr(result, name):
            yield name
    if not run.rate_is_known:
        yield "the sweep of its learning rate has no result"
    if result.parameters != parameters(run.config.model):
        yield "parameters"
    try:
        config = configs.from_dict(RunConfig, result.config)
    except ValueError as error:
        yield f"config: {error}"
        return
    for path, *_ in configs.differences(run.config, config):
        if not path.startswith("machine."):
            yield path


def check_fairness() -> None:
    """Check that compared models have equal budgets, and parameter counts within `TOLERANCE`.

    In suites that compare models at equal time, only parameters are checked.

    Raises:
        ValueError: If two models differ too much. The message names both.
    """
    pairs = [(claim.suite, claim.better, claim.worse) for claim in CLAIMS]
    pairs += [
        (name, *pair)
        for name in SUITES
        if find_suite(name).equal_time
        for pair in pairwise(find_suite(name).variants)
    ]
    for suite, a, b in pairs:
        first, second = (find_suite(suite).variants[name] for name in (a, b))
        counts = [parameters(variant.run.model) for variant in (first, second)]
        if max(counts) > (1 + TOLERANCE) * min(counts):
            raise ValueError(
                f"{suite}: {a} has {counts[0]:,} parameters, but {b} has {counts[1]:,}, expected a "
                f"difference of at most {TOLERANCE:.0%}"
            )
        if find_suite(suite).equal_time:
            continue
        for path, *values in configs.differences(first.run, second.run):
            if not any(path == prefix or path.startswith(f"{prefix}.") for prefix in MAY_DIFFER):
                raise ValueError(
                    f"{suite}: {path} is {values[0]} for {a}, but {values[1]} for {b}, expected "
                    "equal values"
                )


@cache
def parameters(model: ModelConfig) -> int:
    """Return the number of parameters of a model."""
    return sum(parameters_by_part(model).values())
