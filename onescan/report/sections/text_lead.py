"""A language model, or a classifier of sequences, in a few sentences."""

from onescan.models.causal_lm import CausalLM
from onescan.models.masked_lm import MaskedLM
from onescan.models.sequence_classifier import SequenceClassifier
from onescan.report.runs import RunGroup
from onescan.report.words import plural

KINDS = {
    CausalLM: "language model tells the next token of a text. It",
    MaskedLM: "language model tells what stands where a text is masked. It",
    SequenceClassifier: "classifier of sequences",
}


def lead(study: RunGroup) -> str:
    """Say what was trained on what, for a reader who has never heard of it."""
    task, model = study.task, study.model
    data = (
        f"learnt from {len(task.train):,} {task.unit} and is judged on {len(task.test):,} held-out "
        f"{task.unit} that it never saw while learning."
    )
    if not isinstance(model, CausalLM | MaskedLM | SequenceClassifier):
        return f"This model {data}"
    config = model.config
    mixer = type(config.mixer).__name__.removesuffix("MixerConfig")
    return (
        f"This {KINDS[type(model)]} {data} It knows {config.vocab_size:,} tokens, which "
        f"exchange what they know in {plural(config.depth, 'block')} with {mixer} mixers of "
        f"{plural(config.mixer.num_heads, 'head')}, {config.width} numbers to a token."
    )
