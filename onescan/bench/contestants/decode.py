"""One further token of a causal language model after so many: a state, or a growing cache."""

from functools import partial

import torch
from torch import Tensor

from onescan.bench.contest.machine import device_of
from onescan.bench.contest.trial import Field, Trial
from onescan.bench.contestants.language_models import (
    FLA,
    LIGHTNET,
    SOFTMAX,
    check_backend,
    our_config,
    parameters,
    placed,
    state_mib,
    their_model,
)
from onescan.bench.contests import DecodeOptions
from onescan.models.token_network import flatten_state, map_tensors

STEP = "a further token"


def contestants(options: DecodeOptions) -> Field:
    """Name them."""
    return Field((LIGHTNET, SOFTMAX, *FLA), (STEP,), prepare)


def prepare(name: str, work: str, size: int, options: DecodeOptions) -> Trial:
    """A step after `size` tokens, for which no text is read.

    A linear state is the same size after one token as after any number, so that of one stands for
    all; the softmax twin's cache is noise, of the size that it has after so many.
    """
    token = torch.zeros(options.batch_size, 1, dtype=torch.long, device=device_of(options))
    return _theirs(name, token, options) if name in FLA else _ours(name, size, token, options)


@torch.no_grad()
def _ours(name: str, size: int, token: Tensor, options: DecodeOptions) -> Trial:
    # one place, as more rows would be counted as weights
    config = our_config(name, options.model_size, max_tokens=1)
    check_backend(config.mixer, options)
    model = placed(config.build, options).eval()
    _, state = model(token)
    if name == SOFTMAX:
        blocks = map_tensors(lambda x: _grown(x, size), state.blocks)
        state = state._replace(position=torch.zeros_like(token[:, 0]), blocks=blocks)

    @torch.no_grad()
    def step() -> object:
        return model(token, state)[0]

    held = state_mib(tuple(flatten_state(state).values()))
    return Trial(step, items=len(token), parameters=parameters(model), state_mib=held)


@torch.no_grad()
def _theirs(name: str, token: Tensor, options: DecodeOptions) -> Trial:
    model = placed(partial(their_model, name, options.model_size, options), options).eval()
    cache = model(input_ids=token, use_cache=True).past_key_values

    @torch.no_grad()
    def step() -> object:
        return model(input_ids=token, past_key_values=cache, use_cache=True).logits

    held = state_mib(cache)
    return Trial(step, items=len(token), parameters=parameters(model), state_mib=held)


def _grown(x: Tensor, length: int) -> Tensor:
    """A cache of one token's keys, values or flags, as after so many."""
    if x.dtype == torch.bool:
        return x.new_ones(x.shape[0], length)
    return torch.randn(*x.shape[:2], length, x.shape[3], dtype=x.dtype, device=x.device)
