"""Commands of language models: generate, fill, tokenizer."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from onescan.cli.options import (
    Argv,
    Compute,
    Device,
    Imports,
    LanguageModel,
    echo,
    import_files,
    load_language_model,
    parse,
)
from onescan.messages import printable

SEED_LIMIT = 2**63  # of torch's generators


def generate(argv: Argv) -> None:
    """Generate text with a causal language model."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        checkpoint: LanguageModel
        prompt: str = ""
        """Text to continue; - reads standard input."""
        max_new_tokens: int = 200
        """Maximum number of tokens to generate."""
        temperature: float = 0.8
        """Divides the logits. 1.0 samples from the model's distribution; lower is more
        conservative, 0 always takes the most likely token."""
        top_k: int | None = None
        """Sample only from the k most likely tokens."""
        top_p: float = 0.95
        """Sample only from the smallest set of most likely tokens whose probabilities sum to at
        least this (nucleus sampling)."""
        seed: int = 0
        """Random seed."""
        device: Device = "auto"
        compute: Compute
        imports: Imports = ()

    options = parse(Options, generate, argv)
    if options.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {options.max_new_tokens}, expected at least 1")
    if not 0 <= options.seed < SEED_LIMIT:
        raise ValueError(f"seed is {options.seed}, expected 0 or more, below 2**63")
    from onescan.models.causal_lm import Sampling

    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    sampling.check()
    import_files(options.imports)
    model, tokenizer, device = load_language_model(options.checkpoint, "CausalLM", options.device)
    import torch

    from onescan.inference.text_generation import generate_text

    prompt = _read_input() if options.prompt == "-" else options.prompt
    pieces = generate_text(
        model,
        tokenizer,
        prompt,
        sampling,
        max_new_tokens=options.max_new_tokens,
        generator=torch.Generator(device).manual_seed(options.seed),
    )
    with options.compute.applied():
        echo(prompt + next(pieces, ""), end="", flush=True)
        for piece in pieces:
            echo(piece, end="", flush=True)
    echo()


def _read_input() -> str:
    """Read a prompt from standard input, without a byte order mark."""
    if sys.stdin is None:
        raise ValueError("prompt is '-', but standard input is closed")
    try:
        prompt = sys.stdin.read().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"prompt on standard input is not valid {sys.stdin.encoding} at byte {error.start}; "
            "set PYTHONIOENCODING to the encoding of the input"
        ) from error
    if "\0" in prompt:  # such as in UTF-16 without a byte order mark
        raise ValueError(
            f"prompt on standard input contains NUL characters if read as "
            f"{sys.stdin.encoding}; set PYTHONIOENCODING to the encoding of the input"
        )
    return prompt


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
        compute: Compute
        imports: Imports = ()

    options = parse(Options, fill, argv)
    import_files(options.imports)
    model, tokenizer, _ = load_language_model(options.checkpoint, "MaskedLM", options.device)
    from onescan.inference.text_generation import fill_masks

    with options.compute.applied():
        masks = fill_masks(model, tokenizer, options.text, top_k=options.top_k)
    for guesses in masks:
        echo(", ".join(f"{_quoted(guess.text)} {guess.probability:.1%}" for guess in guesses))


def _quoted(text: str) -> str:
    """Quote a token of punctuation. Tokens of white space are already quoted.

    >>> _quoted("cat"), _quoted(","), _quoted(repr(" "))
    ('cat', "','", "' '")
    """
    is_plain = any(map(str.isalnum, text)) or text[1:-1].isspace()
    return printable(text if is_plain else repr(text))


def tokenizer(argv: Argv) -> None:
    """Train a byte-level BPE tokenizer and measure its compression."""

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
        sample_by: Literal["file", "line", "paragraph"] = "file"
        """What counts as one document of plain text. Lines do not include their line breaks."""
        name: str | None = None
        """Configuration of a hub dataset."""
        split: str = "train"
        """Split to train on."""

    options = parse(Options, tokenizer, argv)
    from onescan.experiments.data.text.bpe import check_empty, train_bpe
    from onescan.experiments.data.text.source import Query, find_source, read_texts

    check_empty(options.out)
    query = Query(column=options.text_column, sample_by=options.sample_by, name=options.name)
    source = find_source(options.path, query, field="path")
    for note in source.notes:
        echo(note)
    trained = train_bpe(read_texts(source, options.split), options.vocab_size)
    trained.tokenizer.save(options.out)
    where = "held-out text" if trained.is_held_out else "the training text"
    echo(
        f"{options.out}: {trained.tokenizer.size} tokens, "
        f"{trained.bytes_per_token:.2f} bytes per token of {where}"
    )
