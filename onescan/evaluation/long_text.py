"""A trained language model, and a text in one piece to judge it on."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from onescan.data.text import PackedText, TextDatasetConfig, TextFormat, TextSplits, Tokenizer
from onescan.data.text.corpus import Corpus, CorpusReader
from onescan.data.text.packing import padding_id
from onescan.data.text.source import Query, find_source
from onescan.evaluation.held_out import held_out_tokens
from onescan.evaluation.names import short_name
from onescan.models.causal_lm import CausalLM
from onescan.models.masked_lm import MaskedLM
from onescan.shapes import Tokens
from onescan.tasks import Batch
from onescan.tasks.masked_language_modelling import MaskedLanguageModellingConfig
from onescan.training.config import Precision, RunConfig
from onescan.training.folder import read_manifest
from onescan.training.loading import is_run, load_language_model

HELD_OUT = "the run's held-out text"


@dataclass(frozen=True, kw_only=True)
class LongText:
    """A model, and documents laid end to end, each with the tokenizer's end behind it.

    Attributes:
        name: of the model.
        model: in evaluation mode on the CPU.
        tokenizer: the one that it was trained with.
        ids: of all documents.
        text: where they are from.
        trained_length: tokens of a row in training, where that is known.
        precision: of the matrix products in training.
        masks: how masks are drawn.
    """

    name: str
    model: CausalLM | MaskedLM
    tokenizer: Tokenizer
    ids: Tokens
    text: str
    trained_length: int | None
    precision: Precision
    masks: MaskedLanguageModellingConfig

    def masked(self) -> tuple[Tokens, Tokens]:
        """Mask the text as in evaluation; for masked language models.

        Returns:
            Masked tokens, and labels.

        Raises:
            ValueError: If the tokenizer has no mask token.
        """
        ids = self.ids[0].numpy().astype(self.tokenizer.dtype)
        corpus = Corpus(tokens=ids, ends=np.array([len(ids)]))
        rows = PackedText(corpus=corpus, length=1, padding=padding_id(self.tokenizer))
        format = TextFormat.of(self.tokenizer)
        splits = TextSplits(train=rows, test=rows, tokenizer=self.tokenizer, format=format)
        batch: Batch = (self.ids, torch.zeros_like(self.ids))
        shown, _, labels = self.masks.build(splits).masked_for_evaluation(batch)
        return shown, labels


def open_long_text(checkpoint: str, text: str | None, most: int | None = None) -> LongText:
    """Load a model, and a text to judge it on.

    Args:
        checkpoint: what `load_language_model` takes.
        text: a file or a folder, or a name on the hub; None is the held-out text of a run.
        most: tokens of it to take, the first ones; None is all.

    Raises:
        ValueError: there is no such model or no such text, or it cannot be read.
    """
    model, tokenizer = load_language_model(checkpoint)
    run = _run_of(checkpoint)
    data = run.data if run and isinstance(run.data, TextDatasetConfig) else None
    ids = _held_out(checkpoint, data) if text is None else _read(text, data, tokenizer, most)
    task = run.task if run else None
    return LongText(
        name=short_name(checkpoint),
        model=model,
        tokenizer=tokenizer,
        ids=torch.from_numpy(ids[:most].astype(np.int64)).unsqueeze(0),
        text=HELD_OUT if text is None else text,
        trained_length=data.length if data else None,
        precision=run.training.precision if run else "float32",
        masks=task
        if isinstance(task, MaskedLanguageModellingConfig)
        else MaskedLanguageModellingConfig(),
    )


def _run_of(checkpoint: str) -> RunConfig | None:
    """The run that trained a model; None where the folder is another library's."""
    path = Path(checkpoint)
    return read_manifest(path if path.is_dir() else path.parent).run if is_run(path) else None


def _held_out(checkpoint: str, data: TextDatasetConfig | None) -> np.ndarray:
    if data is None:
        raise ValueError(f"{checkpoint!r} tells no held-out text, expected text to be given")
    return np.asarray(held_out_tokens(checkpoint, data))


def _read(
    text: str, data: TextDatasetConfig | None, tokenizer: Tokenizer, most: int | None
) -> np.ndarray:
    """Tokenize a text in the way of the run's, its held-out part where there is one."""
    query = data.query() if data else Query()
    source = find_source(text, query, field="text")
    split = source.held_out("train") or next(iter(source.splits))
    frame = tokenizer.frame if data and data.add_special_tokens else None
    reader = CorpusReader(tokenizer=tokenizer, on_error="raise", cache=False, frame=frame)
    ids = reader.read(source.open(split), text, split, max_tokens=most).tokens
    if not len(ids):
        raise ValueError(f"text is {text!r}, where {split} holds no text")
    return np.asarray(ids)
