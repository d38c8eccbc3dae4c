"""Commands that list presets and recipes: models, recipes, show."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from onescan.cli.options import HELP, HELP_ALL, Argv, echo, metric_label, metric_value, parse
from onescan.messages import closest

if TYPE_CHECKING:
    from onescan.models.presets import Preset
    from onescan.models.size import Size

RowT = TypeVar("RowT")
Word = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[WORD]")]
NAME_WIDTH = 26  # characters
# config class of a preset -> heading in the list of models
MODEL_KINDS = {
    "ImageClassifierConfig": "Image classification",
    "DenoiserConfig": "Image generation",
    "CausalLMConfig": "Causal language models",
    "MaskedLMConfig": "Masked language models",
    "SequenceClassifierConfig": "Sequence classification",
    "SequenceDecoderConfig": "Sequence generation",
}


def models(argv: Argv) -> None:
    """List the presets with their parameters and GMACs, computed and as published.

    With the name of a preset or a recipe, show that model in detail.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options:
        word: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME|WORD]")] = ""
        """Show the details of the preset, RECIPE or RECIPE/ABLATION of this name, or only presets
        whose name or group contains this word."""
        ablations: bool = False
        """Also list the ablations of the papers."""

    options = parse(Options, models, argv)
    from onescan.models.presets import ABLATIONS, PRESETS, preset
    from onescan.models.size import known_size

    kinds = {name: MODEL_KINDS[type(row.config).__name__] for name, row in PRESETS.items()}
    if options.word in PRESETS or not _matches(PRESETS, kinds, options.word):
        _show_model(options.word)
        return
    groups = dict(_groups("preset", PRESETS, kinds, options.word))
    _show_heading()
    for kind, group in groups.items():
        echo(f"\n{kind}")
        for name, row in group.items():
            size = known_size(row.config)
            echo(_size_row(name, size, row.printed_millions, row.printed_gmacs))
            for ablation, printed in row.printed_ablations.items() if options.ablations else ():
                size = known_size(preset(name, **ABLATIONS[ablation]))
                echo(_size_row(f"  {ablation}", size, printed))


def _show_model(name: str) -> None:
    """Show one model: its size, source, ablations, parameters by part, and config."""
    from onescan.configs import replace
    from onescan.models.size import known_size, parameters_by_part

    model = _find_model(name)
    config, printed = model.config, model.printed_ablations
    shapes = [[*x.shape] for x in config.example_inputs() if x is not None]
    echo(f"{name}: {MODEL_KINDS.get(type(config).__name__, type(config).__name__).lower()}")
    echo(f"{model.source}\n\nGMACs are for inputs of shape {', '.join(map(str, shapes))}.\n")
    _show_heading()
    echo(_size_row("model", known_size(config), model.printed_millions, model.printed_gmacs))
    for ablation, changes in _ablations(config).items():
        try:
            variant = replace(config, changes)
            size = known_size(variant)
        except ValueError:  # of another family
            continue
        if variant != config:
            echo(_size_row(f"  {ablation}", size, printed.get(ablation)))
    parts = parameters_by_part(config)
    echo("\nParameters by part\n")
    for part, count in parts.items():
        echo(f"{part:<{NAME_WIDTH}}{count:>13,}{count / sum(parts.values()):>9.1%}")
    echo(f"\n{type(config).__name__}\n")
    echo("\n".join(_fields(config, indent="")))


def _ablations(config: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return the ablations of the paper that a model is from; LION's for softmax attention."""
    from onescan.models import presets

    mixer = type(config.mixer).__name__
    if mixer == "LightNetMixerConfig":
        return {**presets.LIGHTNET_ABLATIONS, **presets.CAUSAL_LIGHTNET_ABLATIONS}
    if mixer == "LinearDiffusionMixerConfig":
        return presets.LDN_ABLATIONS
    is_long_range = type(config).__name__ == "SequenceClassifierConfig"
    return presets.LONG_RANGE_ABLATIONS if is_long_range else presets.LION_ABLATIONS


def _find_model(name: str) -> "Preset":
    """Return the preset, or the model of the recipe, of this name."""
    from onescan.experiments.recipes import RECIPES, find_recipe, summary
    from onescan.models.presets import PRESETS, Preset

    if name in PRESETS:
        return PRESETS[name]
    if name.partition("/")[0] not in RECIPES:
        raise ValueError(
            f"no preset has {name!r} in its name or group, and it is not the name of a recipe"
            f"{closest(name, [*PRESETS, *RECIPES])}"
        )
    recipe = find_recipe(name)
    return Preset(config=recipe().model, printed_millions=None, source=summary(recipe))


def _matches(rows: Mapping[str, Any], kinds: Mapping[str, str], word: str) -> list[str]:
    """Return the names that contain a word, or whose kind contains it."""
    return [name for name in rows if word.lower() in f"{name} {kinds[name]}".lower()]


def _groups(
    what: str, rows: Mapping[str, RowT], kinds: Mapping[str, str], word: str
) -> Iterator[tuple[str, dict[str, RowT]]]:
    """Yield the rows of each kind, if their name or their kind contains a word."""
    matches = _matches(rows, kinds, word)
    if not matches:
        raise ValueError(f"no {what} has {word!r} in its name or group")
    order = list(dict.fromkeys(kinds.values()))
    for kind, names in groupby(sorted(matches, key=lambda n: order.index(kinds[n])), kinds.get):
        yield str(kind), {name: rows[name] for name in names}


def _show_heading() -> None:
    published = f"{'in the paper':>13}{'difference':>12}"
    echo(f"{'':<{NAME_WIDTH}}{'parameters':>13}{published}{'GMACs':>8}{published}")


def _size_row(
    name: str,
    size: "Size",
    printed_millions: float | int | None,
    printed_gmacs: float | None = None,
) -> str:
    """Format a row of the table of models: computed beside published numbers."""
    printed = difference = ""
    if printed_millions is not None:
        printed = f"{printed_millions}M"
        if not isinstance(printed_millions, int):  # whole millions are too coarse to compare
            difference = f"{size.parameters / 1e6 / printed_millions - 1:.2%}"
    gmacs = size.macs / 1e9
    row = f"{name:<{NAME_WIDTH}}{size.parameters:>13,}{printed:>13}{difference:>12}{gmacs:>8.2f}"
    if printed_gmacs is None:
        return row
    return f"{row}{printed_gmacs:>13}{gmacs / printed_gmacs - 1:>12.2%}"


def recipes(argv: Argv) -> None:
    """List the recipes."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        word: Word = ""
        """Show only recipes whose name or group contains this word."""

    options = parse(Options, recipes, argv)
    from onescan.experiments.recipes import RECIPES, kinds, summary

    groups = dict(_groups("recipe", RECIPES, kinds(), options.word))
    widest = max(len(name) for group in groups.values() for name in group)
    for i, (kind, group) in enumerate(groups.items()):
        echo(f"{chr(10) * (i > 0)}{kind}")
        for name, recipe in group.items():
            echo(f"  {name:<{widest}}  {summary(recipe)}")


def zoo(argv: Argv) -> None:
    """List the trained weights that come with the package."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        """No options."""

    parse(Options, zoo, argv)
    from onescan.zoo import PREFIX, card, names

    cards = {f"{PREFIX}/{name}": card(name) for name in names()}
    widest = max(map(len, cards), default=0)
    for name, each in cards.items():
        metrics = ", ".join(
            f"{metric_label(metric)} {metric_value(metric, value)}"
            for metric, value in each.metrics.items()
        )
        echo(f"{name:<{widest}}  {each.parameters:>9,} parameters  test {metrics}")
        echo(f"{'':<{widest}}  {each.summary}")


def show(argv: Argv) -> None:
    """Print the config of a recipe."""
    if not argv or {*argv} & {*HELP, HELP_ALL}:
        echo("usage: onescan show RECIPE\n\nPrint the config of a recipe.")
        echo("onescan recipes lists the recipes.")
        return
    if argv[1:]:
        raise ValueError(f"show takes one recipe, got {' '.join(argv)!r}")
    from onescan.experiments.recipes import find_recipe

    recipe = find_recipe(argv[0])
    echo(recipe.description)
    echo("\n".join(_fields(recipe(), indent="")))


def _fields(config: Any, indent: str) -> Iterator[str]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield f"{indent}{field.name}: {type(value).__name__}"
            yield from _fields(value, indent + "  ")
        else:
            yield f"{indent}{field.name} = {value!r}"
