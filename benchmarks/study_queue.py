"""The runs of the study: models, claims of the papers, and the order in which they are trained.

A suite is one data set with one budget, on which models of equal size are compared. The learning
rate of each family of models is chosen by a sweep: short runs on a seed of their own, which are
evaluated on held-out training data. Two seeds of each model are trained first, and a third where it
can decide a claim.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from onescan import configs
from onescan.configs import ModelConfig
from onescan.data import DeitAugmentConfig
from onescan.layers.basic import MLPConfig
from onescan.layers.decays import NoDecayConfig
from onescan.layers.mixers import (
    HybridMixerConfig,
    LionMixerConfig,
    SoftmaxMixerConfig,
)
from onescan.layers.position import SinusoidalPositionConfig
from onescan.models.presets import LIGHTNET_ABLATIONS, preset
from onescan.models.size import model_size
from onescan.recipes import find_recipe
from onescan.tasks import ImageClassificationConfig
from onescan.training import RunConfig, TrainingConfig

TOLERANCE = 0.03  # by which the parameters of compared models may differ
SEEDS, MAX_SEEDS, SWEEP_SEED = 2, 3, 100
FREE = ("name", "model", "training.learning_rate")  # what compared runs may differ in
STANDARD_ERRORS = 2.0  # that a difference must exceed

# Files below the folder of the data; sweeps read the training part alone.
CIFAR10, CIFAR10_TRAIN = "cifar10", "cifar10-train.parquet"
SHAKESPEARE, SHAKESPEARE_TRAIN = "tinyshakespeare.txt", "tinyshakespeare-train.txt"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model of a suite."""

    title: str
    family: str
    """Models that share a learning rate."""
    run: RunConfig
    """The run, except for its learning rate and its seed."""
    minutes: float | None = None
    """Training time; the number of steps is measured before the run. None for given steps."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One data set with one budget."""

    title: str
    about: str
    """Budget and data, for the results page."""
    metric: Literal["accuracy", "loss"]
    rates: tuple[float, ...]
    """Learning rates of the sweeps."""
    sweep: Mapping[str, Any]
    """Changes of a run for the sweep, by dotted name."""
    sweep_minutes: float | None = None
    variants: Mapping[str, Variant]
    order: tuple[tuple[str, ...], ...]
    """Variants in the order in which they are trained; both models of a claim come first in the
    same group."""
    lengths: tuple[int, ...] = ()
    """Context lengths at which language models are evaluated after training."""


class Claim(NamedTuple):
    """A statement of a paper: one model is better than another."""

    text: str
    printed: str
    """The paper's own numbers, and where it prints them."""
    suite: str
    better: str
    worse: str
    margin: float = 0.0
    """For claims that one model is as good as another: the difference in the metric that is still
    considered equal."""


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """A run of the queue."""

    suite: str
    variant: str
    family: str
    seed: int
    config: RunConfig
    is_sweep: bool = False
    minutes: float | None = None
    rate_is_known: bool = True
    """Whether the sweep that chooses the learning rate has finished."""

    @property
    def name(self) -> str:
        """Name of the run, and of its result file."""
        if self.is_sweep:
            return sweep_name(self.suite, self.family, self.config.training.learning_rate)
        return f"{self.suite}-{self.variant}-{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run; the content of its result file."""

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
    """Step, epoch, training seconds so far and metrics of each evaluation. Empty if the run
    diverged."""
    error: str = ""
    """Why the run ended early, such as a loss that is not finite."""
    minutes: float | None = None
    """Training time that was given, if the number of steps was not."""
    perplexities: dict[str, float]
    """By context length, of language models."""
    wall_seconds: float
    cpu_seconds: float
    commit: str
    config: dict[str, Any]
    """The complete config. Paths are those of the queue, not of the machine."""
    data: dict[str, str]
    """SHA-256 of each file that was read."""
    environment: dict[str, Any]

    def final(self, metric: str) -> float:
        """Return a metric of the last evaluation; NaN if the run diverged."""
        return self.evaluations[-1][metric] if self.evaluations else math.nan


Results = Mapping[str, Result]


class Verdict(NamedTuple):
    """What the paired differences over seeds say of a claim.

    Attributes:
        outcome: The verdict.
        mean: Mean difference; positive supports the claim.
        error: Standard error of the mean; NaN with fewer than two seeds.
        seeds: Number of differences.
    """

    outcome: Literal["confirmed", "refuted", "undecided"]
    mean: float
    error: float
    seeds: int


def verdict_of(differences: Sequence[float]) -> Verdict:
    """Judge a claim: its mean difference must exceed twice its standard error, over three seeds.

    >>> verdict_of([1.0, 1.1, 0.9]).outcome, verdict_of([-1.0, -1.1, -0.9]).outcome
    ('confirmed', 'refuted')
    >>> verdict_of([1.0, 1.1]).outcome, verdict_of([1.0, -0.5, 0.2]).outcome
    ('undecided', 'undecided')
    """
    count = len(differences)
    mean = statistics.fmean(differences) if count else math.nan
    error = statistics.stdev(differences) / math.sqrt(count) if count > 1 else math.nan
    if count < MAX_SEEDS or not abs(mean) > STANDARD_ERRORS * error:
        return Verdict("undecided", mean, error, count)
    return Verdict("confirmed" if mean > 0 else "refuted", mean, error, count)


# CIFAR-10


def _image_model(name: str, **changes: Any) -> ModelConfig:
    """Return a preset with 0.48 million parameters for images of 32 x 32."""
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
    wide = {"mlp.ratio": 4.33}  # as many parameters as LightNet
    ldn = _image_model("ldn_base", width=128)
    natural = _image_model("lion_s_natural_tiny", **wide)
    models = {
        "lightnet": ("LightNet", "lightnet", lightnet),
        **{
            f"lightnet_{name}": (f"LightNet {title}", "lightnet", _ablation(lightnet, name))
            for name, title in (
                ("without_decay", "without decay"),
                ("without_norm", "without norm"),
                ("full_rank_gate", "with a full-rank gate"),
                ("without_tpe", "without MD-TPE"),
                ("without_lrpe", "without MD-LRPE"),
            )
        },
        "softmax": ("LightNet with softmax attention", "softmax", _with(lightnet, softmax)),
        "deit": ("DeiT", "deit", _image_model("deit_tiny", **wide)),
        "ldn": ("LDN", "ldn", ldn),
        "ldn_without_diffusion": (
            "LDN without diffusion",
            "ldn",
            _with(ldn, {"mixer.diffusion": False}),
        ),
        "vit": ("ViT", "vit", _image_model("vit_base", width=128, **{"mlp.ratio": 1.5})),
        "lion_s_natural": ("LION-s natural", "lion", natural),
        "lion_s_natural_forward": (
            "LION-s natural, forward only",
            "lion",
            _with(natural, {"mixer.direction": "forward"}),
        ),
        "lion_lit": ("LION-lit", "lion_lit", _image_model("lion_lit_tiny", **wide)),
        "tnl": ("TNL (two scans)", "tnl", _image_model("tnl_tiny", **{"mixer.gate_rank": 32})),
        "hybrid": (
            "LightNet, softmax in every fourth block",
            "lightnet",
            _with(lightnet, {"mixer": hybrid}),
        ),
        "lion_d_natural": (
            "LION-d natural",
            "lion",
            _image_model("lion_d_natural_tiny", **wide),
        ),
        **{
            f"lion_s_natural_{place}": (
                f"LION-s natural, {place} decay",
                "lion",
                _with(natural, {"mixer.decay_at": place}),
            )
            for place in ("target", "symmetric")
        },
    }
    return Suite(
        title="CIFAR-10",
        about=(
            "0.48 million parameters, patches of 4 x 4, 8 epochs of 50,000 images in batches of "
            "128, shifted by up to 4 pixels and flipped. Test accuracy after the last epoch."
        ),
        metric="accuracy",
        rates=(1e-3, 2e-3, 4e-3),
        sweep=MappingProxyType({"training.epochs": 2, "data.path": CIFAR10_TRAIN}),
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


def _with(model: Any, changes: Mapping[str, Any]) -> Any:
    """Return a model's config with other fields; "mlp.ratio" refers to the MLP after the change."""
    return configs.replace(model, changes)


def _ablation(model: ModelConfig, name: str) -> ModelConfig:
    return configs.replace(model, LIGHTNET_ABLATIONS[name])


# Text: Shakespeare, byte by byte


def _text_run(name: str, model: ModelConfig | None = None, **changes: Any) -> RunConfig:
    """Return a recipe on Shakespeare, with another model or other fields of its model."""
    run = find_recipe(name)()
    return replace(
        run,
        name="study",
        model=_with(model or run.model, changes),
        data=configs.replace(run.data, {"path": SHAKESPEARE}),
        training=replace(run.training, evaluate_every=2.0),
    )


@cache
def _text() -> Suite:
    # Learned positions of more tokens than those of training would be parameters without use.
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
                replace(lightnet, model=_ablation(lightnet.model, name)),
            )
            for name, title in (
                ("without_tpe", "without MD-TPE"),
                ("without_lrpe", "without MD-LRPE"),
                ("without_decay", "without decay"),
            )
        },
        "lion_s": ("LION-s, causal", "lion", _text_run("shakespeare_lion_s", **{"mlp.ratio": 4.2})),
        "linear_attention": (
            "linear attention",
            "linear_attention",
            replace(gpt2, model=_with(gpt2.model, {"mixer": linear})),
        ),
        "gpt2": ("GPT-2", "gpt2", gpt2),
    }
    return Suite(
        title="Shakespeare, byte by byte",
        about=(
            "0.85 million parameters, 2,400 steps of 16 sequences of 128 bytes: about five passes "
            "over the text. Loss on its last tenth after the last step, in nats per byte."
        ),
        metric="loss",
        rates=(1.5e-3, 3e-3, 6e-3),
        sweep=MappingProxyType({"training.steps": 400, "data.path": SHAKESPEARE_TRAIN}),
        variants={
            name: Variant(title=title, family=family, run=run)
            for name, (title, family, run) in runs.items()
        },
        order=(
            ("lightnet", "lightnet_without_tpe", "lightnet_without_lrpe", "lightnet_without_decay"),
            ("lion_s", "linear_attention", "gpt2"),
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
        title="Shakespeare, masked bytes",
        about=(
            "0.87 million parameters, 2,400 steps of 16 sequences of 128 bytes; 15% of the words "
            "are masked. Loss on their bytes in the last tenth, in nats per byte."
        ),
        metric="loss",
        rates=(1.5e-3, 3e-3, 6e-3),
        sweep=MappingProxyType({"training.steps": 400, "data.path": SHAKESPEARE_TRAIN}),
        variants={
            name: Variant(title=title, family=name, run=run) for name, (title, run) in runs.items()
        },
        order=(("lightnet", "lion_s", "bert"),),
    )


# Equal time: digits on textured canvases

SIDES, MINUTES = (64, 128), (5, 15)


def _canvas_run(model: ModelConfig, side: int) -> RunConfig:
    """Return the recipe of digits on textured canvases at another size."""
    run = find_recipe("canvas_digits")()
    return replace(
        run,
        name="study",
        model=_with(model, {"image_size": (side, side)}),
        data=configs.replace(run.data, {"size": side, "scale": side // 16}),
    )


@cache
def _time() -> Suite:
    lightnet: Any = find_recipe("canvas_digits")().model
    models = {
        "lightnet": ("LightNet", lightnet),
        "lion_s_natural": (
            "LION-s natural",
            replace(
                lightnet,
                mixer=LionMixerConfig(num_heads=4, scan="natural"),
                mlp=MLPConfig(ratio=232 / 48),
                position=None,
            ),
        ),
        # Learned positions would be three times as many parameters as the rest.
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
    variants = {
        f"{name}_{side}_{minutes}min": Variant(
            title=title, family=name, run=_canvas_run(model, side), minutes=minutes
        )
        for side in SIDES
        for name, (title, model) in models.items()
        for minutes in MINUTES
    }
    return Suite(
        title="Equal time: digits on textured canvases",
        about=(
            "0.07 million parameters, trained for 5 and for 15 minutes on one thread, with patches "
            "of 2 x 2: the same images at 64 x 64 pixels, 1,024 tokens, and at 128 x 128, 4,096 "
            "tokens. Evaluations do not count. Each line is one run, whose learning rate has "
            "decayed by its end. Learning rates were chosen in runs of 2 minutes at 64 x 64."
        ),
        metric="accuracy",
        rates=(1e-3, 2e-3, 4e-3),
        sweep=MappingProxyType({"data.split_seed": 1}),
        sweep_minutes=2.0,
        variants=variants,
        order=(tuple(variants),),
    )


SUITES = {"images": _images, "text": _text, "masked": _masked, "time": _time}
TIMED = ("time",)  # need a machine on which nothing else runs

# Groups of variants in the order in which they are trained: suite, and index in its order.
ORDER = (
    ("images", 0),
    ("text", 0),
    ("images", 1),
    ("images", 2),
    ("text", 1),
    ("images", 3),
    ("masked", 0),
    ("images", 4),
    ("time", 0),
)

CLAIMS = (
    Claim(
        "LightNet is more accurate than DeiT",
        "74.46 against 72.20 (LightNet, Table 1)",
        *("images", "lightnet", "deit"),
    ),
    Claim(
        "LightNet attention is as good as softmax attention in the same network",
        "not printed",
        *("images", "lightnet", "softmax"),
        margin=0.01,
    ),
    Claim(
        "Additive decay helps on images",
        "74.46 against 71.85 (LightNet, Table 1)",
        *("images", "lightnet", "lightnet_without_decay"),
    ),
    Claim(
        "MD-TPE helps on images",
        "74.46 against 73.97 (LightNet, Table 1)",
        *("images", "lightnet", "lightnet_without_tpe"),
    ),
    Claim(
        "MD-LRPE helps on images",
        "74.46 against 74.02 (LightNet, Table 1)",
        *("images", "lightnet", "lightnet_without_lrpe"),
    ),
    Claim(
        "The norm after attention helps on images",
        "74.46 against 73.46 (LightNet, Table 7)",
        *("images", "lightnet", "lightnet_without_norm"),
    ),
    Claim(
        "A low-rank gate is as good as a full-rank gate",
        "74.46 against 73.92 (LightNet, Table 7)",
        *("images", "lightnet", "lightnet_full_rank_gate"),
        margin=0.01,
    ),
    Claim(
        "One scan of LightNet is more accurate than two scans of TNL",
        "74.46 against 72.89 (LightNet, Table 1)",
        *("images", "lightnet", "tnl"),
    ),
    Claim(
        "LDN is more accurate than ViT",
        "80.9 against 77.5 on CIFAR-10 (LDN, Table 4)",
        *("images", "ldn", "vit"),
    ),
    Claim(
        "Diffusion helps",
        "80.9 against 78.0 on CIFAR-10 (LDN, Table 4)",
        *("images", "ldn", "ldn_without_diffusion"),
    ),
    Claim(
        "LION-s natural needs both directions",
        "80.07 against 70.24 on CIFAR-100 (LION, Table 16)",
        *("images", "lion_s_natural", "lion_s_natural_forward"),
    ),
    Claim(
        "LION-s natural is more accurate than LION-lit",
        "80.07 against 73.61 on CIFAR-100 (LION, Tables 14 and 16)",
        *("images", "lion_s_natural", "lion_lit"),
    ),
    Claim(
        "MD-TPE helps in language models",
        "perplexity 4.59 against 4.69 (LightNet, Table 6)",
        *("text", "lightnet", "lightnet_without_tpe"),
    ),
    Claim(
        "LRPE helps in language models",
        "perplexity 4.59 against 4.69 (LightNet, Table 6)",
        *("text", "lightnet", "lightnet_without_lrpe"),
    ),
    Claim(
        "Additive decay helps in language models",
        "perplexity 4.59 against 4.62 (LightNet, Table 6)",
        *("text", "lightnet", "lightnet_without_decay"),
    ),
    Claim(
        "LightNet is better than a Transformer",
        "perplexity 23.75 against 24.78 (LightNet, Table 5)",
        *("text", "lightnet", "gpt2"),
    ),
    Claim(
        "LightNet is better than linear attention (1 + elu)",
        "perplexity 23.75 against 28.05 (LightNet, Table 5)",
        *("text", "lightnet", "linear_attention"),
    ),
    Claim(
        "Causal LION-s is better than linear attention",
        "perplexity 18.16 against 21.07 (LION, Fig. 5)",
        *("text", "lion_s", "linear_attention"),
    ),
)


# The queue


def find_suite(name: str) -> Suite:
    """Return a suite by name."""
    return SUITES[name]()


def queue(results: Results) -> list[StudyRun]:
    """Return all runs in order, finished ones included; third seeds only where they can decide."""
    runs: dict[str, StudyRun] = {}
    reached: set[tuple[str, str]] = set()
    for suite, index in ORDER:
        names = find_suite(suite).order[index]
        families = dict.fromkeys(find_suite(suite).variants[name].family for name in names)
        found = [run for family in families for run in _sweep(suite, family)]
        found += [_run(suite, name, seed, results) for seed in range(SEEDS) for name in names]
        reached |= {(suite, name) for name in names}
        for claim in CLAIMS:
            pair = [(claim.suite, claim.better), (claim.suite, claim.worse)]
            if reached >= set(pair) and can_be_decided(claim, results):
                found += [_run(*each, SEEDS, results) for each in pair]
        runs |= {run.name: run for run in found if run.name not in runs}
    return list(runs.values())


def differences(claim: Claim, results: Results) -> list[float]:
    """Return the paired differences over seeds, oriented so that positive ones support a claim."""
    metric = find_suite(claim.suite).metric
    sign = 1.0 if metric == "accuracy" else -1.0
    found = []
    for seed in range(MAX_SEEDS):
        pair = [f"{claim.suite}-{name}-{seed}" for name in (claim.better, claim.worse)]
        if all(name in results for name in pair):
            better, worse = (results[name].final(metric) for name in pair)
            found.append(sign * (better - worse) + claim.margin)
    return found


def can_be_decided(claim: Claim, results: Results) -> bool:
    """Whether a third seed can decide a claim, after two.

    If two of three numbers have different signs, their mean is at most twice its standard error.
    """
    found = differences(claim, results)[:SEEDS]
    return len(found) == SEEDS and math.prod(found) > 0


def sweep_name(suite: str, family: str, rate: float) -> str:
    """Return the name of a run of a sweep."""
    return f"{suite}-sweep-{family}-{rate:g}"


def chosen_rate(suite: str, family: str, results: Results) -> float | None:
    """Return the learning rate with the best final metric; None if the sweep has not finished."""
    names = [sweep_name(suite, family, rate) for rate in find_suite(suite).rates]
    finished = [results[name] for name in names if name in results]
    if len(finished) < len(names):
        return None
    metric = find_suite(suite).metric
    sign = 1.0 if metric == "accuracy" else -1.0
    converged = [result for result in finished if not result.error]
    if not converged:
        raise ValueError(f"all runs of the sweep {suite}-sweep-{family} diverged")
    return max(converged, key=lambda result: sign * result.final(metric)).learning_rate


def _sweep(suite: str, family: str) -> Iterator[StudyRun]:
    """Yield the runs that choose the learning rate of a family, on its first variant."""
    found = find_suite(suite)
    name = next(name for name, each in found.variants.items() if each.family == family)
    for rate in found.rates:
        changes = {**found.sweep, "training.learning_rate": rate, "training.seed": SWEEP_SEED}
        yield StudyRun(
            suite=suite,
            variant=name,
            family=family,
            seed=SWEEP_SEED,
            config=configs.replace(found.variants[name].run, changes),
            is_sweep=True,
            minutes=found.sweep_minutes,
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
        minutes=variant.minutes,
        rate_is_known=rate is not None,
    )


def check_fairness() -> None:
    """Check that compared models have equal budgets, and parameters within `TOLERANCE`.

    Raises:
        ValueError: If they do not; names both models.
    """
    pairs = [(claim.suite, claim.better, claim.worse) for claim in CLAIMS]
    pairs += [(name, *pair) for name in TIMED for pair in pairwise(find_suite(name).variants)]
    for suite, a, b in pairs:
        first, second = (find_suite(suite).variants[name] for name in (a, b))
        counts = [parameters(variant.run.model) for variant in (first, second)]
        if max(counts) > (1 + TOLERANCE) * min(counts):
            raise ValueError(
                f"{suite}: {a} has {counts[0]:,} parameters and {b} {counts[1]:,}, expected a "
                f"difference of at most {TOLERANCE:.0%}"
            )
        if suite in TIMED:
            continue
        for path, *values in configs.differences(first.run, second.run):
            if not any(path == free or path.startswith(f"{free}.") for free in FREE):
                raise ValueError(
                    f"{suite}: {path} is {values[0]} for {a} and {values[1]} for {b}, expected "
                    "equal budgets"
                )


@cache
def parameters(model: ModelConfig) -> int:
    """Return the number of parameters of a model."""
    return model_size(model).parameters
