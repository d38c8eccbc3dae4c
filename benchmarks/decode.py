"""What a further token costs after so many: linear states beside softmax attention's cache.

python benchmarks/decode.py                       the table of docs/results.md
python benchmarks/decode.py --lengths 1000 4000   other lengths

Each figure comes from a process of its own: the median time of a step of one token, what the state
holds, and the memory that the step took beyond model and state. No text is read for it: a linear
state is the same size after one token as after any number, so that of one token stands for all, and
the twin's cache is noise, of the size that it has after so many. The softmax twin has the
same width, depth, vocabulary and about as many parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro
from torch import Tensor

from onescan import configs
from onescan.bench.size import model_size
from onescan.bench.timing import exponent, measure
from onescan.layers.mixers import SoftmaxMixerConfig
from onescan.layers.mlp import MLPConfig
from onescan.layers.position import TokenPositionConfig
from onescan.models.presets import preset
from onescan.models.states import flatten, map_tensors

TWIN = "softmax twin"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    model: str = "lightnet_lm_45m"
    """A causal language model of `onescan models`."""
    lengths: tuple[int, ...] = (1_000, 10_000, 100_000)
    """Tokens that were read or written before."""
    batch: int = 1


def config_of(name: str, options: Options):
    config = preset(options.model)
    if name != TWIN:
        return config
    heads = config.width // 64
    changes = {
        "mixer": SoftmaxMixerConfig(num_heads=heads, causal=True),
        "mlp": MLPConfig(ratio=4.0),
        "position": TokenPositionConfig(most_tokens=1),  # whose rows would be counted as weights
    }
    return configs.replace(config, changes)


def grown(x: Tensor, length: int) -> Tensor:
    """A cache of one token's keys, values or flags, as after so many."""
    if x.dtype == torch.bool:
        return x.new_ones(x.shape[0], length)
    return torch.randn(*x.shape[:2], length, x.shape[3], dtype=x.dtype, device=x.device)


def prepare(name: str, length: int, options: Options) -> Callable[[], object]:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = config_of(name, options).build().eval().to(device)
    token = torch.zeros(options.batch, 1, dtype=torch.long, device=device)
    with torch.no_grad():
        _, state = model(token)
    if name == TWIN:
        state = state._replace(
            position=torch.zeros_like(token[:, 0]),  # the table has one row
            blocks=map_tensors(lambda x: grown(x, length), state.blocks),
        )

    @torch.no_grad()
    def step() -> object:
        return model(token, state)[0]

    return step


def state_mib(name: str, length: int, options: Options) -> float:
    """What is carried from token to token, counted without allocating it."""
    with torch.device("meta"), torch.no_grad():
        _, state = config_of(name, options).build().eval()(torch.zeros(options.batch, 1).long())
    sizes = [x.numel() * x.element_size() for x in flatten(state).values() if x.ndim]
    return sum(sizes) * (length if name == TWIN else 1) / 2**20


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"torch {torch.__version__}, {where}, {torch.get_num_threads()} threads, "
          f"{options.model}, batch {options.batch}")  # fmt: skip
    for name in (options.model, TWIN):
        millions = model_size(config_of(name, options)).parameters / 1e6
        print(f"\n{name}, {millions:.1f} M parameters")
        print(f"{'tokens before':>14}{'ms/token':>10}{'state, MiB':>12}{'step, MiB':>11}")
        times = []
        for length in options.lengths:
            cost = measure(prepare, name, length, options)
            times.append(cost.median_ms)
            print(
                f"{length:>14}{cost.median_ms:>10.1f}{state_mib(name, length, options):>12.1f}"
                f"{cost.peak_mib:>11.0f}",
                flush=True,
            )
        if len(times) > 1:
            print(f"exponent of the length: {exponent(options.lengths, times):.2f}")


if __name__ == "__main__":
    main()
