"""A trained language model and its tokenizer, from wherever they were saved."""

import json
import re
from pathlib import Path

from onescan.checkpoint.run_folder import CONFIG
from onescan.data.sources import HUB_NAME
from onescan.data.text import TextFormat, Tokenizer, load_tokenizer
from onescan.models.causal_lm import CausalLM
from onescan.models.masked_lm import MaskedLM
from onescan.training.checkpoint import load


def load_language_model(name: str) -> tuple[CausalLM | MaskedLM, Tokenizer]:
    """Load both, in evaluation mode on the CPU; nobody's code is run.

    Args:
        name: a run's folder, or best.safetensors in it; or a folder that transformers'
            `save_pretrained` wrote, of model and tokenizer, or a name on the Hugging Face hub.

    Raises:
        ValueError: there is no such model, or one of another kind, or no tokenizer.
        FileNotFoundError: there is no such path, or the run has not saved any weights.
        ImportError: transformers is needed and not installed.
    """
    model, tokenizer = _of_transformers(name) if is_elsewhere(name) else _of_run(name)
    tokenizer.check_vocabulary(model.config.vocab_size)
    return model, tokenizer


def _of_run(name: str) -> tuple[CausalLM | MaskedLM, Tokenizer]:
    run = load(name)
    if not isinstance(run.model, CausalLM | MaskedLM):
        kind = type(run.model).__name__
        raise ValueError(f"{name!r} holds a model of class {kind}, expected CausalLM or MaskedLM")
    if not isinstance(run.format, TextFormat):
        raise ValueError(f"{name!r} was trained on {type(run.format).__name__}, not on text")
    return run.model, run.format.open(run.folder)


def _of_transformers(name: str) -> tuple[CausalLM | MaskedLM, Tokenizer]:
    tokenizer = load_tokenizer(name)
    from onescan.integrations.transformers import load_pretrained  # slow

    return load_pretrained(name), tokenizer


def is_elsewhere(name: str) -> bool:
    """Whether it is for transformers to find: a folder with a config of its own, or a hub name."""
    path = Path(name)
    if path.exists():
        return path.is_dir() and (path / CONFIG).is_file() and not is_run(path)
    return re.fullmatch(HUB_NAME, name) is not None


def is_run(path: Path) -> bool:
    """Whether it is the folder of a run, or something in one."""
    folder = path if path.is_dir() else path.parent
    try:
        return "onescan" in json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError, TypeError, RecursionError):
        return False
