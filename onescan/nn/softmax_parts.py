"""Recognize softmax self-attention in PyTorch, transformers and timm models by its structure.

A module is self-attention if it has linear layers for queries, keys and values, separate or merged,
at most one linear layer for the output, and no layers or parameters that this file does not know.
This requires no list of classes, and a module that computes more than attention is never replaced.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from onescan.layers.mixers.projections import ProjectionWeights
from onescan.messages import named_type

# names of the layers that project queries, keys, values and outputs
_PREFIX, _SUFFIX = r"(?:to_|w_?|lin(?:ear)?_)?", r"(?:_?(?:proj|lin|linear|layer|w))?(?:_?\d)?"
_ROLES = {
    role: re.compile(f"{_PREFIX}(?:{names}){_SUFFIX}", re.IGNORECASE)
    for role, names in {
        "q": "q|query|queries",
        "k": "k|key|keys",
        "v": "v|value|values",
        "kv": "kv|key_value",
        "qk": "qk|query_key",
        "qkv": "qkv|c_attn|in_proj_qkv",
        "interleaved": "query_key_value",  # often the rows of each head in turn
        "out": "o|out|output|dense|proj|projection|c_proj",
    }.items()
}
_QK_NORM = re.compile(
    r"(?:[qk]|query|key|qk)_(?:layer_?)?norm|(?:norm|ln)_[qk]|[qk]_ln", re.IGNORECASE
)
_ROTARY = re.compile(r"rotary|rope|position_embeddings|sinusoidal_pos", re.IGNORECASE)
_RELATIVE = re.compile(
    r"rel(?:ative)?_|position_bias|pos_bias|linear_pos|distance_embedding|alibi", re.IGNORECASE
)
_SPARSE = re.compile(r"band_mask|blocked_(?:encoder_)?mask|from_mask|to_mask", re.IGNORECASE)
_OUT_DROPOUT = re.compile(r"(?:proj|out|output|resid)_drop(?:out)?", re.IGNORECASE)
LAYERS = ("qkv", "q", "k", "v")
_BIASES = ("q_bias", "k_bias", "v_bias")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_HEAD_DIM = ("head_dim", "attention_head_size", "key_value_proj_dim")

ROTARY, RELATIVE = "rotary positions", "the relative position bias"
QK_NORM, WINDOWS = "norms of queries and keys", "windows"


@dataclass(frozen=True)
class Call:
    """How a module is called, and what it returns.

    Attributes:
        parameters: Names of the parameters of its forward, in order.
        outputs: Length of the tuple that it returns, whose first element is the output; None if it
            returns the output itself.
    """

    parameters: tuple[str, ...]
    outputs: int | None


@dataclass(frozen=True)
class AttentionParts:
    """The parts of a self-attention module.

    Attributes:
        dim: Width of its tokens.
        num_heads: Number of heads of the queries.
        head_dim: Channels per head.
        projections: Projections of queries, keys and values. All have num_heads heads: grouped keys
            and values are repeated.
        out_proj: Module after the heads, with the norm before it, if any.
        dropout: Dropout of the output.
        call: How it is called; None for `nn.MultiheadAttention`.
        omitted: What it computes besides attention, and its replacement omits.
    """

    dim: int
    num_heads: int
    head_dim: int
    projections: dict[str, ProjectionWeights]
    out_proj: nn.Module
    dropout: nn.Module
    call: Call | None
    omitted: tuple[str, ...]


def projects_queries_keys_and_values(module: nn.Module) -> bool:
    """Return whether the layers of a module have the names of query, key and value projections."""
    roles = set(_roles(module))
    merged = bool({"qkv", "interleaved"} & roles)
    return merged or any(each <= roles for each in ({"q", "kv"}, {"qk", "v"}, {"q", "k", "v"}))


def _roles(module: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    """Return the name and the layer of each role; the last one if there are several."""
    return {
        role: (name, child)
        for name, child in module.named_children()
        for role, pattern in _ROLES.items()
        if pattern.fullmatch(name)
    }


def attention_parts(module: nn.Module) -> AttentionParts | None:
    """Return the parts of a self-attention module, or None if it is not attention.

    Raises:
        ValueError: If it is attention that cannot be replaced. The message completes the sentence
            "The module ...".
    """
    if isinstance(module, nn.MultiheadAttention):
        return _of_torch(module)
    if not projects_queries_keys_and_values(module):
        return None
    roles = _roles(module)
    _check_supported(module, roles)
    out = roles.get("out")
    layers = {role: _linear(*roles[role]) for role in LAYERS if role in roles}
    if out is not None:
        _linear(*out)
    first = next(iter(layers.values()))
    if any(layer.in_features != first.in_features for layer in layers.values()):
        raise ValueError("reads queries and keys of different widths, as cross-attention does")
    num_heads, head_dim = _heads(module, layers)
    weights, biases = _weights(module, layers, num_heads * head_dim)
    return AttentionParts(
        dim=first.in_features,
        num_heads=num_heads,
        head_dim=head_dim,
        projections=_projections(weights, biases, num_heads, head_dim),
        out_proj=_output(module, None if out is None else out[1]),
        dropout=_dropout(module),
        call=_call(module),
        omitted=_omitted(module),
    )


def _of_torch(module: nn.MultiheadAttention) -> AttentionParts:
    if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
        raise ValueError("has kdim, vdim, add_bias_kv or add_zero_attn, which are not supported")
    bias = module.in_proj_bias
    weights = dict(zip("qkv", module.in_proj_weight.detach().chunk(3), strict=True))
    biases = (
        dict.fromkeys("qkv")
        if bias is None
        else dict(zip("qkv", bias.detach().chunk(3), strict=True))
    )
    return AttentionParts(
        dim=module.embed_dim,
        num_heads=module.num_heads,
        head_dim=module.head_dim,
        projections=_projections(weights, biases, module.num_heads, module.head_dim),
        out_proj=module.out_proj,
        dropout=nn.Identity(),
        call=None,
        omitted=(),
    )


def _check_supported(module: nn.Module, roles: dict[str, tuple[str, nn.Module]]) -> None:
    """Raise ValueError if the module is not plain self-attention of an encoder."""
    if getattr(module, "is_decoder", False):
        raise ValueError("is part of a decoder, which is not supported")
    if "interleaved" in roles:
        name, _ = roles["interleaved"]
        raise ValueError(f"has {name}, whose order of rows is unknown")
    if "qk" in roles:
        raise ValueError("projects queries and keys together, but values separately")
    if "kv" in roles:
        raise ValueError(
            "projects queries separately from keys and values, as cross-attention does"
        )
    if any(_SPARSE.fullmatch(name) for name in _parameters(module)):
        raise ValueError("is sparse attention, whose module changes with the length of the input")
    used = {name for name, _ in roles.values()}
    for name, child in module.named_children():
        is_known = (
            name in used
            or name == "norm"
            or _QK_NORM.fullmatch(name)
            or _ROTARY.search(name)
            or _RELATIVE.search(name)
        )
        if not is_known and not isinstance(child, nn.Dropout | nn.Identity):
            raise ValueError(f"also has the unknown layer {name}, {named_type(child)}")
    for name, _ in module.named_parameters(recurse=False):
        if name not in _BIASES and not _RELATIVE.search(name):
            raise ValueError(f"also has the unknown parameter {name}")


def _linear(name: str, layer: nn.Module) -> nn.Linear:
    if not isinstance(layer, nn.Linear) or not layer.weight.is_floating_point():
        hint = ""
        if type(layer).__name__ == "Conv1D":
            hint = " (for GPT-2, use onescan.convert and the recipe linearize_gpt2)"
        raise ValueError(f"has {name}, {named_type(layer)}, where an nn.Linear is expected{hint}")
    return layer


def _heads(module: nn.Module, layers: Mapping[str, nn.Linear]) -> tuple[int, int]:
    """Return the number of heads and the channels of each."""
    heads, head_dim = (
        next((x for name in names if isinstance(x := getattr(module, name, None), int)), None)
        for names in (_HEADS, _HEAD_DIM)
    )
    rows = layers["q"].out_features if "q" in layers else None
    if heads is None and head_dim:
        heads = (rows or layers["qkv"].out_features // 3) // head_dim
    if not heads:
        raise ValueError(f"has no attribute for the number of heads, such as {_HEADS[0]}")
    if rows is None:
        rows = heads * head_dim if head_dim else layers["qkv"].out_features // 3
    if rows % heads:
        raise ValueError(
            f"projects queries to {rows} channels, which cannot be split into {heads} heads"
        )
    return heads, rows // heads


Weights = Mapping[str, Tensor]
Biases = Mapping[str, Tensor | None]


def _weights(
    module: nn.Module, layers: Mapping[str, nn.Linear], queries: int
) -> tuple[Weights, Biases]:
    """Return the weights and biases of queries, keys and values."""
    if "qkv" in layers:
        merged = layers["qkv"]
        keys = (merged.out_features - queries) // 2
        if keys < 1 or queries + 2 * keys != merged.out_features:
            raise ValueError(
                f"projects to {merged.out_features} channels, {queries} of them for queries, and "
                "the rest cannot be split into keys and values"
            )
        sizes = [queries, keys, keys]
        weights = dict(zip("qkv", merged.weight.detach().split(sizes), strict=True))
        biases: Biases = dict.fromkeys("qkv")
        if merged.bias is not None:
            biases = dict(zip("qkv", merged.bias.detach().split(sizes), strict=True))
    else:
        weights = {role: layers[role].weight.detach() for role in "qkv"}
        biases = {
            role: None if (bias := layers[role].bias) is None else bias.detach() for role in "qkv"
        }
    for role in "qkv":
        extra = getattr(module, f"{role}_bias", None)
        if extra is not None:
            biases[role] = extra.detach() + (0 if biases[role] is None else biases[role])
    return weights, biases


def _projections(
    weights: Weights, biases: Biases, num_heads: int, head_dim: int
) -> dict[str, ProjectionWeights]:
    """Return the projections with all heads: those of grouped keys and values are repeated."""

    def repeated(x: Tensor | None) -> Tensor | None:
        if x is None or x.shape[0] == num_heads * head_dim:
            return x
        if x.shape[0] % head_dim or num_heads % (groups := x.shape[0] // head_dim):
            raise ValueError(
                f"projects keys to {x.shape[0]} channels, expected {head_dim} for each of the "
                f"{num_heads} heads or of equal groups of heads"
            )
        x = x.unflatten(0, (groups, head_dim))
        return x.repeat_interleave(num_heads // groups, dim=0).flatten(0, 1)

    projections = {}
    for role, name in (("q", "query"), ("k", "key"), ("v", "value")):
        weight = repeated(weights[role])
        assert weight is not None
        heads = 1 if role == "v" else num_heads
        projections[name] = ProjectionWeights(weight, repeated(biases[role]), heads)
    return projections


def _output(module: nn.Module, out_proj: nn.Module | None) -> nn.Module:
    """Return the layer after the heads, together with the norm before it."""
    norm = getattr(module, "norm", None)
    layers = [x for x in (norm, out_proj) if x is not None and not isinstance(x, nn.Identity)]
    if len(layers) == 1:
        return layers[0]
    return nn.Sequential(*layers) if layers else nn.Identity()


def _dropout(module: nn.Module) -> nn.Module:
    children = module.named_children()
    return next((x for name, x in children if _OUT_DROPOUT.fullmatch(name)), nn.Identity())


def _omitted(module: nn.Module) -> tuple[str, ...]:
    """Return what a module computes in addition to attention."""
    children = [n for n, x in module.named_children() if not isinstance(x, nn.Identity)]
    names = [
        *children,
        *(n for n, _ in module.named_parameters(recurse=False)),
        *_parameters(module),
    ]
    omitted = []
    if any(_ROTARY.search(name) for name in names):
        omitted.append(ROTARY)
    if any(_RELATIVE.search(name) for name in names):
        omitted.append(RELATIVE)
    if any(_QK_NORM.fullmatch(name) for name in children):
        omitted.append(QK_NORM)
    if (window := getattr(module, "sliding_window", None)) is not None:
        omitted.append(f"{WINDOWS} of {window} tokens")
    return tuple(omitted)


def _parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters of a module's forward."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(type(module).forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind in named)[1:]


def is_position_argument(name: str) -> bool:
    """Return whether an argument of forward holds positions, according to its name."""
    return bool(_ROTARY.search(name) or _RELATIVE.search(name))


def computes_relative_bias(name: str) -> bool:
    """Return whether a module computes a relative position bias, according to its name."""
    return bool(_RELATIVE.search(name))


def computes_windows(omitted: tuple[str, ...]) -> bool:
    """Return whether what a replacement omits includes windows."""
    return any(name.startswith(WINDOWS) for name in omitted)


def _call(module: nn.Module) -> Call:
    forward = inspect.unwrap(type(module).forward)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError) as error:
        raise ValueError("has a forward method whose source code cannot be read") from error
    function = tree.body[0]
    lengths = {_tuple_length(value, function) for value in _returned(function)}
    if len(lengths) != 1:
        raise ValueError("returns tuples of different lengths")
    return Call(_parameters(module), lengths.pop())


def _returned(function: ast.stmt) -> Iterator[ast.expr]:
    """Yield the values that a function returns, except those of nested functions."""
    stack: list[ast.AST] = list(ast.iter_child_nodes(function))
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value
        elif not isinstance(node, ast.FunctionDef | ast.Lambda):
            stack.extend(ast.iter_child_nodes(node))


def _tuple_length(value: ast.expr, function: ast.stmt) -> int | None:
    """Return the length of a returned tuple, without attention weights; None for a tensor."""
    if isinstance(value, ast.Tuple):
        return len(value.elts)
    if isinstance(value, ast.IfExp):  # (o, weights) if output_attentions else (o,)
        return _tuple_length(value.orelse, function)
    if isinstance(value, ast.Name):
        for node in ast.walk(function):
            if not isinstance(node, ast.Assign):
                continue
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if value.id in names and isinstance(node.value, ast.Tuple | ast.IfExp):
                return _tuple_length(node.value, function)
    return None
