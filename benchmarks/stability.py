"""Measure the numerical error of both attention ops on long sequences with extreme inputs.

The error is the largest absolute error of an output divided by the largest output. The reference is
the recurrence in float64 on the same rounded inputs. Each figure in the table is the maximum over
several inputs: random, rising and falling logits, or one decay per head and one per channel.
"plain" is the same equation in plain torch in the data type of the inputs: the recurrence or, for
one scan, softmax over tokens and a matrix product.
"""

import math
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tyro
from matplotlib.figure import Figure
from results import aligned, environment, write
from torch import Tensor

from onescan.ops import additive_decay, decay_attention

DTYPES = ("float32", "bfloat16")
LONGEST = {"full": 1000, "recurrent": 10_000}  # tokens; other forms have no limit
FORMS = {  # by op and whether it is causal
    ("additive_decay", True): ("chunk", "full", "recurrent"),
    ("additive_decay", False): ("one_scan", "full"),
    ("decay_attention", True): ("chunk", "full", "recurrent"),
    ("decay_attention", False): ("chunk", "full", "recurrent"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the benchmark."""

    tokens: tuple[int, ...] = (1000, 10_000, 50_000)
    """Sequence lengths."""
    logits: tuple[float, ...] = (3.0, 80.0, 1e4)
    """Maximum absolute values of key logits."""
    decays: tuple[float, ...] = (1e-3, 1.0, 100.0)
    """Log decays are drawn between 0 and minus these."""
    head_dim: int = 16
    """Channels of queries, keys and values; there is one head."""
    seed: int = 0
    """Random seed."""
    out: Path = Path("bench/stability")
    """Folder for the results."""


class Case(NamedTuple):
    """Inputs of one call, each [1, T, 1, K]; x contains the key logits or log decays."""

    inputs: str
    kind: str
    q: Tensor
    k: Tensor
    v: Tensor
    x: Tensor


def additive_cases(tokens: int, options: Options) -> list[Case]:
    q, noise, v = torch.randn(3, 1, tokens, 1, options.head_dim, dtype=torch.float64)
    ramp = torch.linspace(-1, 1, tokens).double()[None, :, None, None]
    uniform = noise.erf()  # in [-1, 1]
    kinds = {"random": uniform, "rising": ramp + 1e-3 * noise, "falling": -ramp + 1e-3 * noise}
    return [
        Case(f"logits within {size:g}", kind, q, size * x, v, size * x)
        for size, (kind, x) in product(options.logits, kinds.items())
    ]


def decay_cases(tokens: int, options: Options) -> list[Case]:
    q, k, v, noise = torch.randn(4, 1, tokens, 1, options.head_dim, dtype=torch.float64)
    uniform = (noise.erf() - 1) / 2  # in [-1, 0]
    kinds = {"per head": uniform[..., :1].expand_as(k), "per channel": uniform}
    return [
        Case(f"log decays {-size:g} to 0", kind, q, k, v, size * x)
        for size, (kind, x) in product(options.decays, kinds.items())
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

    def visit(*tensors: Tensor, includes_token: bool) -> Tensor:
        kv, outputs = torch.zeros_like(k[:, 0].unsqueeze(-1) * v[:, 0].unsqueeze(-2)), []
        for query, key, value, decay in zip(*(y.unbind(1) for y in tensors), strict=True):
            decayed = decay.exp().unsqueeze(-1) * kv
            kv = decayed + key.unsqueeze(-1) * value.unsqueeze(-2)
            outputs.append((query.unsqueeze(-2) @ (kv if includes_token else decayed)).squeeze(-2))
        return torch.stack(outputs, dim=1)

    o = visit(q, k, v, x, includes_token=True)
    return (
        o if causal else o + visit(*(y.flip(1) for y in (q, k, v, x)), includes_token=False).flip(1)
    )


def run_form(op: str, case: Case, form: Any, *, causal: bool) -> Tensor:
    options = {"causal": causal, "form": form, "backend": "torch"}
    if op == "additive_decay":
        return additive_decay(*case[2:5], **options)[0]
    decays = case.x.float()[..., 0] if case.kind == "per head" else case.x.float()
    return decay_attention(*case[2:5], decays, decay_at="target", **options)[0]


def errors_of(op: str, tokens: int, options: Options, *, causal: bool) -> list[dict[str, Any]]:
    additive = op == "additive_decay"
    cases = (additive_cases if additive else decay_cases)(tokens, options)
    recurrence = additive_recurrence if additive else decay_recurrence
    plain_form = recurrence if causal or not additive else softmax_product
    errors = []
    for dtype in DTYPES:
        rounded = [
            Case(*case[:2], *(x.to(getattr(torch, dtype)) for x in case[2:])) for case in cases
        ]
        batch = [torch.cat(parts) for parts in zip(*(case[2:] for case in rounded), strict=True)]
        exact = recurrence(*(x.double() for x in batch), causal=causal)
        outputs = {"plain": plain_form(*batch, causal=causal)}
        for form in FORMS[op, causal]:
            if tokens <= LONGEST.get(form, tokens):
                parts = [run_form(op, case, form, causal=causal) for case in rounded]
                outputs[form] = torch.cat(parts)
        for form, o in outputs.items():
            relative_errors = (o.double() - exact).abs().amax((1, 2, 3)) / exact.abs().amax(
                (1, 2, 3)
            )
            for case, error in zip(rounded, relative_errors.tolist(), strict=True):
                errors.append({
                    "op": op, "direction": "causal" if causal else "bidirectional", "form": form,
                    "inputs": case.inputs, "kind": case.kind, "dtype": dtype, "tokens": tokens,
                    "error": error,
                })  # fmt: skip
    return errors


def largest(errors: list[dict[str, Any]]) -> dict[tuple[str, ...], dict[tuple[int, str], float]]:
    """Return the largest errors over kinds of inputs, by op and so on, then tokens and dtype."""
    table: dict[tuple[str, ...], dict[tuple[int, str], float]] = {}
    for record in errors:
        cells = table.setdefault(
            (record["op"], record["direction"], record["inputs"], record["form"]), {}
        )
        column = record["tokens"], record["dtype"]
        error = math.inf if math.isnan(record["error"]) else record["error"]
        cells[column] = max(cells.get(column, 0.0), error)
    return table


def plot(errors: list[dict[str, Any]]) -> Figure:
    """Plot the largest error of each form over tokens."""
    figure = Figure(figsize=(12, 10), layout="constrained")
    for axis, (op, causal) in zip(figure.subplots(2, 2).flat, FORMS, strict=True):
        direction = "causal" if causal else "bidirectional"
        for form, dtype in product(("plain", *FORMS[op, causal]), DTYPES):
            key = (op, direction, form, dtype)
            largest_error: dict[int, float] = {}  # by number of tokens
            for record in errors:
                if tuple(record[x] for x in ("op", "direction", "form", "dtype")) == key:
                    tokens = record["tokens"]
                    largest_error[tokens] = max(largest_error.get(tokens, 0.0), record["error"])
            line = "-" if dtype == "float32" else "--"
            x, y = list(largest_error), list(largest_error.values())
            axis.plot(x, y, line, marker="o", label=f"{form}, {dtype}")
        axis.set(xscale="log", yscale="log", title=f"{op}, {direction}", xlabel="tokens")
        axis.set_ylabel("largest relative error")
        axis.legend(fontsize="small")
    return figure


@torch.no_grad()
def main(options: Options) -> None:
    torch.manual_seed(options.seed)
    errors = []
    for tokens in options.tokens:
        for op, causal in FORMS:
            errors += errors_of(op, tokens, options, causal=causal)
    columns = list(product(options.tokens, DTYPES))
    rows = [["op", "direction", "inputs", "form", *(f"{n} {dtype}" for n, dtype in columns)]]
    for key, cells in sorted(largest(errors).items(), key=lambda item: item[0][:2]):
        rows.append(
            [*key, *(f"{cells[column]:.1e}" if column in cells else "" for column in columns)]
        )
    print("\n".join(aligned(rows)))
    results = {"options": options, "environment": environment(torch.device("cpu"))}
    write(options.out, "stability", plot(errors), **results, errors=errors)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
