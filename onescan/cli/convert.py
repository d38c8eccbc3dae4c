"""The command that converts weights from and to other libraries: convert."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from onescan.cli.options import Argv, echo, parse


def convert(argv: Argv) -> None:
    """Convert a model of transformers, timm, diffusers, fla or LION to onescan, or back."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
        """Folder with config.json and safetensors files, safetensors file, or hub name; with --to,
        a run or another native model."""
        out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
        """Output folder: of an image classifier for predict, of a language model for generate and
        fill, of a denoiser for sample."""
        to: Literal["onescan", "transformers", "diffusers"] = "onescan"
        """Library to convert to. A native model with softmax attention becomes a ViT, DeiT, GPT-2
        or BERT of transformers, or a DiT of diffusers."""
        num_heads: int | None = None
        """Number of attention heads, for a file without config.json. Default: that of the published
        model of the same width."""

    options = parse(Options, convert, argv)
    from onescan.experiments.training.convert import convert as convert_weights

    model = convert_weights(options.source, options.out, to=options.to, num_heads=options.num_heads)
    count = sum(parameter.numel() for parameter in model.parameters())
    echo(f"{options.out}: {type(model).__name__} with {count:,} parameters")
