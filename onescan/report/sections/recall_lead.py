"""A model that recalls, in a few sentences."""

from onescan.models.causal_lm import CausalLM
from onescan.report.runs import RunGroup
from onescan.report.words import plural


def lead(study: RunGroup) -> str:
    """Say what was trained on what, for a reader who has never heard of it."""
    task, model = study.task, study.model
    told = (
        "This model reads pairs of a key and a value and then some of the keys again, and tells "
        f"the value of each. It learnt from {len(task.train):,} {task.unit} and is judged on "
        f"{len(task.test):,} others."
    )
    if not isinstance(model, CausalLM):
        return told
    config = model.config
    mixer = type(config.mixer).__name__.removesuffix("MixerConfig")
    return (
        f"{told} What its tokens know is exchanged in {plural(config.depth, 'block')} with {mixer} "
        f"mixers of {plural(config.mixer.num_heads, 'head')}, {config.width} numbers to a token."
    )
