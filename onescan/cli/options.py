"""Shared by the commands: parsing, help, output and common options."""

import contextlib
import inspect
import io
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro

from onescan.messages import named_type, printable

if TYPE_CHECKING:
    import torch

    from onescan.inputs.tokenizer import Tokenizer

HELP, HELP_ALL = ("-h", "--help"), "--help-all"
HELP_WIDTH = 80  # of text outside of boxes
UNESCAPED = "\n\t"  # control characters that are printed unchanged

OptionsT = TypeVar("OptionsT")
Argv = list[str]
Checkpoint = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
LanguageModel = Annotated[
    str,
    tyro.conf.Positional,
    tyro.conf.arg(
        metavar="CHECKPOINT",
        help="Run folder, its best.safetensors, zoo/NAME (see `onescan zoo`), or a folder or hub "
        "name of a transformers model.",
    ),
]
Imports = Annotated[
    tuple[Path, ...],
    tyro.conf.UseAppendAction,
    tyro.conf.arg(
        name="import",
        metavar="FILE.py",
        help="Python file to run first, because it defines classes of the run.",
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
) -> OptionsT:
    """Parse the arguments of a command; print help or an error and exit.

    Args:
        options: Dataclass of the options.
        command: The command.
        argv: Arguments after the command.
        prog: Name of the command in messages, if not its own.
        description: First part of the help text, if not the docstring of the command.
        default: Defaults of all options.
        common: Flags to show with ``--help``; ``None`` shows all.
    """
    hides_rare = common is not None and HELP_ALL not in argv
    argv = ["--help" if argument == HELP_ALL else argument for argument in argv]
    shown, errors = _Capture(), _Capture()
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(errors):
            return tyro.cli(
                options,
                prog=f"onescan {prog or command.__name__}",
                description=description or inspect.getdoc(command),
                args=argv,
                config=(tyro.conf.AvoidSubcommands,),
                default=tyro.MISSING_NONPROP if default is None else default,
            )
    except SystemExit:
        if message := _value_error(errors.getvalue()):
            raise ValueError(message) from None
        text = reflow(shown.getvalue())
        echo(only_options(text, common or ()) if hides_rare and text else text, end="")
        sys.stderr.write(printable(errors.getvalue(), keep=UNESCAPED))
        raise


class _Capture(io.StringIO):
    """Captured output of tyro, which draws boxes if the encoding has the characters."""

    encoding = "utf-8"


def _value_error(text: str) -> str:
    """Return the message in tyro's box for a value error, in one line; empty for other text."""
    box = re.match(r"╭─ Value error ─*╮\n(.*?)\n(?:│ ─|╰)", text, re.DOTALL)
    lines = [line.strip("│").strip() for line in box[1].splitlines()] if box else []
    return re.sub(r"^Error parsing (?!--)[\w.]+: |^Error parsing ", "", " ".join(lines))


def reflow(text: str) -> str:
    """Wrap a help text of tyro, which breaks descriptions where docstrings do.

    Empty defaults are removed, and also None if the description states the default.
    """
    lines: list[str] = []
    box: list[str] = []
    for line in text.splitlines():
        if line.startswith("│"):
            box.append(line[2:-2].rstrip())
        elif not line.startswith(("╭", "╰", "usage")):
            lines += textwrap.wrap(line, HELP_WIDTH, break_on_hyphens=False) or [""]
        else:
            width = len(line) - len("│  │")
            lines += [*(f"│ {content:<{width}} │" for content in _wrap_box(box, width)), line]
            box = []
    return "".join(f"{line}\n" for line in lines)


def _wrap_box(box: list[str], width: int) -> list[str]:
    """Wrap the descriptions in a box, which are all indented to the same column."""
    indents = [len(line) - len(line.lstrip()) for line in box if line.startswith("   ")]
    if not indents:
        return [_without_empty_default(line) for line in box]
    column = min(indents)
    wrapped: list[str] = []
    head, words = "", ""
    for line in [*box, "end"]:
        if line and not line[:column].strip():
            words += f" {line.strip()}"
            continue
        if words:
            described = _without_empty_default(words.strip())
            lines = textwrap.wrap(described, width - column, break_on_hyphens=False)
            indent = " " * column
            wrapped += [head + lines[0], *(indent + line for line in lines[1:])]
            head, words = indent, ""
        if line[column - 2 : column] == "  ":  # the description starts beside the flag
            head, words = line[:column], line[column:]
        elif line or (wrapped and wrapped[-1]):
            head = " " * column
            wrapped.append(line)
    return wrapped[:-1]


def _without_empty_default(description: str) -> str:
    """Remove an empty default, and None if the description states the default.

    >>> _without_empty_default("By default all. (default: None)")
    'By default all.'
    """
    empty = "(None|'')?" if "y default" in description else "('')?"
    return re.sub(rf" \(default: {empty}\)$", "", description)


def only_options(text: str, flags: Collection[str]) -> str:
    """Remove all options but these from a help text of tyro; keep positional arguments.

    A box of the text holds entries. The first line of an entry begins with its flag, and the others
    are indented further.
    """
    kept: list[str] = []
    box: list[str] = []
    is_shown, count = True, 0
    for line in text.splitlines():
        if flag := re.match(r"│ (?:-h, )?(--[\w.-]+)", line):
            count += 1
            is_shown = flag[1] in flags or flag[1] == "--help"
        if line.startswith("╭"):
            box, is_shown = [line], "positional" in line
        elif line.startswith("╰"):
            kept += [*box, line] if len(box) > 1 else []
            box = []
        elif not box:
            kept.append(line)
        elif is_shown:
            box.append(line)
    return "\n".join([*kept, f"Use {HELP_ALL} to show all {count} options.", ""])


def name_flags(message: str, argv: Sequence[str]) -> str:
    """Replace the fields in a message by the flags that set them, as the user types them.

    A message may name the last part of a field only, such as width for --model.width.

    >>> name_flags("training.batch_size is 0", ["train", "digits", "--training.batch-size", "0"])
    '--training.batch-size is 0'
    >>> name_flags("width is 0", ["train", "digits", "--model.width", "0"])
    '--model.width is 0'
    """
    flags = dict.fromkeys(word.partition("=")[0] for word in argv if re.match(r"--[a-z]", word))
    fields = {flag: flag.removeprefix("--").replace("-", "_") for flag in flags}
    ends = [field.rpartition(".")[2] for field in fields.values()]
    for field in fields.values():
        shown = "--" + field.replace("_", "-")
        named = rf"(?<![\w.'\"/-]){re.escape(field)}(?= (?:is|has|and|without)\b)"
        message = re.sub(named, shown, message)
        end = field.rpartition(".")[2]
        if ends.count(end) == 1:
            message = re.sub(rf"^{end}(?= (?:is|has|without)\b)", shown, message)
            if "_" in end:  # not a word of the message
                message = re.sub(rf"(?<![\w.'\"/-]){end}(?= \d)", shown, message)
    return message


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
    return f"{value:.1%}" if "accuracy" in name else f"{value:#.4g}"


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
    if type(model).__name__ != kind:
        raise ValueError(f"checkpoint {name!r} is {named_type(model)}, expected a {kind}")
    return model.to(chosen), tokenizer, chosen
