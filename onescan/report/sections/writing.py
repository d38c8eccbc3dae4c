"""What a language model writes: texts that go on from held-out ones, and masks filled in."""

from collections.abc import Iterator
from html import escape

import torch

from onescan.data import DataSet
from onescan.models.causal_lm import IGNORE_INDEX, CausalLM, Sampling
from onescan.models.masked_lm import MaskedLM
from onescan.report.runs import RunGroup
from onescan.report.section import Figure, Section
from onescan.tasks import Batch, LanguageModelling, MaskedLanguageModelling
from onescan.tasks.writing import generate_text

TITLE = "What it writes"
TEXTS, OPENING, WRITTEN = 3, 64, 200  # texts, tokens of what they begin with, tokens written
SAMPLING = Sampling(temperature=0.8, top_p=0.95)


@torch.no_grad()
def section(study: RunGroup) -> Section:
    """A few texts of the first run's model, as chance has them."""
    task, model = study.task, study.model
    if isinstance(task, LanguageModelling) and isinstance(model, CausalLM):
        return Section(TITLE, _continued(task, model), f"Seed {study.runs[0].seed}'s model.")
    if isinstance(task, MaskedLanguageModelling) and isinstance(model, MaskedLM):
        return Section(TITLE, _filled(task, model), f"Seed {study.runs[0].seed}'s model.")
    return Section(TITLE, lead="Not shown: this model writes nothing.")


def _continued(task: LanguageModelling, model: CausalLM) -> tuple[Figure, ...]:
    figures = []
    for place, (tokens, _) in _rows(task.test):
        opening = task.tokenizer.decode(tokens[0, :OPENING].tolist())
        generator = torch.Generator().manual_seed(place)
        pieces = generate_text(
            model, task.tokenizer, opening, SAMPLING, max_new_tokens=WRITTEN, generator=generator
        )
        shown = f"<b>{escape(opening)}</b>{escape(''.join(pieces))}"
        caption = (
            "Bold: a piece of the held-out text. Then what the model writes, drawn at temperature "
            f"{SAMPLING.temperature:g} from the likeliest {SAMPLING.top_p:.0%}."
        )
        figures.append(Figure(f"From row {place}", _text(shown), caption))
    return tuple(figures)


def _filled(task: MaskedLanguageModelling, model: MaskedLM) -> tuple[Figure, ...]:
    figures = []
    for place, batch in _rows(task.test):
        shown, documents, labels = task.augment(batch, seed=0)
        best = model(shown, documents=documents)[0].argmax(-1)
        parts = []
        for token, label, guess in zip(
            shown[0].tolist(), labels[0].tolist(), best.tolist(), strict=True
        ):
            told = label != IGNORE_INDEX
            text = escape(task.tokenizer.decode([guess if told else token]))
            tag = "b" if guess == label else "s"
            parts.append(f"<{tag}>{text}</{tag}>" if told else text)
        caption = "What was masked is filled in: bold where it is right, struck where it is not."
        figures.append(Figure(f"Row {place}", _text("".join(parts)), caption))
    return tuple(figures)


def _rows(test: DataSet) -> Iterator[tuple[int, Batch]]:
    """A few rows, evenly spread, and their places."""
    places = {i * len(test) // TEXTS for i in range(TEXTS)}
    for place, (example, _) in enumerate(test.examples(seed=None)):
        if place in places:
            yield place, test.read([example]).batch


def _text(html: str) -> str:
    return f'<pre style="white-space:pre-wrap;overflow-wrap:anywhere">{html}</pre>'
