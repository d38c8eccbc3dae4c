"""Shared by the commands: parsing, help, output and common options."""

import contextlib
import dataclasses
import functools
import inspect
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from onescan.messages import named_type, printable

if TYPE_CHECKING:
    import torch

    from onescan.inputs.tokenizer import Tokenizer

HELP, HELP_ALL = ("-h", "--help"), "--help-all"
RESUME = "run the same command again to resume"
COMMAND = r"(onescan|torchrun|pip) "  # first word of a paragraph of commands
UNESCAPED = "\n\t"  # control characters that are printed unchanged

# class of a model -> the command to use it with, if `onescan predict` does not support it
COMMANDS_BY_MODEL = {"CausalLM": "generate", "MaskedLM": "fill", "Denoiser": "sample"}

OptionsT = TypeVar("OptionsT")
Argv = list[str]
Checkpoint = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
LanguageModel = Annotated[
    str,
    tyro.conf.Positional,
    tyro.conf.arg(
        metavar="CHECKPOINT",
        help="Run folder, its best.safetensors, zoo/NAME (see `onescan zoo`), a hub name, or a "
        "folder of an onescan language model in transformers' format.",
    ),
]
Imports = Annotated[
    tuple[Path, ...],
    tyro.conf.UseAppendAction,
    tyro.conf.arg(
        name="import",
        metavar="FILE.py",
        help="Python file to run first, because it defines classes of the run (repeatable).",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """Backend and precision of a command."""

    backend: Literal["auto", "torch", "triton"] = "auto"
    """Backend of the ops: torch, triton (kernels), or auto, which chooses between them."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Precision of float32 matrix products: highest is float32, high TensorFloat-32 and medium
    bfloat16, where the hardware supports them."""

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the settings inside the context."""
        from onescan.experiments.training.optim import compute_settings

        with compute_settings(self.backend, self.matmul_precision):
            yield


Compute = Annotated[ComputeConfig, tyro.conf.arg(name="")]
Device = Annotated[
    str, tyro.conf.arg(help="Device: cpu, cuda, ...; auto uses a GPU if there is one.")
]


def echo(text: object = "", *, end: str = "\n", flush: bool = False) -> None:
    """Print text with control characters escaped, except line breaks and tabs."""
    print(printable(text, keep=UNESCAPED), end=end, flush=flush)


def silent(*_values: object) -> None:
    """Print nothing; replaces `echo` in all processes but the first."""


def parse(
    options: type[OptionsT],
    command: Callable[[Argv], None],
    argv: Argv,
    *,
    prog: str | None = None,
    description: str | None = None,
    default: OptionsT | None = None,
    common: Collection[str] | None = None,
    inferred: Collection[str] = (),
) -> OptionsT:
    """Parse the arguments of a command; print help or an error and exit.

    Args:
        options: Dataclass of the options.
        command: The command.
        argv: Arguments after the command.
        prog: Name of the command in messages, if not its own.
        description: First part of the help text, if not the docstring of the command.
        default: Defaults of all options.
        common: Fields to show with ``--help``, in all groups; ``None`` shows all.
        inferred: Fields whose defaults are inferred from the data later.

    Raises:
        ValueError: If a config rejects its values.
        SystemExit: After help, and after an error that tyro has found.
    """
    asks_for_help = not {*HELP, HELP_ALL}.isdisjoint(argv)
    shown = common if asks_for_help and HELP_ALL not in argv else None
    call = functools.partial(
        tyro.cli,
        options,
        prog=printable(f"onescan {prog or command.__name__}"),
        description="",
        args=["--help"] if asks_for_help else argv,
        config=(tyro.conf.AvoidSubcommands,),
        default=tyro.MISSING_NONPROP if default is None else default,
        registry=_rules(shown, inferred),
    )
    if asks_for_help:
        echo(_wrapped(description or inspect.getdoc(command) or ""), end="\n\n")
        try:
            return call()
        finally:
            if shown is not None:
                echo(f"Use {HELP_ALL} to show all options.")
    # tyro does not escape what the user typed
    errors = io.TextIOWrapper(io.BytesIO(), sys.stdout.encoding, "backslashreplace", newline="")
    try:
        with contextlib.redirect_stdout(errors), contextlib.redirect_stderr(errors):
            return call()
    except _RejectedError as rejected:
        raise rejected.args[0] from None
    except SystemExit:
        errors.seek(0)
        sys.stderr.write(printable(errors.read(), keep=UNESCAPED))
        raise


def _wrapped(text: str) -> str:
    """Wrap the paragraphs of a text at the width of the terminal; each command is a paragraph."""
    wrapper = textwrap.TextWrapper(
        shutil.get_terminal_size().columns, break_long_words=False, break_on_hyphens=False
    )
    paragraphs = [
        paragraph.splitlines() if re.match(COMMAND, paragraph) else [" ".join(paragraph.split())]
        for paragraph in text.split("\n\n")
    ]
    return "\n\n".join("\n".join(map(wrapper.fill, lines)) for lines in paragraphs)


class _RejectedError(Exception):
    """Carries a ValueError of a config past tyro, which would print it in a box."""


def _rules(shown: Collection[str] | None, inferred: Collection[str]) -> ConstructorRegistry:
    """Return tyro's rules with three changes to those for dataclasses, and one to those for values.

    Line breaks of docstrings are removed, empty defaults are omitted, and errors of a config reach
    the caller. Optional fields that are not shown are hidden; None shows all. Errors about a value
    name the expected type in the words of the help text.
    """
    registry, is_nested = ConstructorRegistry(), False

    def by_tyro(get_spec: Callable[[Any], Any], info: Any) -> Any:
        """Return the result of tyro's own rules for a type; None while these rules call ours."""
        nonlocal is_nested
        if is_nested:
            return None
        is_nested = True
        try:
            return get_spec(info)
        finally:
            is_nested = False

    @registry.primitive_rule
    def _(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        spec = by_tyro(ConstructorRegistry.get_primitive_spec, info)
        if not isinstance(spec, PrimitiveConstructorSpec):
            return None

        def convert(words: list[str]) -> Any:
            try:
                return spec.instance_from_str(words)
            except ValueError:
                expected = spec.metavar.replace("{None}", "None").replace("|", " or ")
                raise ValueError(f"got {' '.join(words)!r}, expected {expected}") from None

        return dataclasses.replace(spec, instance_from_str=convert)

    @registry.struct_rule
    def _(info: StructTypeInfo) -> StructConstructorSpec | None:
        if not dataclasses.is_dataclass(info.type):
            return None
        spec = by_tyro(ConstructorRegistry.get_struct_spec, info)
        if not isinstance(spec, StructConstructorSpec):
            return None

        @functools.wraps(spec.instantiate, updated=())
        def build(*args: Any, **kwargs: Any) -> Any:
            try:
                return spec.instantiate(*args, **kwargs)
            except ValueError as error:
                raise _RejectedError(error) from None

        fields = tuple(_field(field, shown, inferred) for field in spec.fields)
        return StructConstructorSpec(instantiate=build, fields=fields)

    return registry


def _field(
    field: StructFieldSpec, shown: Collection[str] | None, inferred: Collection[str]
) -> StructFieldSpec:
    """Return a field as it is described in help texts."""

    def description() -> str | None:
        text = field.helptext() if callable(field.helptext) else field.helptext
        return text and " ".join(text.split())

    def default(value: str) -> str:
        if field.name in inferred:
            return "(default: inferred from the data)"
        is_stated = value == "None" and "y default" in (description() or "")
        return "" if is_stated or value in ("", "''") else f"(default: {printable(value)})"

    kind: Any = field.type
    is_option = field.default not in (tyro.MISSING, tyro.MISSING_NONPROP)
    if is_option and not dataclasses.is_dataclass(field.default):
        kind = Annotated[kind, tyro.conf.arg(help_behavior_hint=default)]
        if shown is not None and field.name not in shown:
            kind = Annotated[kind, tyro.conf.Suppress]
    return dataclasses.replace(field, type=kind, helptext=description)


def name_flags(message: str, argv: Sequence[str]) -> str:
    """Replace the fields in a message by the flags that set them, as the user types them.

    A message may name the last part of a field only, such as width for --model.width.

    >>> name_flags("training.batch_size is 0", ["train", "digits", "--training.batch-size", "0"])
    '--training.batch-size is 0'
    >>> name_flags("width is 0", ["train", "digits", "--model.width", "0"])
    '--model.width is 0'
    >>> name_flags("pass overwrite=True", ["train", "digits"])
    'pass --overwrite'
    >>> name_flags("there is no column 'text' (text_column selects one)", ["train", "digits"])
    "there is no column 'text' (--data.text-column selects one)"
    >>> name_flags("set init_from='runs/digits/seed-0'", ["train", "digits"])
    'pass --init-from runs/digits/seed-0'
    >>> name_flags("to='diffusers' converts it", ["convert", "zoo/digits_denoiser"])
    '--to diffusers converts it'
    """
    flags = dict.fromkeys(word.partition("=")[0] for word in argv if re.match(r"--[a-z]", word))
    fields = {flag: flag.removeprefix("--").replace("-", "_") for flag in flags}
    ends = [field.rpartition(".")[2] for field in fields.values()]
    for field in fields.values():
        shown = "--" + field.replace("_", "-")
        pattern = rf"(?<![\w.'\"/-]){re.escape(field)}(?= (?:is|has|contains|and|without)\b)"
        message = re.sub(pattern, shown, message)
        end = field.rpartition(".")[2]
        if ends.count(end) == 1:
            message = re.sub(rf"^{end}(?= (?:(?:is|has|contains|without)\b|\d))", shown, message)
            if "_" in end:  # not a word of the message
                message = re.sub(rf"(?<![\w.'\"/-]){end}(?= [\d(])", shown, message)
    prefix = "--data." if argv and argv[0] == "train" else "--"
    message = re.sub(r"\b(?:data\.)?(\w+)_column (?=selects one)", rf"{prefix}\1-column ", message)
    message = message.replace("on_error='skip'", f"{prefix}on-error skip")
    message = re.sub(r"set init_from='([^']*)'", r"pass --init-from \1", message)
    message = re.sub(r"(?<![\w.])to='(\w+)'", r"--to \1", message)
    return message.replace("overwrite=True", "--overwrite")


def metric_label(name: str) -> str:
    """Return the label of a metric.

    >>> metric_label("bits_per_byte")
    'bits per byte'
    """
    return name.replace("_", " ")


def metric_value(name: str, value: float) -> str:
    """Format a metric: accuracies in percent, other numbers with four significant digits.

    >>> metric_value("accuracy", 0.98611), metric_value("bits_per_byte", 3.26991)
    ('98.6%', '3.270')
    """
    return f"{value:.1%}" if name.endswith("accuracy") else f"{value:#.4g}"


@contextlib.contextmanager
def resumable(out: Path) -> Iterator[None]:
    """After an interrupt, say that the command can be resumed, if its output folder exists."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if out.exists():
            interrupt.args = (RESUME,)
        raise


def import_files(files: Sequence[Path]) -> None:
    """Run Python files that define classes of a run."""
    if files:
        from onescan.experiments.recipes.files import import_file

        for file in files:
            import_file(file)


def load_language_model(name: str, kind: str, device: str) -> "tuple[Any, Tokenizer, torch.device]":
    """Load a language model of the given class on its device, with its tokenizer."""
    from onescan.experiments.training.distributed import Ranks, choose_device
    from onescan.inference.loading import load_language_model as load

    chosen = choose_device(device, Ranks())
    model, tokenizer = load(name)
    if (actual := type(model).__name__) != kind:
        raise ValueError(
            f"checkpoint {name!r} is {named_type(model)}, expected a {kind}; use `onescan "
            f"{COMMANDS_BY_MODEL[actual]}`"
        )
    return model.to(chosen), tokenizer, chosen
