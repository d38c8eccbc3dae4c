"""The command that converts weights from and to other libraries: convert."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import tyro

from onescan.cli.options import HELP, HELP_ALL, Argv, Imports, echo, import_files, parse


def convert(argv: Argv) -> None:
    """Convert models of other libraries to onescan, and native models to other libraries.

    A model of transformers, timm, diffusers, fla or LION becomes a native model. With --to, a
    trained model becomes a folder for from_pretrained of transformers or diffusers.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options:
        source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
        """Folder with config.json and safetensors files, safetensors file, or hub name; with --to,
        a run, or the folder or hub name of another native model."""
        out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
        """Output folder. predict reads that of an image classifier, generate or fill that of a
        language model, and sample that of a denoiser."""
        to: Literal["onescan", "transformers", "diffusers"] = "onescan"
        """Library to convert to. Native models become a ViT, DeiT, GPT-2 or BERT of transformers
        or a DiT of diffusers if they have that architecture, and otherwise a class of onescan for
        that library."""
        num_heads: int | None = None
        """Number of attention heads, for a file without config.json. Default: that of the published
        model of the same width."""
        imports: Imports = ()

    to_onnx = "--to=onnx" in argv or ("--to", "onnx") in pairwise(argv)
    if to_onnx and {*HELP, HELP_ALL}.isdisjoint(argv):
        raise ValueError(
            "to is 'onnx', expected 'onescan', 'transformers' or 'diffusers'; in Python, "
            "export_onnx of onescan.integrations.export writes ONNX files"
        )
    options = parse(Options, convert, argv)
    from onescan.experiments.training.convert import convert as convert_weights

    import_files(options.imports)
    model = convert_weights(options.source, options.out, to=options.to, num_heads=options.num_heads)
    count = sum(parameter.numel() for parameter in model.parameters())
    echo(f"{options.out}: {type(model).__name__} with {count:,} parameters{_parts(options.out)}")


def _parts(folder: Path) -> str:
    """Say what a transformers folder contains besides the model; empty for other folders."""
    config = folder / "config.json"
    if not config.is_file() or "model_type" not in json.loads(config.read_bytes()):
        return ""
    if (folder / "tokenizer_config.json").is_file():
        return " and its tokenizer"
    if (folder / "preprocessor_config.json").is_file():
        return " and its image processor"
    return "; the source has no tokenizer or image processor"
