"""The model card (README.md) in folders for transformers and diffusers."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onescan.checkpoint.files import write_text_atomically
from onescan.configs import ModelConfig

README = "README.md"
SUMMARIZED = ("width", "depth", "mixer", "mlp", "position", "vocab_size", "image_size")
CARD = """---
{metadata}
---

# {title}

{summary}

```python
{usage}
```

| | |
|---|---|
{rows}
"""


def write_model_card(
    folder: Any,
    config: ModelConfig,
    *,
    title: str,
    usage: str,
    parameters: int,
    metadata: Mapping[str, str | None],
) -> None:
    """Write the model card of a saved model, unless the folder has a README.md.

    The card only contains what is known from the config and the weights. License, data and results
    are left to the author.

    Args:
        folder: Folder of the model.
        config: Config of the native model.
        title: Name of the class.
        usage: Code that loads the model.
        parameters: Number of parameters.
        metadata: Fields for the Hugging Face Hub, without those that are ``None``.
    """
    path = Path(folder) / README
    if path.exists():
        return
    fields = {name: value for name, value in metadata.items() if value is not None}
    rows = {"parameters": f"{parameters:,}"} | {
        name.replace("_", " "): _summary(getattr(config, name))
        for name in SUMMARIZED
        if hasattr(config, name)
    }
    text = CARD.format(
        metadata="\n".join([*(f"{k}: {v}" for k, v in fields.items()), "tags:", "- onescan"]),
        title=title,
        summary=f"An onescan model in {fields['library_name']} format. Loading it requires the "
        "package `onescan`.",
        usage=usage,
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
    )
    write_text_atomically(path, text)


def _summary(value: Any) -> str:
    """Return a config field as text; for a nested config, the name of its class."""
    if dataclasses.is_dataclass(value):
        return type(value).__name__.removesuffix("Config")
    if isinstance(value, tuple):
        return " x ".join(map(str, value))
    return "none" if value is None else str(value)
