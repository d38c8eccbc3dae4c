"""The size of a model: parameters, and multiply-accumulates of one forward pass.

Counting the multiply-accumulates of all presets takes 20 s, so their sizes are in sizes.json, which
`python docs/counts.py` writes.
"""

import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from onescan.checks import check_positive
from onescan.configs import ModelConfig
from onescan.models.presets import ABLATIONS, PRESETS, preset

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

SIZES = Path(__file__).with_name("sizes.json")
LAYERS = ("blocks", "layers")  # names of the lists of equal modules


class Size(NamedTuple):
    """Size of a model, counted rather than estimated.

    Attributes:
        parameters: Number of parameters.
        macs: Multiply-accumulates in the matrix products of one forward pass on an example of the
            default size. As is customary, elementwise operations are not counted.
    """

    parameters: int
    macs: int


def model_size(config: ModelConfig) -> Size:
    """Count the size of a model on the meta device, without allocating memory."""
    with torch.device("meta"):
        inputs = config.example_inputs()
        model = config.build()
    return Size(sum(p.numel() for p in model.parameters()), _macs(model, inputs))


def known_size(config: ModelConfig) -> Size:
    """Return the size of a model from sizes.json, or count it if its config is not there."""
    return _known_sizes().get(fingerprint(config)) or model_size(config)


def fingerprint(config: ModelConfig) -> str:
    """Return a hash of a config, which changes with every field and default."""
    return blake2b(repr(config).encode(), digest_size=8).hexdigest()


def listed_configs() -> dict[str, ModelConfig]:
    """Return the configs that sizes.json covers: the presets and their published ablations."""
    configs: dict[str, ModelConfig] = {}
    for name, row in PRESETS.items():
        configs[name] = row.config
        for ablation in row.printed_ablations:
            configs[f"{name}/{ablation}"] = preset(name, **ABLATIONS[ablation])
    return configs


@cache
def _known_sizes() -> dict[str, Size]:
    rows = json.loads(SIZES.read_text(encoding="utf-8")).values()
    return {row["config"]: Size(row["parameters"], row["macs"]) for row in rows}


def parameters_by_part(config: ModelConfig) -> dict[str, int]:
    """Count the parameters of each part of a model, without allocating memory.

    Parts are the model's modules, such as "embedding" and "head", and the modules of a block summed
    over all blocks, such as "blocks.mixer". Shared weights are counted in the first one.
    """
    with torch.device("meta"):
        model = config.build()
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        path = [part for part in name.split(".") if not (part.isdigit() or part == "network")]
        part = ".".join(path[: 2 if path[0] in LAYERS else 1])
        counts[part] = counts.get(part, 0) + parameter.numel()
    return counts


def attention_flops(tokens: int, head_width: int) -> int:
    """Return the FLOPs of softmax attention with one head, L (6 D^2 + 4 L D + 2 L).

    Queries, keys and values take 6 L D^2, the scores and the weighted sum of the values 2 L^2 D
    each, and the softmax 2 L^2. A multiply-accumulate counts as two, and the width of the tokens is
    that of the head, D. The output layer is not counted.

    Source: LION, arXiv:2502.16249, App. C.12.

    >>> attention_flops(196, 64), recurrence_flops(196, 64)
    (14728224, 13147484)
    """
    check_positive(tokens=tokens, head_width=head_width)
    return tokens * (6 * head_width**2 + 4 * tokens * head_width + 2 * tokens)


def recurrence_flops(tokens: int, head_width: int) -> int:
    """Return the FLOPs of LION-s with one head as two recurrences, L (16 D^2 + 24 D + 7).

    Queries, keys, values and decays take 6 L D^2 + 2 L D. Per token and direction, the state S
    takes 3 D^2, the normalizer z 2 D, the row sum 4 D + 2, and the output 2 D^2 + 4 D + 1. Adding
    both directions and dividing takes L (2 D + 1); the paper prints 2 L (D + 1) for this item,
    which does not match its total. See `attention_flops` for what is counted.

    For D = 64, this is less than `attention_flops` from 165 tokens on.

    Source: LION, arXiv:2502.16249, App. C.12.
    """
    check_positive(tokens=tokens, head_width=head_width)
    return tokens * (16 * head_width**2 + 24 * head_width + 7)


def _macs(model: nn.Module, inputs: tuple[Tensor | None, ...]) -> int:
    from torch.utils.flop_counter import FlopCounterMode  # slow to import

    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        count = _Count(counter)
        for blocks in _repeated_blocks(model):
            count.run_once(blocks)
        model.eval()(*(None if x is None else x.to("meta") for x in inputs))
    return count.flops // 2


def _repeated_blocks(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the runs of consecutive blocks in a list that have the same structure."""
    for blocks in model.modules():
        if isinstance(blocks, nn.ModuleList):
            for _, run in groupby(blocks, _structure):
                if len(same := list(run)) > 1:
                    yield same


def _structure(block: nn.Module) -> tuple[str, list[torch.Size]]:
    return repr(block), [x.shape for x in block.state_dict().values()]


class _Count:
    """Count FLOPs, running only one of several equal blocks for inputs of the same shapes."""

    def __init__(self, counter: "FlopCounterMode") -> None:
        self.counter = counter
        self.skipped_flops = 0

    @property
    def flops(self) -> int:
        return self.counter.get_total_flops() + self.skipped_flops

    def run_once(self, blocks: list[nn.Module]) -> None:
        results: dict[str, tuple[int, Any]] = {}
        for block in blocks:
            block.forward = partial(self._run, block.forward, results)

    def _run(
        self,
        forward: Callable[..., Any],
        results: dict[str, tuple[int, Any]],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        shapes = str(tree_map_only(Tensor, lambda x: (x.shape, x.dtype), (args, kwargs)))
        if shapes not in results:
            before = self.flops
            output = forward(*args, **kwargs)
            results[shapes] = self.flops - before, output
            return output
        flops, output = results[shapes]
        self.skipped_flops += flops
        return tree_map_only(Tensor, torch.empty_like, output)
