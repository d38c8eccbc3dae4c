"""The command that computes vectors of texts and images: embed."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from onescan.cli.options import (
    Argv,
    Compute,
    Device,
    Imports,
    echo,
    import_files,
    parse,
)
from onescan.cli.readers import (
    GivenText,
    check_no_column,
    data_setting,
    nothing_readable,
    read_batches,
    read_texts,
    report_skipped,
)
from onescan.messages import plural

if TYPE_CHECKING:
    from torch import Tensor

    from onescan.inference.embedding import Source
    from onescan.inputs.pairs import PairEncoder

VECTOR_FILE = ".npz"
Settings = dict[str, Any]  # pooling and normalize


def embed(argv: Argv) -> None:
    """Compute one vector per text or image, for search or clustering."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        inputs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE...")]
        """For language models and text classifiers: .txt files with one text per line, tables
        (.csv, .tsv, .jsonl, .ndjson, .json or .parquet), and texts in quotes. Empty lines and
        unreadable rows are skipped. For image classifiers: images of any size, and folders, in
        which images are found at any depth and skipped if they cannot be read. For classifiers of
        arrays: .npz files with an array x, and .npy files."""
        model: Annotated[str, tyro.conf.arg(metavar="RUN")]
        """Run folder, its best.safetensors, zoo/NAME (see `onescan zoo`), a hub name, or a folder
        of an onescan language model in transformers' format, such as `onescan convert` writes."""
        out: Annotated[str, tyro.conf.arg(metavar="FILE.npz")]
        """File to write. It contains two arrays: vectors, of shape [N, width] in float32, and
        names: the path of each image, the file and row of each array, or the file and line of each
        text."""
        pooling: str | None = None
        """mean: mean over all tokens of a text, special tokens included, or all patches of an
        image. head: what the head of a classifier reads. last: last token of a text. class_token:
        class token of an image, or first token of a text, such as [CLS]. By default mean for texts
        and head for images."""
        normalize: bool = False
        """Divide each vector by its length, so that dot products are cosine similarities."""
        batch_size: int = 64
        """Texts or images per batch; affects memory, and results only by rounding."""
        text_column: str | None = None
        """Column of tables that contains the texts; by default that of the training data, or text.
        Only for text models."""
        device: Device = "auto"
        compute: Compute
        imports: Imports = ()

    options = parse(Options, embed, argv)
    out = Path(options.out)
    if not options.inputs:
        raise ValueError("inputs is empty, expected at least one text, file or folder")
    if out.suffix != VECTOR_FILE:
        raise ValueError(f"out is {options.out!r}, expected a name ending in {VECTOR_FILE}")
    if any(out.absolute() == Path(path).absolute() for path in options.inputs):
        raise ValueError(f"out is {options.out!r}, which is also an input; choose another name")
    from onescan.checkpoint.files import check_writable, write_atomically

    check_writable("out", out)
    import numpy as np
    import torch

    from onescan.checks import check_whole
    from onescan.experiments.training.distributed import Ranks, choose_device
    from onescan.inference.embedding import choose_pooling, model_of, text_encoder

    check_whole(1, batch_size=options.batch_size)
    import_files(options.imports)
    device = choose_device(options.device, Ranks())
    source = _load(options.model)
    model, encoder = model_of(source).to(device), text_encoder(source)
    pooling = choose_pooling(model, encoder, options.pooling)
    settings: Settings = {"pooling": pooling, "normalize": options.normalize}
    unreadable: list[str] = []
    with options.compute.applied():
        if encoder is None:
            check_no_column(options.text_column)
            inputs = (options.inputs, unreadable, options.batch_size)
            names, vectors = _grid_vectors(source, *inputs, settings)
        else:
            column = options.text_column or _text_column(source)
            texts = read_texts(options.inputs, column, unreadable)
            settings["batch_size"] = options.batch_size
            names, vectors = _text_vectors(model, texts, encoder, settings)
    report_skipped(unreadable)
    if not names:
        what = "image" if encoder is None else "text"
        raise nothing_readable(what, options.inputs, unreadable)
    arrays: Any = {"vectors": torch.cat(vectors).float().numpy(), "names": np.array(names)}

    def write(partial: Path) -> None:
        with partial.open("wb") as file:  # np.savez would add a suffix to a name
            np.savez(file, **arrays)

    write_atomically(out, write)
    echo(f"{out}: {plural(len(names), 'vector')} of width {arrays['vectors'].shape[1]}")


def _load(name: str) -> "Source":
    """Load a run, or a language model in transformers' format with its tokenizer."""
    from onescan.inference import loading

    name = loading.downloaded(name)
    if loading.is_pretrained(name):
        return loading.load_language_model(name)
    return loading.load(name)


def _text_column(source: "Source") -> str:
    """Return the column of the texts in the training data; "text" if it is not known."""
    return (
        "text" if isinstance(source, tuple) else data_setting(source, "text_column", default="text")
    )


def _text_vectors(
    model: Any, texts: Sequence[GivenText], encoder: "PairEncoder", settings: Settings
) -> "tuple[list[str], list[Tensor]]":
    """Return the names and the vectors of texts; print how many of them are truncated."""
    from onescan.inference.embedding import embed_sequences

    if not texts:
        return [], []
    sequences, is_truncated = encoder.encode_texts([each.text for each in texts])
    if count := sum(is_truncated):
        verb = "is" if count == 1 else "are"
        print(
            f"note: {count:,} of {plural(len(texts), 'text')} {verb} longer than the "
            f"{encoder.length} tokens that the model reads and {verb} truncated",
            file=sys.stderr,
        )
    return [each.name for each in texts], [embed_sequences(model, sequences, **settings)]


def _grid_vectors(
    source: Any,
    paths: Sequence[str],
    unreadable: list[str],
    batch_size: int,
    settings: Settings,
) -> "tuple[list[str], list[Tensor]]":
    """Return the names and the vectors of images or arrays.

    Unreadable images in folders are skipped, and messages about them are added to `unreadable`.
    """
    from onescan.inference.embedding import embed_grids

    names: list[str] = []
    vectors: list[Tensor] = []
    for batch, values, keep in read_batches(source, paths, unreadable, batch_size=batch_size):
        names += batch
        vectors.append(embed_grids(source.model, values, keep, **settings).cpu())
    return names, vectors
