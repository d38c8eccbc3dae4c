"""The command line: a function for each command; COMMANDS lists them.

Heavy modules are imported by the command that needs them, so that help answers at once.
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

from onescan import __version__, memory
from onescan.messages import printable, unknown_choice

if TYPE_CHECKING:
    import torch

    from onescan.bench.contest.outcome import Results
    from onescan.bench.size import Size
    from onescan.data.glue import GlueTask
    from onescan.data.text import Tokenizer
    from onescan.recipes.glue_runs import GlueRun
    from onescan.training.checkpoint import Checkpoint
    from onescan.training.run import RunConfig, RunResult

MISTAKE, FAILURE, INTERRUPTED = 2, 1, 130  # exit codes

UNESCAPED = "\n\t"  # control characters that are printed unchanged

# in torch's messages when it cannot allocate a tensor
OUT_OF_MEMORY = ("can't allocate memory", "Storage size calculation", "CUDA out of memory")

MOST_SEEDS = 2**63  # of torch's generators

HELP = ("-h", "--help")

OptionsT = TypeVar("OptionsT")
Words = list[str]
Imports = Annotated[
    tuple[Path, ...], tyro.conf.UseAppendAction, tyro.conf.arg(name="import", metavar="FILE.py")
]
LanguageModel = Annotated[
    str,
    tyro.conf.Positional,
    tyro.conf.arg(
        metavar="CHECKPOINT",
        help="a run's folder, or best.safetensors in it; or a folder that transformers' "
        "save_pretrained wrote, or a name on the hub",
    ),
]
Device = Annotated[str, tyro.conf.arg(help="cpu, cuda, ...; auto is a GPU where there is one")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; what went wrong is said in a sentence, with an exit code above 0."""
    memory.ask_for_huge_pages()
    words = list(sys.argv[1:] if arguments is None else arguments)
    with_traceback = "--traceback" in words
    words = [word for word in words if word != "--traceback"]
    if not words or words[0] in HELP:
        _print(_overview())
        return 0 if words else MISTAKE
    if words[0] == "--version":
        _print(f"onescan {__version__}")
        return 0
    try:
        if words[0] not in COMMANDS:
            raise unknown_choice("command", words[0], COMMANDS)
        memory.keep_freed()
        COMMANDS[words[0]](words[1:])
    except KeyboardInterrupt:
        return _interrupted(words)
    except BrokenPipeError:  # the reader, as in `| head`, has seen enough
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
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python 3.11's, in a class's making
            return _interrupted(words)
        if not with_traceback and _is_out_of_memory(error):
            return _fail(f"error: not enough memory: {error}", MISTAKE)
        if with_traceback or "by peer" not in str(error):  # how a lost connection is told
            raise
        return _fail("error: another process ended, and says why", FAILURE)
    return 0


def train(words: Words) -> None:
    """Train a recipe, or go on with a run that was stopped; write a report."""
    if not words or words[0] in HELP:
        _print("usage: onescan train RECIPE [OPTIONS]; onescan train RECIPE --help lists them")
        _print("       onescan train --config FILE [--import FILE.py] [OPTIONS] repeats a run")
        recipes([])
        return
    from onescan.report import check_report_path, write_report
    from onescan.training import joined
    from onescan.training import train as train_run
    from onescan.training.run import RunConfig

    recipe, given, words = _what_to_train(words)

    @dataclass(frozen=True, kw_only=True)
    class Options:
        run: Annotated[RunConfig, tyro.conf.arg(name="")]
        out: Annotated[str, tyro.conf.arg(metavar="PATH")] = str(Path("runs") / recipe.name)
        """folder for the runs, one below it per seed, and the report"""
        seeds: tuple[int, ...] = ()
        """train once with each of these; where there are none, with training.seed alone"""
        overwrite: bool = False
        """remove the runs that the folder holds, and start anew"""

    options = _parse(Options, f"train {given}", words, default=Options(run=recipe))
    if not options.out:
        raise ValueError("out is '', expected a folder for the runs")
    if len(set(options.seeds)) < len(options.seeds):
        raise ValueError(f"seeds is {options.seeds}, expected each seed once")
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


def evaluate(words: Words) -> None:
    """Judge a trained model: on held-out data, over lengths, on lm-eval's tasks, or by images."""
    from onescan.bench.asked import LengthsConfig, SamplesConfig, TasksConfig

    @dataclass(frozen=True, kw_only=True)
    class Options:
        checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
        """a run's folder, as in runs/digits/seed-0, or best.safetensors in it; for lengths and
        tasks also a folder that transformers' save_pretrained wrote, or a name on the hub; for
        samples one that diffusers' did, or images that were made: a .npz file or a folder"""
        device: Device = "auto"
        workers: int | None = None
        """processes that read data; without it, as many as the data is worth"""
        imports: Imports = ()
        """a Python file of yours to run first, for the classes in it"""
        lengths: Annotated[LengthsConfig, tyro.conf.arg(name="")]
        tasks: Annotated[TasksConfig, tyro.conf.arg(name="")]
        samples: Annotated[SamplesConfig, tyro.conf.arg(name="")]
        out: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
        """of tasks, a JSON file for the results; of lengths and samples, a folder for the
        measurements and the page, bench/lengths/CHECKPOINT or bench/generation/CHECKPOINT without
        it"""

    options = _parse(Options, "evaluate", words)
    chosen = _way_to_judge(options)
    from onescan.recipes.files import import_file

    for file in options.imports:
        import_file(file)
    chosen(options)


def _evaluate_run(options: Any) -> None:
    from onescan.training.checkpoint import load
    from onescan.training.evaluation import evaluate as judge
    from onescan.training.loader import choose_workers
    from onescan.training.ranks import Ranks, choose_device

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
        _print(f"{evaluation.left_out} {task.unit} could not be read and are left out")


def _evaluate_lengths(options: Any) -> None:
    from onescan.bench.lengths import measure_lengths
    from onescan.bench.names import short_name
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
        _print(f"not measured: {left.length}, as {left.why}")
    _print(f"report: {write_lengths(scores, out / 'report.html')}")


def _evaluate_tasks(options: Any) -> None:
    from onescan.bench.harness import judge_by_tasks
    from onescan.training.folder import write_json

    if options.out is not None and options.out.suffix != ".json":
        raise ValueError(f"out is '{options.out}', expected a name that ends in .json")
    scores = judge_by_tasks(str(options.checkpoint), options.tasks, device=options.device)
    _print("\n".join(scores.tables))
    if options.out is not None:
        write_json(options.out, scores.data)
        _print(f"results: {options.out}")


def _evaluate_samples(options: Any) -> None:
    from onescan.bench.generation.measure import measure_generation
    from onescan.bench.names import short_name
    from onescan.report import check_report_path, generation_table, write_generation
    from onescan.training.folder import write_json

    out = options.out or Path("bench", "generation", short_name(options.checkpoint))
    check_report_path(out / "report.html")
    scores = measure_generation(
        options.checkpoint, options.samples, out, device=options.device, progress=True
    )
    write_json(out / "generation.json", dataclasses.asdict(scores))
    _print(generation_table(scores))
    _print(f"report: {write_generation(scores, out)}")


def compare(words: Words) -> None:
    """Set finished runs side by side: a table here, and a page with curves."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
        """runs, as in runs/digits/seed-0, or folders of several seeds, as in runs/digits"""
        out: Path = Path("compare.html")
        """where to write the page"""
        imports: Imports = ()
        """a Python file of yours to run first, for the classes in it"""

    options = _parse(Options, "compare", words)
    from onescan.recipes.files import import_file
    from onescan.report import comparison_table, write_comparison

    for file in options.imports:
        import_file(file)
    page = write_comparison(options.runs, options.out)
    _print(comparison_table(options.runs))
    _print(f"page: {page}")


def predict(words: Words) -> None:
    """Say what image files show."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
        """a run's folder, as in runs/digits/seed-0"""
        images: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE...")]
        """image files of any size: PNG, JPEG, WebP, GIF, BMP, TIFF or PPM"""
        top: int = 3
        """classes to name per image"""
        imports: Imports = ()
        """a Python file of yours to run first, for the classes in it"""

    options = _parse(Options, "predict", words)
    if not options.images:
        raise ValueError("predict needs at least one image file")
    if options.top < 1:
        raise ValueError(f"top is {options.top}, expected 1 or more classes")
    from onescan.tasks.image_classification import classify

    checkpoint = _load(options.checkpoint, options.imports)
    probabilities = classify(checkpoint.model, options.images, checkpoint.format)
    if len(checkpoint.class_names) != probabilities.shape[1]:
        raise ValueError(
            f"{checkpoint.folder}: class_names has {len(checkpoint.class_names)} names, expected "
            f"{probabilities.shape[1]}, one for each class of the model"
        )
    for path, row in zip(options.images, probabilities, strict=True):
        shares, classes = row.topk(min(options.top, len(row)))
        guesses = zip(classes.tolist(), shares.tolist(), strict=True)
        named = (
            f"{printable(checkpoint.class_names[index])} {share:.1%}" for index, share in guesses
        )
        _print(f"{printable(path)}: {', '.join(named)}")


def sample(words: Words) -> None:
    """Make images: one grid of them, a file for each, or an array for evaluators."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
        """a run's folder, or best.safetensors in it; or a folder that DenoiserPipeline's
        save_pretrained wrote"""
        label: tuple[str, ...] = ()
        """classes, by name or number; without them, all in turn"""
        count: int = 16
        """images of each label; without labels, images"""
        steps: int | None = None
        """calls of the model for each image; without it, the run's own, or 50"""
        guidance: float | None = None
        """how far to go toward the class, 1 is without guidance; without it, the run's own, or 1"""
        sampler: str | None = None
        """ddpm, ddim, dpm or euler; without it, the run's own"""
        seed: int = 0
        """what chance comes from: image i is the same however many are made, and in what batches"""
        size: tuple[int, int] | None = None
        """height and width; without it, that of training"""
        batch: int = 64
        """images at once; changes the memory, and of the images no more than rounding"""
        out: Annotated[str, tyro.conf.arg(metavar="PATH")] = "samples.png"
        """x.png is one grid, x.npz an array of bytes, and a folder gets one PNG each"""
        vae: str | None = None
        """a folder or a hub name of the VAE of latents, where it has moved since they were made"""
        device: Device = "auto"
        imports: Imports = ()
        """a Python file of yours to run first, for the classes in it"""

    options = _parse(Options, "sample", words)
    from onescan.recipes.files import import_file
    from onescan.training.ranks import Ranks, choose_device
    from onescan.training.samples import SampleConfig, check_out, write_samples

    if not options.out:
        raise ValueError("out is '', expected a file's or a folder's name")
    out = Path(options.out)
    check_out(out)
    for file in options.imports:
        import_file(file)
    from onescan.training.pipeline import load_pipeline, usual_sampler

    usual = usual_sampler(options.checkpoint)
    asked = SampleConfig(
        count=options.count,
        steps=usual.steps if options.steps is None else options.steps,
        guidance=usual.guidance if options.guidance is None else options.guidance,
        seed=options.seed,
        size=options.size,
        batch_size=options.batch,
    )
    asked.check()
    device = choose_device(options.device, Ranks())
    from onescan.integrations.diffusers import find_labels, parse_label

    pipeline = load_pipeline(options.checkpoint, sampler=options.sampler, vae=options.vae)
    spelt = [parse_label(word, pipeline.names) for word in options.label]
    if spelt:
        labels = find_labels(spelt, pipeline.names, num_classes=pipeline.num_classes)
        if pipeline.num_classes in labels:  # which stands for none, and is mistyped here
            raise ValueError(
                f"label {pipeline.num_classes} is no class, expected 0 to "
                f"{pipeline.num_classes - 1}"
            )
        asked = dataclasses.replace(asked, labels=tuple(labels))
    made = write_samples(pipeline.to(device), asked, out, progress=True)
    _print(f"{out}: {made} image{'s' if made > 1 else ''}")


def generate(words: Words) -> None:
    """Write on from a text, as the words come."""
    from onescan.models.causal_lm import Sampling

    @dataclass(frozen=True, kw_only=True)
    class Options:
        checkpoint: LanguageModel
        prompt: str = ""
        """what is written on from; - reads it from the standard input"""
        max_new_tokens: int = 200
        """Maximum number of tokens to generate."""
        sampling: Annotated[Sampling, tyro.conf.arg(name="")] = dataclasses.field(
            default_factory=lambda: Sampling(temperature=0.8, top_p=0.95)
        )
        seed: int = 0
        """what chance comes from"""
        device: Device = "auto"

    options = _parse(Options, "generate", words)
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


def fill(words: Words) -> None:
    """Say what may stand where a text has masks."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        checkpoint: LanguageModel
        text: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")]
        """with masks as the tokenizer spells them, mostly [MASK] or <mask>"""
        top: int = 5
        """guesses for each mask"""
        device: Device = "auto"

    options = _parse(Options, "fill", words)
    model, tokenizer, _ = _language_model(options.checkpoint, "MaskedLM", options.device)
    from onescan.tasks.writing import fill_masks

    for guesses in fill_masks(model, tokenizer, options.text, top=options.top):
        _print(", ".join(f"{printable(guess.text)} {guess.share:.1%}" for guess in guesses))


def glue(words: Words) -> None:
    """Fine-tune a masked language model on tasks of GLUE; a table and a page over seeds."""
    from onescan.recipes.glue_runs import GlueStudy, check_runs, plan_glue

    @dataclass(frozen=True, kw_only=True)
    class Options:
        checkpoint: LanguageModel
        study: Annotated[GlueStudy, tyro.conf.arg(name="")] = dataclasses.field(
            default_factory=GlueStudy
        )
        out: Annotated[Path, tyro.conf.arg(metavar="PATH")] = Path("runs") / "glue"
        """folder for the runs, as in runs/glue/cola/seed-0, the summary and the page"""
        overwrite: bool = False
        """remove the runs that the folder holds, and start anew"""

    options = _parse(Options, "glue", words)
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
            say("mnli is learnt first, as others begin with its weights, unless --no-from-mnli")
        check_runs(runs, overwrite=options.overwrite)
        results = _fine_tuned(runs, say, overwrite=options.overwrite)
    if ranks.is_first:
        for task in tasks:
            write_report(results[task], out / task / "report.html")
        learnt = {task: results[task] for task in tasks}
        outcome = read_glue(learnt, checkpoint=options.checkpoint, recipe=study.recipe)
        page = write_glue(outcome, out)
        _print(f"{glue_table(outcome)}\nreport: {page}")


def needle(words: Words) -> None:
    """Hide a fact at each depth of long texts, and see whether a language model recalls it."""
    from onescan.bench.asked import NeedleConfig

    @dataclass(frozen=True, kw_only=True)
    class Options:
        checkpoint: LanguageModel
        asked: Annotated[NeedleConfig, tyro.conf.arg(name="")] = dataclasses.field(
            default_factory=NeedleConfig
        )
        haystack: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
        """a text file to hide it in; without it, the text that a run was judged on"""
        out: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
        """folder for needle.json and the page; without it, bench/needle/CHECKPOINT"""
        device: Device = "auto"

    options = _parse(Options, "needle", words)
    model, tokenizer, _ = _language_model(options.checkpoint, "CausalLM", options.device)
    from onescan.bench.haystack import held_out_haystack, read_haystack
    from onescan.bench.names import short_name
    from onescan.bench.needle import measure_needles
    from onescan.report import check_report_path, needle_table, write_needles

    name, file = short_name(options.checkpoint), options.haystack
    out = options.out or Path("bench", "needle", name)
    check_report_path(out / "report.html")
    haystack = (
        held_out_haystack(options.checkpoint) if file is None else read_haystack(file, tokenizer)
    )
    grid = measure_needles(name, model, tokenizer, haystack, options.asked, out, progress=True)
    _print(f"{needle_table(grid)}\nreport: {write_needles(grid, out / 'report.html')}")


def tokenizer(words: Words) -> None:
    """Train a byte-level BPE on text of any kind, and say how well it does on held-out text."""
    from onescan.data.text.documents import Documents

    @dataclass(frozen=True, kw_only=True)
    class Options:
        path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
        """a file or a folder of text or tables, or a name on the hub"""
        out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
        """where to write it, for data.tokenizer, and for transformers' AutoTokenizer"""
        size: int = 8192
        """tokens at most; 258 are bytes and specials"""
        column: str = "text"
        """where the text of a table or an object is"""
        documents: Documents = "file"
        """what one document of plain text is; line breaks are no part of a line"""
        name: str | None = None
        """which of a hub data set's configurations"""
        split: str = "train"
        """what to learn from"""

    options = _parse(Options, "tokenizer", words)
    from onescan.data.text.byte_pairs import check_empty, train_byte_pairs
    from onescan.data.text.source import Wanted, find_source, read_texts

    check_empty(options.out)
    wanted = Wanted(column=options.column, documents=options.documents, name=options.name)
    source = find_source(options.path, wanted, field="path")
    trained = train_byte_pairs(read_texts(source, options.split), options.size)
    trained.tokenizer.save(options.out)
    where = "held-out text" if trained.is_held_out else "the text that it was trained on"
    _print(f"{options.out}: {trained.tokenizer.size} tokens, ", end="")
    _print(f"{trained.bytes_per_token:.2f} bytes per token of {where}")


def encode(words: Words) -> None:
    """Encode a data set of images by a VAE, once, for denoisers that learn from its latents."""
    from onescan.data import ImageDatasetConfig
    from onescan.training.encode import EncodeConfig
    from onescan.training.encode import encode as encode_images

    @dataclass(frozen=True, kw_only=True)
    class Options:
        path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
        """a folder of a folder for each class, parquet files, or a name on the hub"""
        out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
        """where the latents go, for data.path of a run; begun ones are gone on with"""
        asked: Annotated[EncodeConfig, tyro.conf.arg(name="")]
        image_size: int = 256
        """height and width of the images, cut out of the middle"""
        name: str | None = None
        """which of a hub data set's configurations"""
        train_split: str = "train"
        """what is learnt from"""
        test_split: str | None = None
        """what is judged on; without it, validation or test, or else a part of train_split"""
        test_fraction: float = 0.1
        """part of every class that is held out where there is no test split"""
        image_column: str | None = None
        """where the images are; without it, the only column of images"""
        label_column: str | None = None
        """where the classes are; without it, the only column of classes, or label"""
        on_error: Literal["raise", "skip"] = "raise"
        """whether an unreadable image ends the encoding, or is left out"""
        workers: int | None = None
        """processes that read images; without it, one a core"""
        device: Device = "auto"

    options = _parse(Options, "encode", words)
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
    _print(f"{options.out}: {train:,} images to learn from and {test:,} held out, ", end="")
    _print(f"as latents of {form.channels} x {form.height} x {form.width}")


def bench(words: Words) -> None:
    """Measure time and memory over sizes: of a model's forms, or of ours beside others'."""
    from onescan.bench.contests import CONTESTS

    if not words or words[0] in HELP:
        _print(
            "usage: onescan bench BENCHMARK [OPTIONS]; onescan bench BENCHMARK --help lists them\n"
        )
        _print(f"  {'forms':<10}every form of one model's mixer over image sizes")
        _print("\n".join(f"  {name:<10}{contest.summary}" for name, contest in CONTESTS.items()))
        return
    if words[0] not in ("forms", *CONTESTS):
        raise unknown_choice("benchmark", words[0], ["forms", *CONTESTS])
    if words[0] == "forms":
        _bench_forms(words[1:])
    else:
        _bench_contest(words[0], words[1:])


def _bench_forms(words: Words) -> None:
    from onescan.bench.forms import FormsConfig, measure_forms
    from onescan.models.presets import preset
    from onescan.report import check_report_path, write_forms

    @dataclass(frozen=True, kw_only=True)
    class Options:
        preset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET")]
        """a model with several forms, as in lion_d_base; onescan models lists all"""
        forms: Annotated[FormsConfig, tyro.conf.arg(name="")]
        out: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
        """folder for the measurements and the page; without it, bench/PRESET"""

    options = _parse(Options, "bench forms", words)
    model = preset(options.preset)
    out = _bench_folder(str(Path("bench", options.preset)) if options.out is None else options.out)
    check_report_path(out / "report.html")
    costs = measure_forms(options.preset, model, options.forms, out, progress=True)
    for left in costs.left_out:
        _print(f"not measured: {left.variant.name} from {left.size} pixels on, as {left.why}")
    _print(f"report: {write_forms(costs, out / 'report.html')}")


def _bench_folder(out: str) -> Path:
    if not out:
        raise ValueError("out is '', expected a folder for the measurements")
    return Path(out)


def _bench_contest(name: str, words: Words) -> None:
    from onescan.bench.contests import CONTESTS

    contest, folder = CONTESTS[name], Path("bench", name)
    where = tyro.conf.arg(
        metavar="PATH", help=f"folder for the measurements and the page; without it, {folder}"
    )
    fields: list[Any] = [
        ("asked", Annotated[contest.options, tyro.conf.arg(name="")]),
        ("out", Annotated[str, where], str(folder)),
    ]
    kind = dataclasses.make_dataclass("Options", fields, frozen=True, kw_only=True)
    options: Any = _parse(kind, f"bench {name}", words, about=contest.summary)
    from onescan.bench.contest.run import run_contest
    from onescan.report import check_report_path, contest_table, write_contest
    from onescan.report.contest.figures import absent

    out = _bench_folder(options.out)
    page = out / "report.html"
    check_report_path(page)

    def write(results: "Results") -> None:
        if results.has_outcomes:
            write_contest(results, contest, page)

    results = run_contest(name, options.asked, out, progress=True, after=write)
    if not results.has_outcomes:
        first = absent(results, contest)[0]
        raise ValueError(f"nothing could be measured, as {out / name}.json says: {first}; ...")
    _print(contest_table(results, contest))
    _print(f"report: {write_contest(results, contest, page)}")


def models(words: Words) -> None:
    """List the presets: parameters and multiply-accumulates, counted and as printed."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        ablations: bool = False
        """the rows of the papers' ablation tables too"""

    options = _parse(Options, "models", words)
    from onescan.bench.size import model_size
    from onescan.models.presets import ABLATIONS, PRESETS, preset

    in_the_paper = f"{'in the paper':>13}{'difference':>12}"
    _print(f"{'':<21}{'parameters':>13}{in_the_paper}{'GMACs':>8}{in_the_paper}")
    for name, known in PRESETS.items():
        size = model_size(known.config)
        _print(_size_row(name, size, known.printed_millions, known.printed_gmacs))
        for row, printed in known.printed_ablations.items() if options.ablations else ():
            size = model_size(preset(name, **ABLATIONS[row]))
            _print(_size_row(f"  {row}", size, printed))


def recipes(words: Words) -> None:
    """List the recipes: complete runs by name."""
    if set(words) & set(HELP):
        _print("usage: onescan recipes")
    elif words:
        raise ValueError(f"recipes takes no words, got {' '.join(words)!r}")
    from onescan.recipes import RECIPES, summary

    widest = max(map(len, RECIPES))
    for name, recipe in RECIPES.items():
        _print(f"{name:<{widest}}  {summary(recipe)}")


def show(words: Words) -> None:
    """Show a recipe's config, every field of it."""
    if not words or set(words) & set(HELP):
        _print("usage: onescan show RECIPE")
        recipes([])
        return
    if words[1:]:
        raise ValueError(f"show takes one recipe, got {' '.join(words)!r}")
    from onescan.recipes import find_recipe

    recipe = find_recipe(words[0])
    _print(inspect.getdoc(recipe))
    _print("\n".join(_fields(recipe(), indent="")))


# Every command there is.
COMMANDS: dict[str, Callable[[Words], None]] = {
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
    "bench": bench,
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
        "onescan COMMAND --help says more. --version prints the version; --traceback shows",
    ]
    return "\n".join([*lines, "where an error arose."])


def _interrupted(words: Words) -> int:
    goes_on = (
        "; the same command goes on from what was saved"
        if words[0] in ("train", "glue", "needle", "encode", "bench")
        or any(word.startswith("--samples") for word in words)
        else ""
    )
    return _fail(f"interrupted{goes_on}", INTERRUPTED)


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
    words: Words,
    default: OptionsT | None = None,
    about: str | None = None,
) -> OptionsT:
    return tyro.cli(
        options,
        prog=f"onescan {command}",
        description=about or inspect.getdoc(COMMANDS[command.partition(" ")[0]]),
        args=words,
        config=(tyro.conf.AvoidSubcommands,),
        default=tyro.MISSING_NONPROP if default is None else default,
    )


def _way_to_judge(options: Any) -> Callable[[Any], None]:
    """What `evaluate` is to do; options of what is not asked for are refused."""
    from onescan.configs import differences

    ways = {"lengths": _evaluate_lengths, "tasks": _evaluate_tasks, "samples": _evaluate_samples}
    given = [name for name in ways if getattr(getattr(options, name), name) not in (None, (), "")]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are given, expected one of them")
    for name in [name for name in ways if name not in given]:
        config = getattr(options, name)
        for field, value, _ in differences(config, type(config)()):
            raise ValueError(f"{field} is {str(value)!r}, but no {name} are given")
    if given and options.workers is not None:
        raise ValueError(f"workers is {options.workers}, but {given[0]} are read by one process")
    if not given and options.out is not None:
        raise ValueError(
            f"out is '{options.out}', but neither lengths nor tasks nor samples are given"
        )
    return ways[given[0]] if given else _evaluate_run


def _load(path: Path, imports: Sequence[Path]) -> "Checkpoint":
    from onescan.recipes.files import import_file
    from onescan.training.checkpoint import load

    for file in imports:
        import_file(file)
    return load(path)


def _language_model(name: str, kind: str, device: str) -> "tuple[Any, Tokenizer, torch.device]":
    """A model of this class on its device, with its tokenizer."""
    from onescan.training.language_model import load_language_model
    from onescan.training.ranks import Ranks, choose_device

    chosen = choose_device(device, Ranks())
    model, tokenizer = load_language_model(name)
    if type(model).__name__ != kind:
        raise ValueError(f"{name!r} holds a {type(model).__name__}, expected a {kind}")
    return model.to(chosen), tokenizer, chosen


def _fine_tuned(
    runs: "Sequence[GlueRun]", say: Callable[[str], object], *, overwrite: bool
) -> "dict[GlueTask, list[RunResult]]":
    """The results of each task, one a seed."""
    from onescan.training import train as train_run

    results: dict[GlueTask, list[RunResult]] = {}
    for task, seed, config, folder in runs:
        say(f"{task}, seed {seed}, in {folder}, begins with {config.start}")
        result = train_run(config, folder, overwrite=overwrite, progress=True)
        say(_results([result]))
        results.setdefault(task, []).append(result)
    return results


def _what_to_train(words: Words) -> "tuple[RunConfig, str, Words]":
    """The run that is named or lies in a file, how it was given, and the words that are left."""
    from onescan.checkpoint.run_folder import CONFIG
    from onescan.recipes import find_recipe
    from onescan.recipes.files import import_file
    from onescan.training.folder import read_manifest

    if words[0] != "--config":
        return find_recipe(words[0])(), words[0], words[1:]
    file = Path(words[1] if words[1:] else "")
    folder = file if file.is_dir() else file.parent
    if not (words[1:] and (folder / CONFIG).is_file() and file in (folder, folder / CONFIG)):
        raise ValueError(f"--config is '{file}', expected a run's {CONFIG}, or the run's folder")
    while words[2:3] == ["--import"] and words[3:]:
        import_file(words[3])
        words = [*words[:2], *words[4:]]
    return read_manifest(folder).run, f"--config {file}", words[2:]


def _is_told_by_another(error: Exception) -> bool:
    """Whether it is the first of several processes that failed, and says so itself."""
    notes = getattr(error, "__notes__", ())
    if not notes:  # and nothing slow is imported for it
        return False
    from onescan.training.ranks import TOLD

    return TOLD in notes


def _silent(*_words: object) -> None:
    """What processes other than the first say."""


def _results(results: "Sequence[RunResult]") -> str:
    """A line per seed, and the mean and spread over them."""
    from onescan.training.records import read_metrics, waiting_share

    lines = []
    for result in results:
        shown = ", ".join(f"test {name} {value:.4f}" for name, value in result.metrics.items())
        shown += f", waited for data {waiting_share(read_metrics(result.folder)):.1%} of the time"
        note = " (finished before; --overwrite trains anew)" if result.reused else ""
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
    """A line of the table of models: what is counted beside what is printed."""
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
