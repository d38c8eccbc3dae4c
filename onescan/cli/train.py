"""Commands that train: train, glue."""

import contextlib
import dataclasses
import re
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from onescan.cli.options import (
    HELP,
    HELP_ALL,
    Argv,
    Imports,
    LanguageModel,
    echo,
    import_files,
    metric_label,
    metric_value,
    parse,
    resumable,
    silent,
)

if TYPE_CHECKING:
    from onescan.experiments.data.glue import GlueTask
    from onescan.experiments.recipes import Recipe
    from onescan.experiments.recipes.glue import GlueRun
    from onescan.experiments.training.config import RunConfig, RunResult

# fields that `onescan train RECIPE --help` shows
COMMON = (
    *("out", "seeds", "overwrite", "init_from", "path", "image_size", "width", "depth"),
    *("teacher", "classifier", "epochs", "steps", "batch_size", "learning_rate"),
    *("weight_decay", "precision", "ema_decay", "seed", "device", "workers"),
    *("gradient_accumulation_steps", "compile", "horizon", "context", "joint", "target"),
    *("ignore_index", "class_names", "class_weights", "dice_weight", "window", "flip_axes"),
)
MAX_SEED = 2**32
USAGE = """\
usage: onescan train RECIPE [--import FILE.py] [OPTIONS]
       onescan train --config FILE [--import FILE.py] [OPTIONS]

Train a recipe, or resume an interrupted run, and write a report.

onescan recipes lists the recipes. RECIPE/ABLATION is an ablation from the papers, and
FILE.py:FUNCTION is your own recipe. --config trains with the config.json of an existing run.
--model.mixer NAME replaces the mixer of a recipe's model: lightnet, lion_s, softmax, ..., or one
of your own that FILE.py registers; NAME_hybrid keeps or adds softmax attention in every fourth
block. mamba, mamba2 and rwkv6 are the recurrences of LION's Table 1, not the complete layers.
onescan train RECIPE --help shows the common options and their defaults, --help-all all of them.
Often used:
  --data.path, --training.epochs, --training.batch-size, --training.learning-rate, --seeds,
  --machine.device, --out, --overwrite"""


def train(argv: Argv) -> None:
    """Train a recipe, or resume an interrupted run, and write a report."""
    argv = _run_imports(argv)
    if not argv:
        raise ValueError(f"RECIPE is missing{chr(10)}{USAGE}")
    if argv[0] in (*HELP, HELP_ALL):
        echo(USAGE)
        return
    from onescan.experiments.training.config import RunConfig

    recipe, arguments, source, argv = _what_to_train(argv)

    @dataclass(frozen=True, kw_only=True)
    class Options:
        run: Annotated[RunConfig, tyro.conf.arg(name="")]
        out: Annotated[str, tyro.conf.arg(metavar="PATH")] = str(Path("runs") / recipe.name)
        """Folder for the report and one run per seed."""
        seeds: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="INT ...")] = None
        """Random seeds; trains one run per seed. By default training.seed alone."""
        overwrite: bool = False
        """Delete existing runs in the folder and start from scratch."""

    options = parse(
        Options,
        train,
        argv,
        prog=f"train {arguments}",
        description=source.description if source else None,
        default=Options(run=recipe),
        common=COMMON,
        inferred=source.inferred if source else (),
    )
    from onescan.checks import check_distinct
    from onescan.configs import differences
    from onescan.experiments.report import check_report_path, write_report
    from onescan.experiments.training import joined
    from onescan.experiments.training import train as train_run

    run, inferred = _infer_settings(options.run, _given(argv), source)
    changed_by_data = [path for path, *_ in differences(options.run, run)]
    options = dataclasses.replace(options, run=run)
    if not options.out:
        raise ValueError("out is empty, expected a folder for the runs")
    seeds = (options.run.training.seed,) if options.seeds is None else options.seeds
    check_distinct(seeds=seeds)
    if not 0 <= min(seeds) <= max(seeds) < MAX_SEED:
        wrong = ", ".join(str(seed) for seed in seeds if not 0 <= seed < MAX_SEED)
        raise ValueError(f"seeds is {wrong}, expected 0 to {MAX_SEED - 1}")
    out = Path(options.out)
    trainings = [dataclasses.replace(options.run.training, seed=seed) for seed in seeds]
    runs = [dataclasses.replace(options.run, training=training) for training in trainings]
    check_report_path(out / "report.html")
    results = []
    machine = options.run.machine
    with resumable(out), joined(machine.device, timeout=machine.timeout) as ranks:
        say = echo if ranks.is_first else silent
        for line in inferred:
            say(line)
        for run, seed in zip(runs, seeds, strict=True):
            folder = out / f"seed-{seed}"
            with _explaining(changed_by_data):
                results.append(train_run(run, folder, overwrite=options.overwrite, progress=True))
    say(_results(results))
    if ranks.is_first:
        echo(f"report: {write_report(results, out / 'report.html')}")


@contextlib.contextmanager
def _explaining(inferred: Collection[str]) -> Iterator[None]:
    """Say why a folder holds another run if it differs in settings that are inferred."""
    from onescan.experiments.training.folder import OtherRunError

    try:
        yield
    except OtherRunError as error:
        fields = [field for field in error.fields if field in inferred]
        if not fields:
            raise
        raise ValueError(
            f"{error}; this command infers {', '.join(fields)} from the data, so the options or "
            "the data have changed since the run began"
        ) from error


def _given(argv: Argv) -> dict[str, str]:
    """Return the options in arguments as dotted field names, with their first value.

    >>> _given(["--data.path", "shapes", "--model.patch-size=4", "4", "--data.no-binary"])
    {'data.path': 'shapes', 'model.patch_size': '4', 'data.binary': ''}
    """
    given = {}
    for word, following in zip(argv, [*argv[1:], ""], strict=False):  # argv may be empty
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            name = re.sub(r"(^|\.)no_", r"\1", flag[2:].replace("-", "_"))  # a boolean field
            given[name] = value if equals else following
    return given


def _without_option(flag: str, argv: Argv) -> Argv:
    """Return the arguments without an option and its value.

    >>> _without_option("--a", ["--a", "1", "--b"]), _without_option("--a", ["--a=1", "--b"])
    (['--b'], ['--b'])
    """
    if flag in argv:
        index = argv.index(flag)
        return [*argv[:index], *argv[index + 2 :]]
    return [word for word in argv if not word.startswith(f"{flag}=")]


def _infer_settings(
    run: "RunConfig", given: Collection[str], recipe: "Recipe | None"
) -> "tuple[RunConfig, list[str]]":
    """Infer the settings that are not given; also return lines that describe them."""
    if "data.tokenizer" in given:
        from onescan.experiments.recipes.infer import infer_vocabulary

        run = infer_vocabulary(run, given)
    return recipe.infer(run, given) if recipe and recipe.infer else (run, [])


def _what_to_train(argv: Argv) -> "tuple[RunConfig, str, Recipe | None, Argv]":
    """Return the run, the arguments that name it, its recipe, if any, and the other arguments."""
    from onescan import zoo
    from onescan.checkpoint.run_folder import CONFIG
    from onescan.experiments.recipes import find_recipe
    from onescan.experiments.recipes.mixers import check_mixer_options, with_mixer
    from onescan.experiments.training.folder import read_manifest

    if argv[0] != "--config":
        recipe = find_recipe(argv[0])
        run, name, given = recipe(), argv[0], _given(argv)
        if recipe.adapt is not None and not {*HELP, HELP_ALL} & set(argv):
            run = recipe.adapt(run, given)
        if mixer := given.get("model.mixer"):
            run, argv = with_mixer(run, mixer), _without_option("--model.mixer", argv)
        check_mixer_options(run, given)
        return run, name, recipe, argv[1:]
    file = zoo.resolve(Path(argv[1] if argv[1:] else ""))
    folder = file if file.is_dir() else file.parent
    if not (argv[1:] and (folder / CONFIG).is_file() and file in (folder, folder / CONFIG)):
        raise ValueError(f"--config is '{file}', expected a run's {CONFIG} or folder")
    return read_manifest(folder).run, f"--config {file}", None, argv[2:]


def _run_imports(argv: Argv) -> Argv:
    """Run the files of all --import options; return the other arguments."""
    others, words = [], iter(argv)
    for word in words:
        flag, equals, file = word.partition("=")
        if flag != "--import":
            others.append(word)
            continue
        if not (file := file if equals else next(words, "")):
            raise ValueError("--import has no value, expected a Python file")
        import_files([Path(file)])
    return others


def _results(results: "Sequence[RunResult]") -> str:
    """Format one line per seed, and the mean and standard deviation over seeds."""
    from onescan.experiments.training.logging import read_metrics, waiting_share

    lines = []
    for result in results:
        shown = ", ".join(
            f"test {metric_label(name)} {metric_value(name, value)}"
            for name, value in result.metrics.items()
        )
        shown += f", data loading {waiting_share(read_metrics(result.folder)):.1%} of the time"
        note = " (already finished; --overwrite trains again)" if result.reused else ""
        lines.append(f"{result.folder}: {shown}{note}")
    if len(results) > 1:
        for name in results[0].metrics:
            values = [result.metrics[name] for result in results]
            mean, deviation = statistics.mean(values), statistics.stdev(values)
            shown = f"{metric_value(name, mean)} +- {metric_value(name, deviation)}"
            lines.append(f"test {metric_label(name)}: {shown} over {len(values)} seeds")
    return "\n".join(lines)


def glue(argv: Argv) -> None:
    """Fine-tune a masked language model on GLUE and write a report."""
    from onescan.experiments.recipes.glue import (
        GLUE,
        GlueRunsConfig,
        check_runs,
        lacks_mnli,
        plan_glue,
    )

    @dataclass(frozen=True, kw_only=True)
    class Options:
        checkpoint: LanguageModel
        config: Annotated[GlueRunsConfig, tyro.conf.arg(name="")] = dataclasses.field(
            default_factory=GlueRunsConfig
        )
        out: Annotated[Path, tyro.conf.arg(metavar="PATH")] = Path("runs") / "glue"
        """Folder for the report and the runs, such as runs/glue/cola/seed-0; with several learning
        rates, runs/glue/cola/lr-5e-05/seed-0."""
        overwrite: bool = False
        """Delete existing runs in the folder and start from scratch."""
        imports: Imports = ()

    options = parse(Options, glue, argv)
    import_files(options.imports)
    from onescan.experiments.report import (
        check_report_path,
        glue_table,
        read_glue,
        write_glue,
        write_report,
    )
    from onescan.experiments.report.glue import best_rate
    from onescan.experiments.training import joined

    config, out = options.config, options.out
    if without_mnli := lacks_mnli(config):
        config = dataclasses.replace(config, from_mnli=False)
    runs = plan_glue(config, options.checkpoint, out)
    tasks = config.selected()
    for page in (out, *(out / task for task in tasks)):
        check_report_path(page / "report.html")
    machine = config.machine
    with resumable(out), joined(machine.device, timeout=machine.timeout) as ranks:
        say = echo if ranks.is_first else silent
        if without_mnli:
            say(
                f"no MNLI data in {config.path}: all tasks start from {options.checkpoint}; "
                "--no-from-mnli does so without this message"
            )
        elif "mnli" not in tasks and runs[0].task == "mnli":
            say("training on mnli first, to initialize other tasks; --no-from-mnli disables this")
        check_runs(runs, overwrite=options.overwrite)
        results = _fine_tune(runs, say, overwrite=options.overwrite)
    if ranks.is_first:
        scoring = GLUE[config.recipe].scoring
        best = {task: best_rate(results[task], scoring) for task in tasks}
        by_task = {task: results[task][best[task]] for task in tasks}
        for task in tasks:
            write_report(by_task[task], out / task / "report.html")
        outcome = read_glue(
            by_task,
            checkpoint=options.checkpoint,
            recipe=config.recipe,
            tried={task: results[task] for task in tasks} if config.rates_to_try else {},
        )
        page = write_glue(outcome, out)
        echo(f"{glue_table(outcome)}\nreport: {page}")


def _fine_tune(
    runs: "Sequence[GlueRun]", say: Callable[[str], object], *, overwrite: bool
) -> "dict[GlueTask, dict[float, list[RunResult]]]":
    """Train all runs; return each task's results by learning rate, one per seed."""
    from onescan.experiments.training import train as train_run

    results: dict[GlueTask, dict[float, list[RunResult]]] = {}
    for task, _, config, folder in runs:
        result = train_run(config, folder, overwrite=overwrite, progress=True)
        say(_results([result]))
        by_rate = results.setdefault(task, {})
        by_rate.setdefault(config.training.learning_rate, []).append(result)
    return results
