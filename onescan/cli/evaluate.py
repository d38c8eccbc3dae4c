"""Commands that evaluate trained models: evaluate, compare, needle."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from onescan.cli.options import (
    Argv,
    Checkpoint,
    Compute,
    Device,
    Imports,
    LanguageModel,
    OptionsT,
    echo,
    import_files,
    load_language_model,
    metric_label,
    metric_value,
    parse,
    resumable,
)

# fields that `onescan evaluate --help` shows
COMMON = (
    *("device", "batch_size", "workers", "out", "split", "lengths", "text"),
    *("tasks", "samples", "features", "guidance_scale"),
)


def evaluate(argv: Argv) -> None:
    """Evaluate a model on test data, context lengths, lm-eval tasks or generated images."""
    from onescan.experiments.evaluation.config import LengthsConfig, SamplesConfig, TasksConfig

    @dataclass(frozen=True, kw_only=True)
    class Options:
        checkpoint: Checkpoint
        """Run folder, such as runs/digits/seed-0, its best.safetensors, or zoo/NAME. With --lengths
        and --tasks also a hub name, or a folder of an onescan model in transformers' format; with
        --samples also a diffusers pipeline, or images in an .npz file or a folder."""
        device: Device = "auto"
        compute: Compute
        workers: int | None = None
        """Data loading processes; by default a number that suits the data."""
        batch_size: int | None = None
        """Requests (--tasks) or images (--samples) per batch; affects memory, and results only by
        rounding. By default 32 requests or 64 images."""
        split: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
        """Split of the run's data to evaluate on, such as test; by default the one that training
        evaluated on, which is the validation split if the data has both."""
        imports: Imports = ()
        lengths: Annotated[LengthsConfig, tyro.conf.arg(name="")]
        tasks: Annotated[TasksConfig, tyro.conf.arg(name="")]
        samples: Annotated[SamplesConfig, tyro.conf.arg(name="")]
        out: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
        """With --tasks, JSON file for the results. With --lengths or --samples, folder for the
        results and the report; by default evaluation/lengths/CHECKPOINT or
        evaluation/generation/CHECKPOINT."""

    options = parse(Options, evaluate, argv, common=COMMON)
    run = _kind_of_evaluation(options)
    import_files(options.imports)
    with options.compute.applied():
        run(options)


def _kind_of_evaluation(options: Any) -> Callable[[Any], None]:
    """Choose the kind of evaluation, and reject options of the other kinds."""
    from onescan.configs import differences

    kinds = {"lengths": _evaluate_lengths, "tasks": _evaluate_tasks, "samples": _evaluate_samples}
    given = [name for name in kinds if getattr(getattr(options, name), name) not in (None, (), "")]
    if len(given) > 1:
        flags = " and ".join(f"--{name}" for name in given)
        raise ValueError(f"{flags} exclude each other, expected one of them")
    for name in [name for name in kinds if name not in given]:
        config = getattr(options, name)
        for field, value, _ in differences(config, type(config)()):
            shown = value if isinstance(value, int | float) else repr(str(value))
            raise ValueError(f"{field} is {shown}, which requires --{name}")
    for name in ("workers", "split"):
        if given and getattr(options, name) is not None:
            value = getattr(options, name)
            raise ValueError(f"{name} is {value}, which is not supported with --{given[0]}")
    if not given and options.out is not None:
        raise ValueError(f"out is '{options.out}', which requires --lengths, --tasks or --samples")
    if options.batch_size is not None and given not in (["tasks"], ["samples"]):
        raise ValueError(f"batch_size is {options.batch_size}, which requires --tasks or --samples")
    return kinds[given[0]] if given else _evaluate_run


def _evaluate_run(options: Any) -> None:
    from onescan.experiments.training.data import choose_workers
    from onescan.experiments.training.distributed import Ranks, choose_device
    from onescan.experiments.training.evaluation import evaluate as evaluate_model
    from onescan.experiments.training.folder import read_manifest
    from onescan.experiments.training.precision import choose_precision, precision_note
    from onescan.experiments.training.runs import build_task
    from onescan.inference.loading import load

    checkpoint = load(options.checkpoint)
    run, device = read_manifest(checkpoint.folder).run, choose_device(options.device, Ranks())
    task = build_task(checkpoint, options.split)
    precision = choose_precision(run.training.precision, device)
    for note in (*task.notes, precision_note(run.training.precision, precision, device)):
        if note:
            echo(f"note: {note}")
    evaluation = evaluate_model(
        checkpoint.model.to(device),
        task,
        precision=precision,
        workers=choose_workers(options.workers, task.test),
        progress=True,
    )
    widest = max(len(metric_label(name)) for name in evaluation.metrics)
    for name, value in evaluation.metrics.items():
        echo(f"{metric_label(name):<{widest}}  {metric_value(name, value)}")
    if evaluation.left_out:
        echo(f"skipped {evaluation.left_out} unreadable {task.unit}")


def _evaluate_lengths(options: Any) -> None:
    from onescan.experiments.evaluation.config import short_name
    from onescan.experiments.evaluation.lengths import measure_lengths
    from onescan.experiments.report import check_report_path, lengths_table, write_lengths
    from onescan.experiments.training.folder import write_json

    out = options.out or Path("evaluation", "lengths", short_name(options.checkpoint))
    check_report_path(out / "report.html")
    scores = measure_lengths(
        str(options.checkpoint), options.lengths, device=options.device, progress=True
    )
    write_json(out / "lengths.json", dataclasses.asdict(scores))
    echo(lengths_table(scores))
    for left in scores.left_out:
        echo(f"skipped length {left.length}: {left.why}")
    echo(f"report: {write_lengths(scores, out / 'report.html')}")


def _evaluate_tasks(options: Any) -> None:
    from onescan.checkpoint.files import check_writable
    from onescan.experiments.evaluation.harness import evaluate_tasks
    from onescan.experiments.training.folder import write_json

    if options.out is not None:
        if options.out.suffix != ".json":
            raise ValueError(f"out is '{options.out}', expected a file name ending in .json")
        check_writable("out", options.out)
    config = _with_batch_size(options.tasks, options.batch_size)
    scores = evaluate_tasks(str(options.checkpoint), config, device=options.device)
    echo("\n".join(scores.tables))
    if options.out is not None:
        write_json(options.out, scores.data)
        echo(f"results: {options.out}")


def _evaluate_samples(options: Any) -> None:
    from onescan.experiments.evaluation.config import short_name
    from onescan.experiments.evaluation.generation import measure_generation
    from onescan.experiments.report import check_report_path, generation_table, write_generation
    from onescan.experiments.training.folder import write_json

    out = options.out or Path("evaluation", "generation", short_name(options.checkpoint))
    check_report_path(out / "report.html")
    config = _with_batch_size(options.samples, options.batch_size)
    with resumable(out):
        scores = measure_generation(
            options.checkpoint, config, out, device=options.device, progress=True
        )
    write_json(out / "generation.json", dataclasses.asdict(scores))
    echo(generation_table(scores))
    echo(f"report: {write_generation(scores, out)}")


def _with_batch_size(config: OptionsT, batch_size: int | None) -> OptionsT:
    """Override the default batch size of a config."""
    changes: Any = {} if batch_size is None else {"batch_size": batch_size}
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def compare(argv: Argv) -> None:
    """Compare finished runs in a table and an HTML report."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
        """Runs, such as runs/digits/seed-0, or folders of several seeds, such as runs/digits."""
        out: Path = Path("compare.html")
        """HTML file for the report."""
        imports: Imports = ()

    options = parse(Options, compare, argv)
    from onescan.experiments.report import comparison_table, write_comparison

    import_files(options.imports)
    page = write_comparison(options.runs, options.out)
    echo(comparison_table(options.runs))
    echo(f"report: {page}")


def needle(argv: Argv) -> None:
    """Run the needle-in-a-haystack evaluation of a causal language model."""
    from onescan.experiments.evaluation.config import NeedleConfig

    @dataclass(frozen=True, kw_only=True)
    class Options:
        checkpoint: LanguageModel
        config: Annotated[NeedleConfig, tyro.conf.arg(name="")] = dataclasses.field(
            default_factory=NeedleConfig
        )
        haystack: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
        """Text file to hide the needle in; by default the run's test text."""
        out: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
        """Folder for needle.json and the report; by default evaluation/needle/CHECKPOINT."""
        device: Device = "auto"
        compute: Compute
        imports: Imports = ()

    options = parse(Options, needle, argv)
    import_files(options.imports)
    model, tokenizer, _ = load_language_model(options.checkpoint, "CausalLM", options.device)
    from onescan.experiments.evaluation.config import short_name
    from onescan.experiments.evaluation.needle import (
        held_out_haystack,
        measure_needles,
        read_haystack,
    )
    from onescan.experiments.report import check_report_path, needle_table, write_needles

    name, file = short_name(options.checkpoint), options.haystack
    out = options.out or Path("evaluation", "needle", name)
    check_report_path(out / "report.html")
    haystack = (
        held_out_haystack(options.checkpoint) if file is None else read_haystack(file, tokenizer)
    )
    with resumable(out), options.compute.applied():
        grid = measure_needles(name, model, tokenizer, haystack, options.config, out, progress=True)
    echo(f"{needle_table(grid)}\nreport: {write_needles(grid, out / 'report.html')}")
