"""The command that computes one vector per text or image: embed."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from onescan.cli.options import Argv, Device, Imports, echo, import_files, parse
from onescan.cli.predict import images_at, print_skipped, read_texts
from onescan.messages import plural

if TYPE_CHECKING:
    from torch import Tensor

    from onescan.inference.loading import Checkpoint

LINES = ".txt"


def embed(argv: Argv) -> None:
    """Compute one vector per text or image, for search, clustering or a classifier on top.

    The output file contains the array vectors, of shape [N, width] in float32, and names: the paths
    of images, or the texts.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options:
        inputs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT...")]
        """For texts: .txt files with one text per line, tables (.csv, .tsv, .jsonl, .ndjson, .json
        or .parquet), and texts in quotes. For images: files, and folders, whose images are found at
        any depth and skipped if they cannot be read."""
        model: Annotated[str, tyro.conf.arg(metavar="MODEL")]
        """Run folder, its best.safetensors, zoo/NAME (see `onescan zoo`), or a folder or hub name
        of a language model."""
        out: Annotated[Path, tyro.conf.arg(metavar="FILE.npz")]
        """Output file."""
        pooling: Literal["mean", "last"] = "mean"
        """Vector of a text: the mean of its tokens, or the last token, for causal models."""
        normalize: bool = False
        """Scale each vector to length 1, so that dot products are cosine similarities."""
        text_column: str | None = None
        """Column of the texts in tables; by default that of the training data, or text."""
        batch_size: int = 64
        """Texts or images per batch; affects memory, and results only by rounding."""
        device: Device = "auto"
        imports: Imports = ()

    options = parse(Options, embed, argv)
    if not options.inputs:
        raise ValueError("inputs is empty, expected at least one text, table, image or folder")
    if options.out.suffix != ".npz":
        raise ValueError(f"out is '{options.out}', expected a name ending in .npz")
    if options.batch_size < 1:
        raise ValueError(f"batch_size is {options.batch_size}, expected at least 1")
    import numpy as np
    import torch

    from onescan.checkpoint.files import write_atomically
    from onescan.experiments.training.distributed import Ranks, choose_device
    from onescan.inference.embedding import embed_images, embed_texts, encode_texts
    from onescan.inputs import ImageFormat

    import_files(options.imports)
    device = choose_device(options.device, Ranks())
    checkpoint, model, encoder = _load(options.model)
    model.to(device)
    unreadable: list[str] = []
    if checkpoint is not None and isinstance(checkpoint.format, ImageFormat):
        names, parts = [], []
        images = _images(checkpoint.format, options.inputs, unreadable)
        while group := list(islice(images, options.batch_size)):
            names += [name for name, _ in group]
            batch = torch.stack([image for _, image in group])
            parts.append(embed_images(model, batch, normalize=options.normalize))
        vectors: Any = torch.cat(parts).float().numpy() if parts else None
        what = "image"
    else:
        what, names = "text", _texts(checkpoint, options.inputs, options.text_column, unreadable)
        vectors = None
        if names:
            encoded = encode_texts(model, encoder, names)
            if encoded.truncated:
                print(
                    f"truncated: {plural(encoded.truncated, 'text')} longer than the model's input",
                    file=sys.stderr,
                )
            vectors = embed_texts(
                model,
                encoded,
                pooling=options.pooling,
                normalize=options.normalize,
                batch_size=options.batch_size,
            )
            vectors = vectors.float().numpy()
    print_skipped(unreadable)
    if vectors is None:
        reason = f": {unreadable[0]}" if unreadable else ""
        raise ValueError(f"there is no readable {what} in {', '.join(options.inputs)}{reason}")

    def write(partial: Path) -> None:
        with partial.open("wb") as file:
            np.savez(file, vectors=vectors, names=np.array(names))

    write_atomically(options.out, write)
    echo(f"{options.out}: {plural(len(vectors), 'vector')} of {vectors.shape[1]} numbers")


def _load(name: str) -> "tuple[Checkpoint | None, Any, Any]":
    """Return a run, if the name is one, its model, and the encoder of its texts, if any."""
    from onescan.inference.loading import downloaded, is_pretrained, load, load_language_model
    from onescan.inputs import ImageFormat, PairFormat, TextFormat

    name = downloaded(name)
    if is_pretrained(name):
        return None, *load_language_model(name)
    checkpoint = load(name)
    format = checkpoint.format
    if isinstance(format, PairFormat | TextFormat):
        return checkpoint, checkpoint.model, format.open(checkpoint.folder)
    if not isinstance(format, ImageFormat):
        raise ValueError(
            f"{checkpoint.folder} was trained on {type(format).__name__}, expected a model of "
            "texts or images"
        )
    return checkpoint, checkpoint.model, None


def _texts(
    checkpoint: "Checkpoint | None",
    arguments: Sequence[str],
    column: str | None,
    unreadable: list[str],
) -> list[str]:
    """Return the texts of all inputs; lines of text files without empty ones."""
    texts: list[str] = []
    for argument in arguments:
        path = Path(argument)
        if path.is_dir():
            raise ValueError(f"{argument} is a folder, but the model reads texts")
        if path.suffix == LINES and len(argument.split()) == 1:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
            texts += [line for line in lines if line.strip()]
        else:
            texts += read_texts(checkpoint, [argument], unreadable, column)
    return texts


def _images(
    format: Any, paths: Sequence[str], unreadable: list[str]
) -> "Iterator[tuple[str, Tensor]]":
    """Yield the path and the model's input of each image; skip unreadable ones in folders."""
    from onescan.inputs import read_image

    for file, is_in_folder in images_at([Path(path) for path in paths]):
        try:
            image = read_image(file, format)
        except (OSError, ValueError) as error:
            if not is_in_folder or str(file) not in str(error):
                raise
            unreadable.append(str(error))
            continue
        yield str(file), image
