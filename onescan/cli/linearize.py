"""The command that converts a trained transformers encoder to linear attention: linearize."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import tyro

from onescan.cli.options import Argv, Device, echo, metric_label, metric_value, parse
from onescan.experiments.linearize_config import LinearizeConfig
from onescan.messages import plural

TRANSFER = "transfer"


def linearize(argv: Argv) -> None:
    """Replace the softmax attention of a transformers encoder with linear attention.

    First, each new layer learns to reproduce the attention that it replaces. Then the whole model
    is trained on the data. Load the output folder with load_linearized from
    onescan.integrations.transformers, or, after importing that module, with transformers' Auto
    classes.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(LinearizeConfig):
        model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
        """Folder or hub name of a transformers model for masked language modeling, text
        classification or image classification, with its tokenizer or image processor."""
        data: Annotated[str, tyro.conf.arg(metavar="PATH")]
        """Text for a masked language model, a table of texts and labels, or a folder of images
        with one subfolder per class. Part of the data is held out for evaluation, as in onescan
        train."""
        out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
        """Output folder, which must not exist."""
        device: Device = "auto"

    options = parse(Options, linearize, argv)
    from onescan.experiments.training.distributed import Ranks, choose_device
    from onescan.experiments.training.linearize_folder import linearize_folder
    from onescan.progress import progress_bar

    names = [field.name for field in fields(LinearizeConfig)]
    config = LinearizeConfig(**{name: getattr(options, name) for name in names})
    with ExitStack() as stack:
        stack.enter_context(_renamed_options())
        device = choose_device(options.device, Ranks())

        @cache
        def bar(phase: str) -> Any:
            steps = config.transfer_steps if phase == TRANSFER else config.steps
            title = "attention transfer" if phase == TRANSFER else "training"
            return stack.enter_context(progress_bar(steps, unit="step", desc=title))

        def report(phase: str, step: int, loss: float) -> None:
            del step
            bar(phase).set_postfix_str(f"loss {loss:.4f}", refresh=False)
            bar(phase).update()

        outcome = linearize_folder(
            options.model, options.data, options.out, config, device=device, report=report
        )
    done = outcome.linearized
    for note in outcome.notes:
        echo(f"data: {note}")
    kept = f", softmax attention in {plural(len(done.kept), 'layer')}" if done.kept else ""
    if options.softmax_every is not None and not done.kept:
        kept = f", softmax attention in no layer (softmax_every is {options.softmax_every})"
    echo(f"linear attention ({options.kind}) in {plural(len(done.replaced), 'layer')}{kept}")
    for name, before in outcome.original.items():
        values = [metric_value(name, x) for x in (before, outcome.linear[name])]
        echo(f"held-out {metric_label(name)}: {values[0]} before, {values[1]} after")
    echo(
        f"{options.out}: saved. To load the model in Python:\n"
        "  from onescan.integrations.transformers import load_linearized\n"
        f"  model = load_linearized({str(options.out)!r})"
    )


@contextmanager
def _renamed_options() -> Iterator[None]:
    """Replace the options of ``onescan train`` in error messages by those of this command."""
    names = "|".join(field.name for field in fields(LinearizeConfig)) + "|device"
    names += "|" + names.replace("_", "-")
    try:
        yield
    except ValueError as error:
        message = re.sub(r"(?<![\w./'\"])data\.path\b", "data", str(error))
        prefix = rf"(?<![\w./'\"])(?:data|machine|training)\.(?=(?:{names})\b)"
        error.args = (re.sub(prefix, "", message),)
        raise
