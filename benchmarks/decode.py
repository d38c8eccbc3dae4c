"""Time and memory of one more token after a context: a state of constant size, or a growing cache.

python benchmarks/decode.py

python benchmarks/decode.py --candidates lion_s lion_s_without_state softmax softmax_without_cache

No text is processed. A linear state has the same size after any number of tokens, so the state
after one token is used for all context lengths. The softmax model's cache contains noise of the
size that it has after the context. Candidates with "without" in their name read the whole context
again for each token: LION-s as full attention, and the softmax model without a cache. The second
command is for LION's Fig. 6, arXiv:2502.16249.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import causal
import harness
import torch
from benchmark_cases import build_on_device, check_backend
from harness import Case, find_device, run_benchmark
from results import Benchmark
from torch import Tensor
from torch.utils._pytree import tree_leaves

from onescan import configs
from onescan.layers.mixers import LionMixerConfig
from onescan.models.token_network import flatten_state, map_tensors

RECOMPUTED = {"lion_s_without_state": "lion_s", "softmax_without_cache": "softmax"}
CANDIDATES = ("lightnet", "lion_s", "softmax", *causal.FLA)


@dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    """Options of the benchmark."""

    tokens: tuple[int, ...] = (1_000, 10_000, 100_000)
    """Context lengths."""
    model_size: causal.ModelSize = "45m"
    """Width and depth of the models."""
    candidates: tuple[str, ...] = CANDIDATES
    """Models to measure; ratios are relative to the first."""


@torch.no_grad()
def prepare(name: str, mode: str, tokens: int, options: Options) -> Case:
    token = torch.zeros(options.batch_size, 1, dtype=torch.long, device=find_device(options.device))
    state: Any
    if name in RECOMPUTED:
        return recomputed_case(RECOMPUTED[name], tokens, options)
    if name in causal.FLA:
        build = partial(causal.fla_model, name, options.model_size, options)
        model = build_on_device(build, options).eval()
        state = state_tensors = model(input_ids=token, use_cache=True).past_key_values

        def step() -> object:
            return model(input_ids=token, past_key_values=state, use_cache=True).logits

    else:
        if name != "softmax":
            check_backend(options)
        # one position, because more would count as parameters
        model = build_on_device(
            causal.our_config(name, options.model_size, max_tokens=1).build, options
        )
        state = model.eval()(token)[1]
        if name == "softmax":
            blocks = map_tensors(partial(lengthened, tokens=tokens), state.blocks)
            state = state._replace(position=torch.zeros_like(token[:, 0]), blocks=blocks)
        state_tensors = flatten_state(state)

        def step() -> object:
            return model(token, state)[0]

    parameters = sum(p.numel() for p in model.parameters())
    return Case(torch.no_grad()(step), len(token), parameters, state_mib(state_tensors))


def recomputed_case(name: str, tokens: int, options: Options) -> Case:
    """Read a context and one more token, and compute the logits after the last one."""
    config = causal.our_config(name, options.model_size, max_tokens=tokens + 1)
    if isinstance(config.mixer, LionMixerConfig):
        check_backend(options)
        config = configs.replace(config, {"mixer.form": "full"})
    model = build_on_device(config.build, options).eval()
    size, device = (options.batch_size, tokens + 1), find_device(options.device)
    text = torch.zeros(size, dtype=torch.long, device=device)
    parameters = sum(p.numel() for p in model.parameters())
    if config.position is not None:
        parameters -= tokens * config.width  # one position is counted, as with a cache
    call = torch.no_grad()(lambda: model(text, last_only=True)[0])
    return Case(call, items=len(text), parameters=parameters)


def lengthened(x: Tensor, tokens: int) -> Tensor:
    """Return keys, values or flags of a cache of so many tokens, given those of one token."""
    if x.dtype == torch.bool:
        return x.new_ones(x.shape[0], tokens)
    return torch.randn(*x.shape[:2], tokens, x.shape[3], dtype=x.dtype, device=x.device)


def state_mib(state: Any) -> float:
    """Return the memory of the tensors in a nested state, without its scalars."""
    if hasattr(state, "layers"):  # a cache of transformers
        state = [getattr(layer, "state", None) for layer in state.layers]
    tensors = [x for x in tree_leaves(state) if isinstance(x, Tensor) and x.ndim]
    return sum(x.numel() * x.element_size() for x in tensors) / 2**20


def run(options: Options) -> None:
    benchmark = Benchmark(
        name="decode",
        candidates=(*CANDIDATES, *RECOMPUTED),
        modes=("decoding step",),
        sizes=options.tokens,
        axis="context length",
        items="tokens",
    )
    run_benchmark(benchmark, prepare, options)


if __name__ == "__main__":
    harness.main(Options, run, __doc__)
