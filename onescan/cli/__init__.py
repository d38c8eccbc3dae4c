"""The command line: ``onescan COMMAND``, one function per command, listed in COMMANDS.

Each command imports the heavy modules that it needs, so that help is fast.
"""

import inspect
import opcode
import os
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path

from onescan import __version__
from onescan.cli.convert import convert
from onescan.cli.embed import embed
from onescan.cli.evaluate import compare, evaluate, needle
from onescan.cli.images import encode, sample
from onescan.cli.linearize import linearize
from onescan.cli.options import HELP, HELP_ALL, RESUME, Argv, echo, name_flags
from onescan.cli.predict import predict
from onescan.cli.show import models, recipes, show, zoo
from onescan.cli.text import fill, generate, tokenizer
from onescan.cli.train import glue, train
from onescan.experiments.installation import require_train
from onescan.messages import printable, unknown_choice

PACKAGE = Path(__file__).parents[1]
VERSION = ("-V", "--version")
MISTAKE, FAILURE, INTERRUPTED = 2, 1, 130  # exit codes

# parts of torch's messages when it cannot allocate a tensor
OUT_OF_MEMORY = ("can't allocate memory", "Storage size calculation", "CUDA out of memory")

COMMANDS: dict[str, Callable[[Argv], None]] = {
    "train": train,
    "evaluate": evaluate,
    "compare": compare,
    "predict": predict,
    "embed": embed,
    "sample": sample,
    "generate": generate,
    "fill": fill,
    "glue": glue,
    "needle": needle,
    "tokenizer": tokenizer,
    "encode": encode,
    "convert": convert,
    "linearize": linearize,
    "models": models,
    "recipes": recipes,
    "show": show,
    "zoo": zoo,
}
TRAINING = (
    "train",
    "evaluate",
    "compare",
    "glue",
    "needle",
    "encode",
    "linearize",
)  # need the extra


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Errors are printed in one line, except for programming errors, which are raised.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # escape characters that the console lacks
            stream.reconfigure(errors="backslashreplace")
    with_traceback = "--traceback" in argv
    argv = [argument for argument in argv if argument != "--traceback"]
    if not argv or argv[0] in HELP:
        echo(_overview())
        return 0 if argv else MISTAKE
    if argv[0] in VERSION:
        echo(f"onescan {__version__}")
        return 0
    try:
        if argv[0] not in COMMANDS:
            raise unknown_choice("command", argv[0], COMMANDS)
        if argv[0] in TRAINING and not {*HELP, HELP_ALL} & set(argv):
            require_train(f"onescan {argv[0]}")
        COMMANDS[argv[0]](argv[1:])
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exception, KeyboardInterrupt) as error:
        if interrupt := _interrupt(error):
            hint = f"; {RESUME}" if RESUME in interrupt.args else ""
            return _fail(f"interrupted{hint}", INTERRUPTED)
        failure = None if with_traceback else _failure(error, argv)
        if failure is None:
            raise
        message, code = failure
        return _fail(f"error: {message}", code) if message else code
    return 0


def _failure(error: BaseException, argv: Argv) -> tuple[str, int] | None:
    """Return the message and the exit code for an error; None for programming errors."""
    if isinstance(error, ValueError | ArithmeticError | OSError | ImportError):
        if _is_reported_elsewhere(error):
            return "", FAILURE
        if isinstance(error, ValueError | ArithmeticError) and not _is_raised_by_onescan(error):
            return None
        is_mistake = isinstance(error, ValueError | FileNotFoundError)
        return name_flags(str(error), argv), MISTAKE if is_mistake else FAILURE
    if isinstance(error, RuntimeError | MemoryError):
        if _is_out_of_memory(error):
            reason = str(error).strip().partition(chr(10))[0] or type(error).__name__
            advice = "use a smaller batch size, or a smaller model width or depth"
            return f"not enough memory: {reason}; {advice}", MISTAKE
        if "by peer" in str(error):  # a lost connection to another process
            return "another process failed; see its message", FAILURE
    return None


def _interrupt(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the interrupt that caused an error, such as the failed import of a C extension."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def _overview() -> str:
    commands = [
        f"  {name:<10}{(inspect.getdoc(command) or '').partition(chr(10))[0]}"
        for name, command in COMMANDS.items()
    ]
    return "\n".join(
        [
            "onescan: linear-attention models in any number of dimensions.",
            "",
            "usage: onescan COMMAND [OPTIONS]",
            "",
            *commands,
            "",
            "onescan COMMAND --help shows the common options of a command, --help-all all of them.",
            "-V, --version prints the version. --traceback shows the traceback of an error.",
        ]
    )


def _fail(message: str, code: int) -> int:
    print(f"onescan: {printable(message, keep=chr(10) + chr(9))}", file=sys.stderr)
    return code


def _is_raised_by_onescan(error: BaseException) -> bool:
    """Whether a ``raise`` statement of this package raised the error.

    Errors of Python and torch, and of code outside of the package, are programming errors.
    """
    last = error.__traceback__
    assert last is not None
    while last.tb_next is not None:
        last = last.tb_next
    code = last.tb_frame.f_code
    is_own = Path(code.co_filename).is_relative_to(PACKAGE)
    return is_own and code.co_code[last.tb_lasti] == opcode.opmap["RAISE_VARARGS"]


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(part in str(error) for part in OUT_OF_MEMORY)


def _is_reported_elsewhere(error: BaseException) -> bool:
    """Whether another process failed first and reports the error itself."""
    notes = getattr(error, "__notes__", ())
    if not notes:  # skips a slow import
        return False
    from onescan.experiments.training.distributed import RAISED_BY_FIRST

    return RAISED_BY_FIRST in notes
