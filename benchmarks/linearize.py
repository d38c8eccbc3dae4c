"""How much of its accuracy does an encoder keep when its attention is made linear?

python benchmarks/linearize.py --models FOLDER_0 FOLDER_1 --data PATH

MODELS are folders of transformers that differ in their random seed only, such as those which
`onescan convert --to transformers` writes. Each is linearized with each kind of attention by
`onescan linearize`, with the given settings, and evaluated on the held-out data before and after.
Finished results in the output folder are kept.
"""

import json
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from results import aligned

from onescan.experiments.linearize_config import LinearizeConfig
from onescan.experiments.training.linearize_folder import RESULTS, linearize_folder

WITH_SOFTMAX = "+softmax"  # after a kind: every second layer keeps softmax attention


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the benchmark."""

    models: tuple[str, ...]
    """Folders of the models."""
    data: str
    """Data, as for `onescan linearize`."""
    kinds: tuple[str, ...] = ("lightnet", "lion", f"lightnet{WITH_SOFTMAX}")
    """Kinds of attention; with +softmax, every second layer keeps softmax attention."""
    settings: LinearizeConfig = field(default_factory=LinearizeConfig)
    """Settings of `onescan linearize`, except for the kind."""
    out: Path = Path("bench/linearize")
    """Folder of the linear models."""


def main(options: Options) -> None:
    torch.set_num_threads(1)
    results_by_kind: dict[str, list[dict[str, Any]]] = {}
    for kind in options.kinds:
        for seed, model in enumerate(options.models):
            out = options.out / f"{kind}-{seed}"
            if not out.exists():
                config = replace(
                    options.settings,
                    kind=kind.removesuffix(WITH_SOFTMAX),
                    softmax_every=2 if kind.endswith(WITH_SOFTMAX) else None,
                    seed=seed,
                )
                linearize_folder(model, options.data, out, config, device=torch.device("cpu"))
            text = (out / RESULTS).read_text(encoding="utf-8")
            results_by_kind.setdefault(kind, []).append(json.loads(text))
    metrics = list(results_by_kind[options.kinds[0]][0]["original"])
    softmax_results = [result["original"] for result in results_by_kind[options.kinds[0]]]
    rows = [["attention", *metrics, "transfer loss"]]
    rows.append(
        ["softmax", *(spread([result[name] for result in softmax_results]) for name in metrics), ""]
    )
    for kind, results in results_by_kind.items():
        transfer = [
            statistics.fmean(losses[-1] for losses in result["transfer_losses"].values())
            for result in results
        ]
        linear_cells = [spread([result["linear"][name] for result in results]) for name in metrics]
        rows.append([kind, *linear_cells, spread(transfer)])
    print("\n".join(aligned(rows)))


def spread(values: list[float]) -> str:
    """Return the mean and the standard deviation."""
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{deviation}"


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
