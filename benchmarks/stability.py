"""Measure the numerical error of both attention ops on long sequences with extreme inputs.

python benchmarks/stability.py                               1,000 to 50,000 tokens
python benchmarks/stability.py --tokens 1000 --json a.json   short run; every case as JSON

The error is the largest absolute error of an output divided by the largest output. The reference is
the recurrence in float64 on the same rounded inputs. Each figure is the maximum over several
inputs: random, rising and falling logits, or one decay per head and one per channel. "plain" is the
same equation in plain torch in the dtype of the inputs: the recurrence or, for one scan, softmax
over tokens and a matrix product.
"""

import json
import math
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tyro
from torch import Tensor

from onescan.ops.additive_decay import additive_decay
from onescan.ops.decay_attention import decay_attention

DTYPES = (torch.float32, torch.bfloat16)
LONGEST = {"full": 1000, "recurrent": 10_000}  # tokens; other forms have no limit
ADDITIVE_FORMS = {True: ("chunk", "full", "recurrent"), False: ("one_scan", "full")}
DECAY_FORMS = ("chunk", "full", "recurrent")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Cases to measure."""

    tokens: tuple[int, ...] = (1000, 10_000, 50_000)
    logits: tuple[float, ...] = (3.0, 80.0, 1e4)
    """maximum absolute values of key logits"""
    decays: tuple[float, ...] = (1e-3, 1.0, 100.0)
    """log decays are drawn between 0 and minus these"""
    width: int = 16
    """channels of queries, keys and values; there is one head"""
    seed: int = 0
    json: Path | None = None
    """file to write every case to"""


class Error(NamedTuple):
    """The error of one implementation in one case."""

    op: str
    causal: bool
    form: str
    inputs: str
    kind: str
    dtype: str
    tokens: int
    error: float


class Case(NamedTuple):
    """Inputs of one call, each [1, T, 1, K]; x contains the key logits or log decays."""

    inputs: str
    kind: str
    q: Tensor
    k: Tensor
    v: Tensor
    x: Tensor


def additive_cases(tokens: int, options: Options) -> list[Case]:
    q, noise, v = torch.randn(3, 1, tokens, 1, options.width, dtype=torch.float64)
    ramp = torch.linspace(-1, 1, tokens).double()[None, :, None, None]
    uniform = noise.erf()  # in [-1, 1]
    kinds = {"random": uniform, "rising": ramp + 1e-3 * noise, "falling": -ramp + 1e-3 * noise}
    return [
        Case(f"logits within {size:g}", kind, q, size * x, v, size * x)
        for size in options.logits
        for kind, x in kinds.items()
    ]


def decay_cases(tokens: int, options: Options) -> list[Case]:
    q, k, v, noise = torch.randn(4, 1, tokens, 1, options.width, dtype=torch.float64)
    uniform = (noise.erf() - 1) / 2  # in [-1, 0]
    kinds = {"per head": uniform[..., :1].expand_as(k), "per channel": uniform}
    return [
        Case(f"log decays {-size:g} to 0", kind, q, k, v, size * x)
        for size in options.decays
        for kind, x in kinds.items()
    ]


def additive_recurrence(q: Tensor, k: Tensor, v: Tensor, x: Tensor, *, causal: bool) -> Tensor:
    """LightNet, Eq. 13, one token at a time; if not causal, Eq. 14 from the last state."""
    z, kv, outputs = torch.full_like(k[:, 0], -math.inf), 0, []
    for query, key, value in zip(*(y.unbind(1) for y in (q, k, v)), strict=True):
        before, z = z, torch.logaddexp(z, key)
        kv = (before - z).exp().unsqueeze(-1) * kv
        kv = kv + (key - z).exp().unsqueeze(-1) * value.unsqueeze(-2)
        if causal:
            outputs.append((query.unsqueeze(-2) @ kv).squeeze(-2))
    return torch.stack(outputs, dim=1) if causal else torch.einsum("bthk,bhkv->bthv", q, kv)


def softmax_product(q: Tensor, k: Tensor, v: Tensor, x: Tensor, *, causal: bool) -> Tensor:
    """LightNet, Eq. 14, as printed."""
    return torch.einsum("bthk,bhkv->bthv", q, torch.einsum("bthk,bthv->bhkv", k.softmax(1), v))


def decay_recurrence(q: Tensor, k: Tensor, v: Tensor, x: Tensor, *, causal: bool) -> Tensor:
    """LION, Eq. 5 and Theorem B.1, one token at a time in each direction."""

    def visit(*tensors: Tensor, own: bool) -> Tensor:
        kv, outputs = torch.zeros_like(k[:, 0].unsqueeze(-1) * v[:, 0].unsqueeze(-2)), []
        for query, key, value, decay in zip(*(y.unbind(1) for y in tensors), strict=True):
            decayed = decay.exp().unsqueeze(-1) * kv
            kv = decayed + key.unsqueeze(-1) * value.unsqueeze(-2)
            outputs.append((query.unsqueeze(-2) @ (kv if own else decayed)).squeeze(-2))
        return torch.stack(outputs, dim=1)

    o = visit(q, k, v, x, own=True)
    return o if causal else o + visit(*(y.flip(1) for y in (q, k, v, x)), own=False).flip(1)


def additive_form(case: Case, form: Any, *, causal: bool) -> Tensor:
    return additive_decay(*case[2:5], causal=causal, form=form, backend="torch")[0]


def decay_form(case: Case, form: Any, *, causal: bool) -> Tensor:
    decays = case.x.float()[..., 0] if case.kind == "per head" else case.x.float()
    return decay_attention(
        *case[2:5], decays, causal=causal, decay_at="target", form=form, backend="torch"
    )[0]  # fmt: skip


def errors_of(op: str, tokens: int, options: Options, *, causal: bool) -> list[Error]:
    additive = op == "additive_decay"
    cases = (additive_cases if additive else decay_cases)(tokens, options)
    recurrence = additive_recurrence if additive else decay_recurrence
    plain = recurrence if causal or not additive else softmax_product
    run = additive_form if additive else decay_form
    forms = ADDITIVE_FORMS[causal] if additive else DECAY_FORMS
    found = []
    for dtype in DTYPES:
        rounded = [Case(*case[:2], *(x.to(dtype) for x in case[2:])) for case in cases]
        together = [torch.cat(parts) for parts in zip(*(case[2:] for case in rounded), strict=True)]
        exact = recurrence(*(x.double() for x in together), causal=causal)
        outputs = {"plain": plain(*together, causal=causal)}
        for form in forms:
            if tokens <= LONGEST.get(form, tokens):
                outputs[form] = torch.cat([run(case, form, causal=causal) for case in rounded])
        for form, o in outputs.items():
            error = (o.double() - exact).abs().amax((1, 2, 3)) / exact.abs().amax((1, 2, 3))
            name = str(dtype).removeprefix("torch.")
            for case, number in zip(rounded, error.tolist(), strict=True):
                found.append(Error(op, causal, form, case.inputs, case.kind, name, tokens, number))
    return found


def print_table(errors: list[Error], options: Options) -> None:
    worst: dict[tuple[str, ...], dict[tuple[int, str], float]] = defaultdict(dict)
    for e in errors:
        direction = "causal" if e.causal else "both ways"
        cells, at = worst[e.op, direction, e.inputs, e.form], (e.tokens, e.dtype)
        # NaN counts as infinite
        cells[at] = max(cells.get(at, 0.0), e.error if e.error == e.error else math.inf)
    columns = [(n, str(d).removeprefix("torch.")) for n in options.tokens for d in DTYPES]
    print("| op | direction | inputs | form |", *(f"{n:,} {d} |" for n, d in columns))
    print("|---" * (4 + len(columns)) + "|")
    for row, cells in sorted(worst.items(), key=lambda item: item[0][:2]):
        shown = (f"{cells[at]:.1e} |" if at in cells else "|" for at in columns)
        print("|", *(f"{name} |" for name in row), *shown)


@torch.no_grad()
def main(options: Options) -> None:
    """Measure all cases, print the maximum errors, and optionally write every case as JSON."""
    torch.manual_seed(options.seed)
    errors = []
    for tokens in options.tokens:
        for op in ("additive_decay", "decay_attention"):
            for causal in (True, False):
                errors += errors_of(op, tokens, options, causal=causal)
    print_table(errors, options)
    if options.json is not None:
        written = {"options": asdict(options), "errors": [e._asdict() for e in errors]}
        options.json.write_text(json.dumps(written, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options))
