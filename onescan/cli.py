"""The command line: one function per command, listed in COMMANDS.

Each command imports the heavy modules that it needs, so that help appears at once.
"""

import dataclasses
import inspect
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro

from onescan import __version__
from onescan.messages import printable, unknown_choice

if TYPE_CHECKING:
    import torch

    from onescan.data.glue import GlueTask
    from onescan.data.text import Tokenizer
    from onescan.models.size import Size
    from onescan.recipes.glue_runs import GlueRun
    from onescan.training.config import RunConfig, RunResult
    from onescan.training.loading import Checkpoint

MISTAKE, FAILURE, INTERRUPTED = 2, 1, 130  # exit codes

UNESCAPED = "\n\t"  # control characters that are printed unchanged

# in torch's messages when it cannot allocate a tensor
OUT_OF_MEMORY = ("can't allocate memory", "Storage size calculation", "CUDA out of memory")

MOST_SEEDS = 2**63  # of torch's generators

HELP = ("-h", "--help")

OptionsT = TypeVar("OptionsT")
Argv = list[str]
Imports = Annotated[
    tuple[Path, ...], tyro.conf.UseAppendAction, tyro.conf.arg(name="import", metavar="FILE.py")
]
LanguageModel = Annotated[
    str,
    tyro.conf.Positional,
    tyro.conf.arg(
        metavar="CHECKPOINT",
        help="Run folder, its best.safetensors, or a folder or hub name of a transformers model.",
    ),
]
Device = Annotated[
    str, tyro.conf.arg(help="Device: cpu, cuda, ...; auto uses a GPU if there is one.")
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors are printed in one line."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    with_traceback = "--traceback" in argv
    argv = [argument for argument in argv if argument != "--traceback"]
    if not argv or argv[0] in HELP:
        _print(_overview())
        return 0 if argv else MISTAKE
    if argv[0] == "--version":
        _print(f"onescan {__version__}")
        return 0
    try:
        if argv[0] not in COMMANDS:
            raise unknown_choice("command", argv[0], COMMANDS)
        COMMANDS[argv[0]](argv[1:])
    except KeyboardInterrupt:
        return _interrupted(argv)
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, ArithmeticError, OSError, ImportError) as error:
        if with_traceback:
            raise
        if _is_told_by_another(error):
            return FAILURE
        is_mistake = isinstance(error, ValueError | FileNotFoundError)
        return _fail(f"error: {error}", MISTAKE if is_mistake else FAILURE)
    except (RuntimeError, MemoryError) as error:
        # Python 3.11 raises this for an interrupt while it creates a class.
        if isinstance(error.__cause__, KeyboardInterrupt):
            return _interrupted(argv)
        if not with_traceback and _is_out_of_memory(error):
            return _fail(f"error: not enough memory: {error}", MISTAKE)
        if with_traceback or "by peer" not in str(error):  # a lost connection to another process
            raise
        return _fail("error: another process failed; see its message", FAILURE)
    return 0


def train(argv: Argv) -> None:
    """Train a recipe, or resume an interrupted run, and write a report."""
    if not argv or argv[0] in HELP:
        _print("usage: onescan train RECIPE [OPTIONS]; onescan train RECIPE --help shows options")
        _print("       onescan train --config FILE [--import FILE.py] [OPTIONS] repeats a run")
        recipes([])
        return
    from onescan.report import check_report_path, write_report
    from onescan.training import joined
    from onescan.training import train as train_run
    from onescan.training.config import RunConfig

    recipe, given, argv = _what_to_train(argv)

    @dataclass(frozen=True, kw_only=True)
    class Options:
        run: Annotated[RunConfig, tyro.conf.arg(name="")]
        out: Annotated[str, tyro.conf.arg(metavar="PATH")] = str(Path("runs") / recipe.name)
        """Folder for the report and one run per seed."""
        seeds: tuple[int, ...] = ()
        """Random seeds; trains one run per seed. By default training.seed alone."""
        overwrite: bool = False
        """Delete existing runs in the folder and start from scratch."""

    options = _parse(Options, f"train {given}", argv, default=Options(run=recipe))
    if not options.out:
        raise ValueError("out is empty, expected a folder for the runs")
    if len(set(options.seeds)) < len(options.seeds):
        raise ValueError(f"seeds is {options.seeds}, expected no duplicates")
    seeds, out = options.seeds or (options.run.training.seed,), Path(options.out)
    trainings = [dataclasses.replace(options.run.training, seed=seed) for seed in seeds]
    runs = [dataclasses.replace(options.run, training=training) for training in trainings]
    check_report_path(out / "report.html")
    results = []
    with joined(options.run.machine.device) as ranks:
        say = _print if ranks.is_first else _silent
        for run, seed in zip(runs, seeds, strict=True):
            folder = out / f"seed-{seed}"
            say(f"{run.name}, seed {seed}, in {folder}")
            results.append(train_run(run, folder, overwrite=options.overwrite, progress=True))
    say(_results(results))
    if ranks.is_first:
        _print(f"report: {write_report(results, out / 'report.html')}")


def evaluate(argv: Argv) -> None:
    """Evaluate a model on test data, context lengths, lm-eval tasks or generated images."""
    from onescan.evaluation.asked import LengthsConfig, SamplesConfig, TasksConfig

    @dataclass(frozen=True, kw_only=True)
    class Options:
        checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
        """Run folder, such as runs/digits/seed-0, or its best.safetensors. With --lengths and
        --tasks also a folder or hub name of a transformers model; with --samples also a diffusers
        pipeline, or images in an .npz file or a folder."""
        device: Device = "auto"
        workers: int | None = None
        """Data loading processes; by default a number that suits the data."""
        batch_size: int | None = None
        """Requests (--tasks) or images (--samples) per batch; affects memory, and results only by
        rounding. By default 32 requests or 64 images."""
        imports: Imports = ()
        """Python file to run first, because it defines classes of the run."""
        lengths: Annotated[LengthsConfig, tyro.conf.arg(name="")]
        tasks: Annotated[TasksConfig, tyro.conf.arg(name="")]
        samples: Annotated[SamplesConfig, tyro.conf.arg(name="")]
        out: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
        """With --tasks, JSON file for the results. With --lengths or --samples, folder for the
        results and the report; by default bench/lengths/CHECKPOINT or
        bench/generation/CHECKPOINT."""

    options = _parse(Options, "evaluate", argv)
    chosen = _way_to_judge(options)
    from onescan.recipes.files import import_file

    for file in options.imports:
        import_file(file)
    chosen(options)


def _evaluate_run(options: Any) -> None:
    from onescan.training.data import choose_workers
    from onescan.training.distributed import Ranks, choose_device
    from onescan.training.evaluation import evaluate as judge
    from onescan.training.loading import load

    checkpoint = load(options.checkpoint)
    run, device = checkpoint.config, choose_device(options.device, Ranks())
    task = run.task.build(run.data.build())
    workers = choose_workers(options.workers, task.test)
    precision = run.training.precision
    model = checkpoint.model.to(device)
    evaluation = judge(model, task, precision=precision, workers=workers, progress=True)
    widest = max(map(len, evaluation.metrics))
    for name, value in evaluation.metrics.items():
        _print(f"{name:<{widest}}  {value:.4f}")
    if evaluation.left_out:
        _print(f"skipped {evaluation.left_out} unreadable {task.unit}")


def _evaluate_lengths(options: Any) -> None:
    from onescan.evaluation.lengths import measure_lengths
    from onescan.evaluation.names import short_name
    from onescan.report import check_report_path, lengths_table, write_lengths
    from onescan.training.folder import write_json

    out = options.out or Path("bench", "lengths", short_name(options.checkpoint))
    check_report_path(out / "report.html")
    scores = measure_lengths(
        str(options.checkpoint), options.lengths, device=options.device, progress=True
    )
    write_json(out / "lengths.json", dataclasses.asdict(scores))
    _print(lengths_table(scores))
    for left in scores.left_out:
        _print(f"skipped length {left.length}: {left.why}")
    _print(f"report: {write_lengths(scores, out / 'report.html')}")


def _evaluate_tasks(options: Any) -> None:
    from onescan.evaluation.harness import judge_by_tasks
    from onescan.training.folder import write_json

    if options.out is not None and options.out.suffix != ".json":
        raise ValueError(f"out is '{options.out}', expected a file name ending in .json")
    config = _with_batch_size(options.tasks, options.batch_size)
    scores = judge_by_tasks(str(options.checkpoint), config, device=options.device)
    _print("\n".join(scores.tables))
    if options.out is not None:
        write_json(options.out, scores.data)
        _print(f"results: {options.out}")


def _evaluate_samples(options: Any) -> None:
    from onescan.evaluation.generation.measure import measure_generation
    from onescan.evaluation.names import short_name
    from onescan.report import check_report_path, generation_table, write_generation
    from onescan.training.folder import write_json

    out = options.out or Path("bench", "generation", short_name(options.checkpoint))
    check_report_path(out / "report.html")
    config = _with_batch_size(options.samples, options.batch_size)
    scores = measure_generation(
        options.checkpoint, config, out, device=options.device, progress=True
    )
    write_json(out / "generation.json", dataclasses.asdict(scores))
    _print(generation_table(scores))
    _print(f"report: {write_generation(scores, out)}")


def compare(argv: Argv) -> None:
    """Compare finished runs in a table and an HTML report."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
        """Runs, such as runs/digits/seed-0, or folders of several seeds, such as runs/digits."""
        out: Path = Path("compare.html")
        """HTML file for the report."""
        imports: Imports = ()
        """Python file to run first, because it defines classes of the run."""

    options = _parse(Options, "compare", argv)
    from onescan.recipes.files import import_file
    from onescan.report import comparison_table, write_comparison

    for file in options.imports:
        import_file(file)
    page = write_comparison(options.runs, options.out)
    _print(comparison_table(options.runs))
    _print(f"page: {page}")


def predict(argv: Argv) -> None:
    """Classify image files."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
        """Run folder, such as runs/digits/seed-0."""
        images: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE...")]
        """Image files of any size: PNG, JPEG, WebP, GIF, BMP, TIFF or PPM."""
        top_k: int = 3
        """Number of classes to print per image."""
        imports: Imports = ()
        """Python file to run first, because it defines classes of the run."""

    options = _parse(Options, "predict", argv)
    if not options.images:
        raise ValueError("images is empty, expected at least one image file")
    if options.top_k < 1:
        raise ValueError(f"top_k is {options.top_k}, expected at least 1")
    from onescan.tasks.image_classification import classify

    checkpoint = _load(options.checkpoint, options.imports)
    probabilities = classify(checkpoint.model, options.images, checkpoint.format)
    if len(checkpoint.class_names) != probabilities.shape[1]:
        raise ValueError(
            f"{checkpoint.folder}: class_names has {len(checkpoint.class_names)} names, expected "
            f"{probabilities.shape[1]}, one for each class of the model"
        )
    for path, row in zip(options.images, probabilities, strict=True):
        shares, classes = row.topk(min(options.top_k, len(row)))
        guesses = zip(classes.tolist(), shares.tolist(), strict=True)
        named = (
            f"{printable(checkpoint.class_names[index])} {share:.1%}" for index, share in guesses
        )
        _print(f"{printable(path)}: {', '.join(named)}")


def sample(argv: Argv) -> None:
    """Generate images with a trained denoiser."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
        """Run folder, its best.safetensors, or a folder saved by
        DenoiserPipeline.save_pretrained."""
        labels: tuple[str, ...] = ()
        """Classes to generate, by name or number; by default cycles through all."""
        num_images: int = 16
        """Images per class given by --labels; without --labels, images in total."""
        steps: int | None = None
        """Denoising steps per image; by default the run's, or 50."""
        guidance_scale: float | None = None
        """Scale of classifier-free guidance, 1 disables it; by default the run's, or 1."""
        sampler: str | None = None
        """ddpm, ddim, dpm or euler; by default the run's."""
        seed: int = 0
        """Random seed. Image i depends only on the seed and i, not on the number of images or the
        batch size."""
        size: tuple[int, int] | None = None
        """Height and width of the images; by default the training size."""
        batch_size: int = 64
        """Images per batch; affects memory, and results only by rounding."""
        out: Annotated[str, tyro.conf.arg(metavar="PATH")] = "samples.png"
        """NAME.png writes one grid, NAME.npz one uint8 array, and a folder one PNG per image."""
        vae: str | None = None
        """Folder or hub name of the VAE, if it has moved since the latents were encoded."""
        device: Device = "auto"
        imports: Imports = ()
        """Python file to run first, because it defines classes of the run."""

    options = _parse(Options, "sample", argv)
    from onescan.recipes.files import import_file
    from onescan.training.distributed import Ranks, choose_device
    from onescan.training.samples import SampleConfig, check_out, write_samples

    if not options.out:
        raise ValueError("out is empty, expected a file or folder name")
    out = Path(options.out)
    check_out(out)
    for file in options.imports:
        import_file(file)
    from onescan.training.pipeline import load_pipeline, usual_sampler

    usual = usual_sampler(options.checkpoint)
    asked = SampleConfig(
        num_images=options.num_images,
        steps=usual.steps if options.steps is None else options.steps,
        guidance_scale=(
            usual.guidance_scale if options.guidance_scale is None else options.guidance_scale
        ),
        seed=options.seed,
        size=options.size,
        batch_size=options.batch_size,
    )
    asked.check()
    device = choose_device(options.device, Ranks())
    from onescan.integrations.diffusers import find_labels, parse_label

    pipeline = load_pipeline(options.checkpoint, sampler=options.sampler, vae=options.vae)
    parsed = [parse_label(argument, pipeline.names) for argument in options.labels]
    if parsed:
        labels = find_labels(parsed, pipeline.names, num_classes=pipeline.num_classes)
        if pipeline.num_classes in labels:  # the unconditional label, not a class
            raise ValueError(
                f"label {pipeline.num_classes} is out of range, expected 0 to "
                f"{pipeline.num_classes - 1}"
            )
        asked = dataclasses.replace(asked, labels=tuple(labels))
    made = write_samples(pipeline.to(device), asked, out, progress=True)
    _print(f"{out}: {made} image{'s' if made > 1 else ''}")


def generate(argv: Argv) -> None:
    """Generate text with a causal language model."""
    from onescan.models.causal_lm import Sampling

    @dataclass(frozen=True, kw_only=True)
    class Options:
        checkpoint: LanguageModel
        prompt: str = ""
        """Text to continue; - reads standard input."""
        max_new_tokens: int = 200
        """Maximum number of tokens to generate."""
        sampling: Annotated[Sampling, tyro.conf.arg(name="")] = dataclasses.field(
            default_factory=lambda: Sampling(temperature=0.8, top_p=0.95)
        )
        seed: int = 0
        """Random seed."""
        device: Device = "auto"

    options = _parse(Options, "generate", argv)
    options.sampling.check()
    if options.max_new_tokens < 1 or not 0 <= options.seed < MOST_SEEDS:
        raise ValueError(
            f"max_new_tokens is {options.max_new_tokens} and seed is {options.seed}, expected 1 or "
            "more, and 0 or more"
        )
    model, tokenizer, device = _language_model(options.checkpoint, "CausalLM", options.device)
    import torch

    from onescan.tasks.writing import generate_text

    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    generator = torch.Generator(device).manual_seed(options.seed)
    pieces = generate_text(
        model,
        tokenizer,
        prompt,
        options.sampling,
        max_new_tokens=options.max_new_tokens,
        generator=generator,
    )
    _print(prompt + next(pieces, ""), end="", flush=True)
    for piece in pieces:
        _print(piece, end="", flush=True)
    _print()


def fill(argv: Argv) -> None:
    """Predict the masked tokens of a text."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        checkpoint: LanguageModel
        text: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")]
        """Text with mask tokens as the tokenizer writes them, usually [MASK] or <mask>."""
        top_k: int = 5
        """Number of predictions per mask."""
        device: Device = "auto"

    options = _parse(Options, "fill", argv)
    model, tokenizer, _ = _language_model(options.checkpoint, "MaskedLM", options.device)
    from onescan.tasks.writing import fill_masks

    for guesses in fill_masks(model, tokenizer, options.text, top=options.top_k):
        _print(", ".join(f"{printable(guess.text)} {guess.share:.1%}" for guess in guesses))


def glue(argv: Argv) -> None:
    """Fine-tune a masked language model on GLUE and write a report."""
    from onescan.recipes.glue_runs import GlueStudy, check_runs, plan_glue

    @dataclass(frozen=True, kw_only=True)
    class Options:
        checkpoint: LanguageModel
        study: Annotated[GlueStudy, tyro.conf.arg(name="")] = dataclasses.field(
            default_factory=GlueStudy
        )
        out: Annotated[Path, tyro.conf.arg(metavar="PATH")] = Path("runs") / "glue"
        """Folder for the report and the runs, such as runs/glue/cola/seed-0."""
        overwrite: bool = False
        """Delete existing runs in the folder and start from scratch."""

    options = _parse(Options, "glue", argv)
    from onescan.report import check_report_path, glue_table, read_glue, write_glue, write_report
    from onescan.training import joined

    study, out = options.study, options.out
    runs = plan_glue(study, options.checkpoint, out)
    tasks = study.chosen()
    for page in (out, *(out / task for task in tasks)):
        check_report_path(page / "report.html")
    with joined(study.machine.device) as ranks:
        say = _print if ranks.is_first else _silent
        if "mnli" not in tasks and runs[0].task == "mnli":
            say("training on mnli first, to initialize other tasks; --no-from-mnli disables this")
        check_runs(runs, overwrite=options.overwrite)
        results = _fine_tuned(runs, say, overwrite=options.overwrite)
    if ranks.is_first:
        for task in tasks:
            write_report(results[task], out / task / "report.html")
        learnt = {task: results[task] for task in tasks}
        outcome = read_glue(learnt, checkpoint=options.checkpoint, recipe=study.recipe)
        page = write_glue(outcome, out)
        _print(f"{glue_table(outcome)}\nreport: {page}")


def needle(argv: Argv) -> None:
    """Run the needle-in-a-haystack evaluation of a causal language model."""
    from onescan.evaluation.asked import NeedleConfig

    @dataclass(frozen=True, kw_only=True)
    class Options:
        checkpoint: LanguageModel
        asked: Annotated[NeedleConfig, tyro.conf.arg(name="")] = dataclasses.field(
            default_factory=NeedleConfig
        )
        haystack: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
        """Text file to hide the needle in; by default the run's test text."""
        out: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
        """Folder for needle.json and the report; by default bench/needle/CHECKPOINT."""
        device: Device = "auto"

    options = _parse(Options, "needle", argv)
    model, tokenizer, _ = _language_model(options.checkpoint, "CausalLM", options.device)
    from onescan.evaluation.haystack import held_out_haystack, read_haystack
    from onescan.evaluation.names import short_name
    from onescan.evaluation.needle import measure_needles
    from onescan.report import check_report_path, needle_table, write_needles

    name, file = short_name(options.checkpoint), options.haystack
    out = options.out or Path("bench", "needle", name)
    check_report_path(out / "report.html")
    haystack = (
        held_out_haystack(options.checkpoint) if file is None else read_haystack(file, tokenizer)
    )
    grid = measure_needles(name, model, tokenizer, haystack, options.asked, out, progress=True)
    _print(f"{needle_table(grid)}\nreport: {write_needles(grid, out / 'report.html')}")


def tokenizer(argv: Argv) -> None:
    """Train a byte-level BPE tokenizer and measure its compression."""
    from onescan.data.text.source import SampleBy

    @dataclass(frozen=True, kw_only=True)
    class Options:
        path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
        """File or folder of text or tables, or hub dataset."""
        out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
        """Output folder, to be used as data.tokenizer or with transformers' AutoTokenizer."""
        vocab_size: int = 8192
        """Maximum vocabulary size, including 256 bytes and 2 special tokens."""
        text_column: str = "text"
        """Column of the text, in tables and JSON objects."""
        sample_by: SampleBy = "file"
        """What counts as one document of plain text. Lines do not include their line breaks."""
        name: str | None = None
        """Configuration of a hub dataset."""
        split: str = "train"
        """Split to train on."""

    options = _parse(Options, "tokenizer", argv)
    from onescan.data.text.bpe import check_empty, train_bpe
    from onescan.data.text.source import Query, find_source, read_texts

    check_empty(options.out)
    query = Query(column=options.text_column, sample_by=options.sample_by, name=options.name)
    source = find_source(options.path, query, field="path")
    trained = train_bpe(read_texts(source, options.split), options.vocab_size)
    trained.tokenizer.save(options.out)
    where = "held-out text" if trained.is_held_out else "the text that it was trained on"
    _print(f"{options.out}: {trained.tokenizer.size} tokens, ", end="")
    _print(f"{trained.bytes_per_token:.2f} bytes per token of {where}")


def encode(argv: Argv) -> None:
    """Encode an image dataset to VAE latents for training denoisers."""
    from onescan.data import ImageDatasetConfig
    from onescan.training.encode import EncodeConfig
    from onescan.training.encode import encode as encode_images

    @dataclass(frozen=True, kw_only=True)
    class Options:
        path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
        """Folder with one subfolder per class, parquet files, or hub dataset."""
        out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
        """Output folder, to be used as data.path of a run. Resumes if it holds a part of the
        latents."""
        asked: Annotated[EncodeConfig, tyro.conf.arg(name="")]
        image_size: int = 256
        """Height and width of the images, cropped from the center."""
        name: str | None = None
        """Configuration of a hub dataset."""
        train_split: str = "train"
        """Training split."""
        test_split: str | None = None
        """Test split; by default validation or test, or else a part of train_split."""
        test_fraction: float = 0.1
        """Fraction of each class held out if there is no test split."""
        image_column: str | None = None
        """Column of the images; by default the only image column."""
        label_column: str | None = None
        """Column of the labels; by default the only column of class labels, or the one named
        label."""
        on_error: Literal["raise", "skip"] = "raise"
        """On an unreadable image, stop (raise) or skip it (skip)."""
        workers: int | None = None
        """Data loading processes; by default one per core."""
        device: Device = "auto"

    options = _parse(Options, "encode", argv)
    data = ImageDatasetConfig(
        path=options.path,
        name=options.name,
        train_split=options.train_split,
        test_split=options.test_split,
        test_fraction=options.test_fraction,
        image_column=options.image_column,
        label_column=options.label_column,
        image_size=(options.image_size, options.image_size),
        train_crop=None,
        test_crop=1.0,  # the shorter side whole, as in ADM and DiT
        on_error=options.on_error,
    )
    notes = encode_images(
        data,
        options.asked,
        options.out,
        device=options.device,
        workers=options.workers,
        progress=True,
    )
    form, shards = notes.format, notes.shards
    train, test = (sum(sizes) for sizes in (shards.train, shards.test)) if shards else (0, 0)
    _print(f"{options.out}: {train:,} training and {test:,} test images, ", end="")
    _print(f"as latents of {form.channels} x {form.height} x {form.width}")


def models(argv: Argv) -> None:
    """List the presets with their parameters and GMACs, computed and as published."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        ablations: bool = False
        """Also list the ablations of the papers."""

    options = _parse(Options, "models", argv)
    from onescan.models.presets import ABLATIONS, PRESETS, preset
    from onescan.models.size import model_size

    in_the_paper = f"{'in the paper':>13}{'difference':>12}"
    _print(f"{'':<21}{'parameters':>13}{in_the_paper}{'GMACs':>8}{in_the_paper}")
    for name, known in PRESETS.items():
        size = model_size(known.config)
        _print(_size_row(name, size, known.printed_millions, known.printed_gmacs))
        for row, printed in known.printed_ablations.items() if options.ablations else ():
            size = model_size(preset(name, **ABLATIONS[row]))
            _print(_size_row(f"  {row}", size, printed))


def recipes(argv: Argv) -> None:
    """List the recipes."""
    if set(argv) & set(HELP):
        _print("usage: onescan recipes")
    elif argv:
        raise ValueError(f"recipes takes no arguments, got {' '.join(argv)!r}")
    from onescan.recipes import RECIPES, summary

    widest = max(map(len, RECIPES))
    for name, recipe in RECIPES.items():
        _print(f"{name:<{widest}}  {summary(recipe)}")


def show(argv: Argv) -> None:
    """Print the config of a recipe."""
    if not argv or set(argv) & set(HELP):
        _print("usage: onescan show RECIPE")
        recipes([])
        return
    if argv[1:]:
        raise ValueError(f"show takes one recipe, got {' '.join(argv)!r}")
    from onescan.recipes import find_recipe

    recipe = find_recipe(argv[0])
    _print(inspect.getdoc(recipe))
    _print("\n".join(_fields(recipe(), indent="")))


COMMANDS: dict[str, Callable[[Argv], None]] = {
    "train": train,
    "evaluate": evaluate,
    "compare": compare,
    "predict": predict,
    "sample": sample,
    "generate": generate,
    "fill": fill,
    "glue": glue,
    "needle": needle,
    "tokenizer": tokenizer,
    "encode": encode,
    "models": models,
    "recipes": recipes,
    "show": show,
}


def _overview() -> str:
    lines = ["onescan: linear-cost sequence models in any number of dimensions.", ""]
    lines += ["usage: onescan COMMAND [OPTIONS]", ""]
    for name, command in COMMANDS.items():
        lines.append(f"  {name:<10}{(inspect.getdoc(command) or '').partition(chr(10))[0]}")
    lines += [
        "",
        "Run onescan COMMAND --help for options. --version prints the version; --traceback",
    ]
    return "\n".join([*lines, "prints the traceback of an error."])


def _interrupted(argv: Argv) -> int:
    resumes = (
        "; run the same command again to resume"
        if argv[0] in ("train", "glue", "needle", "encode")
        or any(argument.startswith("--samples") for argument in argv)
        else ""
    )
    return _fail(f"interrupted{resumes}", INTERRUPTED)


def _fail(message: str, code: int) -> int:
    print(f"onescan: {printable(message, keep=UNESCAPED)}", file=sys.stderr)
    return code


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(part in str(error) for part in OUT_OF_MEMORY)


def _print(text: object = "", *, end: str = "\n", flush: bool = False) -> None:
    """Print text with control characters escaped, except line breaks and tabs."""
    print(printable(text, keep=UNESCAPED), end=end, flush=flush)


def _parse(
    options: type[OptionsT],
    command: str,
    argv: Argv,
    default: OptionsT | None = None,
) -> OptionsT:
    return tyro.cli(
        options,
        prog=f"onescan {command}",
        description=inspect.getdoc(COMMANDS[command.partition(" ")[0]]),
        args=argv,
        config=(tyro.conf.AvoidSubcommands,),
        default=tyro.MISSING_NONPROP if default is None else default,
    )


def _way_to_judge(options: Any) -> Callable[[Any], None]:
    """Choose the kind of evaluation, and reject options of the other kinds."""
    from onescan.configs import differences

    ways = {"lengths": _evaluate_lengths, "tasks": _evaluate_tasks, "samples": _evaluate_samples}
    given = [name for name in ways if getattr(getattr(options, name), name) not in (None, (), "")]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other, expected one of them")
    for name in [name for name in ways if name not in given]:
        config = getattr(options, name)
        for field, value, _ in differences(config, type(config)()):
            raise ValueError(f"{field} is {str(value)!r}, but requires --{name}")
    if given and options.workers is not None:
        raise ValueError(f"workers is {options.workers}, but is not supported with --{given[0]}")
    if not given and options.out is not None:
        raise ValueError(f"out is '{options.out}', but requires --lengths, --tasks or --samples")
    if options.batch_size is not None and given not in (["tasks"], ["samples"]):
        raise ValueError(f"batch_size is {options.batch_size}, but requires --tasks or --samples")
    return ways[given[0]] if given else _evaluate_run


def _with_batch_size(config: OptionsT, batch_size: int | None) -> OptionsT:
    """Override the default batch size of a config."""
    changes: Any = {} if batch_size is None else {"batch_size": batch_size}
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def _load(path: Path, imports: Sequence[Path]) -> "Checkpoint":
    from onescan.recipes.files import import_file
    from onescan.training.loading import load

    for file in imports:
        import_file(file)
    return load(path)


def _language_model(name: str, kind: str, device: str) -> "tuple[Any, Tokenizer, torch.device]":
    """Load a language model of the given class on its device, with its tokenizer."""
    from onescan.training.distributed import Ranks, choose_device
    from onescan.training.loading import load_language_model

    chosen = choose_device(device, Ranks())
    model, tokenizer = load_language_model(name)
    if type(model).__name__ != kind:
        raise ValueError(f"checkpoint {name!r} is a {type(model).__name__}, expected a {kind}")
    return model.to(chosen), tokenizer, chosen


def _fine_tuned(
    runs: "Sequence[GlueRun]", say: Callable[[str], object], *, overwrite: bool
) -> "dict[GlueTask, list[RunResult]]":
    """Train all runs and return the results of each task, one per seed."""
    from onescan.training import train as train_run

    results: dict[GlueTask, list[RunResult]] = {}
    for task, seed, config, folder in runs:
        say(f"{task}, seed {seed}, in {folder}, initialized from {config.init_from}")
        result = train_run(config, folder, overwrite=overwrite, progress=True)
        say(_results([result]))
        results.setdefault(task, []).append(result)
    return results


def _what_to_train(argv: Argv) -> "tuple[RunConfig, str, Argv]":
    """Return the run to train, the words that name it, and the remaining arguments."""
    from onescan.checkpoint.run_folder import CONFIG
    from onescan.recipes import find_recipe
    from onescan.recipes.files import import_file
    from onescan.training.folder import read_manifest

    if argv[0] != "--config":
        return find_recipe(argv[0])(), argv[0], argv[1:]
    file = Path(argv[1] if argv[1:] else "")
    folder = file if file.is_dir() else file.parent
    if not (argv[1:] and (folder / CONFIG).is_file() and file in (folder, folder / CONFIG)):
        raise ValueError(f"--config is '{file}', expected a run's {CONFIG} or folder")
    while argv[2:3] == ["--import"] and argv[3:]:
        import_file(argv[3])
        argv = [*argv[:2], *argv[4:]]
    return read_manifest(folder).run, f"--config {file}", argv[2:]


def _is_told_by_another(error: Exception) -> bool:
    """Whether another process failed first and reports the error itself."""
    notes = getattr(error, "__notes__", ())
    if not notes:  # and nothing slow is imported for it
        return False
    from onescan.training.distributed import RAISED_BY_FIRST

    return RAISED_BY_FIRST in notes


def _silent(*_values: object) -> None:
    """Print nothing, in all processes but the first."""


def _results(results: "Sequence[RunResult]") -> str:
    """Format one line per seed, and the mean and standard deviation over seeds."""
    from onescan.training.logging import read_metrics, waiting_share

    lines = []
    for result in results:
        shown = ", ".join(f"test {name} {value:.4f}" for name, value in result.metrics.items())
        shown += f", data loading {waiting_share(read_metrics(result.folder)):.1%} of the time"
        note = " (already finished; --overwrite trains again)" if result.reused else ""
        lines.append(f"{result.folder}: {shown}{note}")
    if len(results) > 1:
        for name in results[0].metrics:
            values = [result.metrics[name] for result in results]
            mean, spread = statistics.mean(values), statistics.stdev(values)
            lines.append(f"test {name}: {mean:.4f} +- {spread:.4f} over {len(values)} seeds")
    return "\n".join(lines)


def _size_row(
    name: str,
    size: "Size",
    printed_millions: float | int | None,
    printed_gmacs: float | None = None,
) -> str:
    """Format a row of the table of models: computed beside published numbers."""
    printed = difference = ""
    if printed_millions is not None:
        printed, difference = (
            f"{printed_millions}M",
            f"{size.parameters / 1e6 / printed_millions - 1:.2%}",
        )
    if isinstance(printed_millions, int):
        difference = "in millions"
    gmacs = size.macs / 1e9
    row = f"{name:<21}{size.parameters:>13,}{printed:>13}{difference:>12}{gmacs:>8.2f}"
    if printed_gmacs is None:
        return row
    return f"{row}{printed_gmacs:>13}{gmacs / printed_gmacs - 1:>12.2%}"


def _fields(config: Any, indent: str) -> Iterator[str]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield f"{indent}{field.name}: {type(value).__name__}"
            yield from _fields(value, indent + "  ")
        else:
            yield f"{indent}{field.name} = {value!r}"
