"""Turn a finished run into weights of the package: python benchmarks/add_to_zoo.py RUN NAME.

Writes onescan/zoo/NAME with the run's last weights in float16, its config without paths of this
machine, a model card, and the SHA-256 of each file. The metrics on the card are measured with the
float16 weights. NAME selects the texts of the card in MODELS.
"""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onescan import configs, zoo
from onescan.checkpoint.files import digests, to_json
from onescan.checkpoint.run_folder import write_config
from onescan.checkpoint.weights import WEIGHTS, load_model, read_weights, save_weights
from onescan.experiments.recipes import find_recipe
from onescan.experiments.training.evaluation import evaluate
from onescan.experiments.training.folder import Manifest, read_manifest

MAX_BYTES = 12_000_000  # of all models together


class Text(NamedTuple):
    """What the model card says besides measured values."""

    recipe: str
    summary: str
    data: str
    limits: str


DIGITS_DATA = (
    "scikit-learn's `load_digits`: 1,797 images of 8 x 8 pixels, the test set of UCI's Optical "
    "Recognition of Handwritten Digits (E. Alpaydin and C. Kaynak, 1998; CC BY 4.0; "
    "https://doi.org/10.24432/C50P49). A fifth of them is held out for testing"
)
MODELS = {
    "digits_lightnet": Text(
        recipe="digits",
        summary="LightNet that classifies handwritten digits of 8 x 8 pixels.",
        data=DIGITS_DATA,
        limits="The images are tiny, centered and grayscale, with bright strokes on black. Other "
        "images are resized to 8 x 8 pixels; the accuracy on them has not been measured.",
    ),
    "moving_digits_lightnet": Text(
        recipe="moving_digits",
        summary="LightNet that classifies the digit and the direction of motion in short videos.",
        data=f"Videos of 8 x 16 x 16 pixels, made from {DIGITS_DATA}",
        limits="The videos are synthetic: one digit moves in one of four directions.",
    ),
    "digits_denoiser": Text(
        recipe="digits_denoiser",
        summary="LightNet that generates handwritten digits of a requested class, 8 x 8 pixels.",
        data=DIGITS_DATA,
        limits="It was trained only on images of 8 x 8 pixels. It generates single grayscale "
        "digits.",
    ),
    "shakespeare_lightnet": Text(
        recipe="shakespeare_lightnet",
        summary="LightNet language model that generates Shakespeare byte by byte.",
        data="Tiny Shakespeare: 1.1 million characters of Shakespeare's plays (public domain), "
        "collected by A. Karpathy for char-rnn",
        limits="It imitates the style of Shakespeare's plays. What it writes has no plot and "
        "states no facts. It was trained on no other text.",
    ),
    "cifar10_lightnet": Text(
        recipe="cifar10_lightnet",
        summary="LightNet that classifies photos of 32 x 32 pixels into 10 classes.",
        data="CIFAR-10 (A. Krizhevsky, 2009): 50,000 training and 10,000 test images, labeled from "
        "the 80 Million Tiny Images. No license is stated for it",
        limits="It distinguishes only these 10 classes, and assigns any other image to one of "
        "them. Images are resized to 32 x 32 pixels. It has the biases of its training images.",
    ),
}


def add_to_zoo(run: Path, name: str, out: Path) -> zoo.Card:
    """Write the folder of a model; return its card.

    Args:
        run: Folder of a finished run.
        name: Name in MODELS.
        out: Folder to write; must not exist yet.

    Raises:
        ValueError: If the run is of another recipe, or a weight does not fit into float16.
        FileExistsError: If the folder exists.
    """
    text, manifest = MODELS[name], read_manifest(run)
    if manifest.run.name != text.recipe:
        raise ValueError(f"{run} is a run of {manifest.run.name!r}, expected {text.recipe!r}")
    out.mkdir(parents=True)
    weights, notes = read_weights(run / WEIGHTS)
    half = {key: _half(key, weight) for key, weight in weights.items()}
    save_weights(out / WEIGHTS, half, {})
    model, _ = load_model(out / WEIGHTS, manifest.run.model)
    metrics = evaluate(model, manifest.run.build_task()).metrics
    save_weights(out / WEIGHTS, half, {**notes, "metrics": metrics})
    manifest.format.save(out)
    recipe = find_recipe(text.recipe)()
    write_config(out, configs.to_dict(_without_paths(manifest, recipe)))
    parameters = sum(weight.numel() for weight in model.parameters())
    (out / zoo.README).write_text(
        _readme(name, text, manifest, recipe, metrics, parameters), encoding="utf-8"
    )
    card = {
        "summary": text.summary,
        "parameters": parameters,
        "metrics": metrics,
        "files": digests(out),
    }
    (out / zoo.CARD).write_text(to_json(card, indent=zoo.INDENT), encoding="utf-8")
    zoo.check(out)
    return zoo.read_card(out)


def _half(name: str, weight: torch.Tensor) -> torch.Tensor:
    half = weight.half() if weight.dtype == torch.float32 else weight
    if not half.isfinite().all():
        raise ValueError(f"{name} does not fit into float16: {weight.abs().max():.4g}")
    return half


def _without_paths(manifest: Manifest, recipe: Any) -> Manifest:
    """Remove what belongs to the machine of the run: environments, machine settings, paths."""
    run = dataclasses.replace(manifest.run, machine=recipe.machine)
    path = getattr(run.data, "path", None)
    if path is not None:
        relative_path = recipe.data.path or Path(path).name
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, path=relative_path))
    return dataclasses.replace(manifest, run=run, environments=())


def _command(manifest: Manifest, recipe: Any) -> str:
    """Return the command of the run, with PATH for the place of its data."""
    flags = ""
    for field, value, _ in configs.differences(manifest.run, recipe):
        if field.startswith("machine."):
            continue
        shown_value = "PATH" if field == "data.path" else value
        flags += f" \\\n  --{field.replace('_', '-')} {shown_value}"
    return f"onescan train {recipe.name}{flags}"


def _readme(
    name: str,
    text: Text,
    manifest: Manifest,
    recipe: Any,
    metrics: Mapping[str, float],
    parameters: int,
) -> str:
    environment = manifest.environments[-1]
    rows = "\n".join(f"| {key.replace('_', ' ')} | {value:.4g} |" for key, value in metrics.items())
    return f"""# {zoo.PREFIX}/{name}

{text.summary}

```python
import onescan

model = onescan.load("{zoo.PREFIX}/{name}").model
```

| test data | |
|---|---|
{rows}

These values were measured in float32 with the weights of this folder, which are stored in float16.

- **Parameters**: {parameters:,}
- **Data**: {text.data}.
- **Training**: seed {manifest.run.training.seed}, onescan {environment.onescan}, \
PyTorch {environment.torch}, {environment.device}. These are the weights of the last step.
- **License of the weights**: Apache-2.0, like that of the package.
- **Limits**: {text.limits}

```bash
{_command(manifest, recipe)}
```
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("name", choices=MODELS)
    arguments = parser.parse_args()
    card = add_to_zoo(arguments.run, arguments.name, zoo.FOLDER / arguments.name)
    total = sum(path.stat().st_size for path in zoo.FOLDER.rglob("*") if path.is_file())
    print(f"{card.name}: {card.parameters:,} parameters, {dict(card.metrics)}")
    print(f"all models together: {total:,} bytes")
    if total > MAX_BYTES:
        raise SystemExit(f"expected at most {MAX_BYTES:,} bytes")


if __name__ == "__main__":
    main()
