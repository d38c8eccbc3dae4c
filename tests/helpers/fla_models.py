"""Small language models with flash-linear-attention's tensor names, computed token by token.

Written from the equations of LightNet (arXiv:2405.21022, Eq. 13), GLA (arXiv:2312.06635, Eq. 3 and
Sec. 4.4), RetNet (arXiv:2307.08621, Eq. 5 and 8), DeltaNet (arXiv:2406.06484, Sec. 2.2 and 3.4),
Gated DeltaNet (arXiv:2412.06464, Eq. 10) and DeltaProduct (arXiv:2502.10297, Sec. 3) in their
published form. Sizes and names of tensors are those that flash-linear-attention stores.
"""

import torch
from torch.nn.functional import elu, silu, softplus

VOCABULARY, WIDTH, DEPTH, HIDDEN = 23, 24, 2, 32
LIGHTNET = {
    "model_type": "lightnet",
    "architectures": ["LightNetForCausalLM"],
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_heads": None,
    "expand_ratio": 8,
    "use_short_conv": False,
    "hidden_act": "swish",
    "gate_low_rank_dim": 5,
    "elementwise_affine": True,
    "norm_eps": 1e-3,
    "attn": None,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
}
GLA = LIGHTNET | {
    "model_type": "gla",
    "architectures": ["GLAForCausalLM"],
    "num_heads": 3,
    "num_kv_heads": None,
    "expand_k": 0.5,
    "expand_v": 1,
    "feature_map": None,
    "use_output_gate": True,
    "clamp_min": None,
    "use_gk": True,
    "use_gv": False,
}
RETNET = GLA | {
    "model_type": "retnet",
    "architectures": ["RetNetForCausalLM"],
    "num_heads": 2,
    "expand_k": 1.0,
    "expand_v": 2.0,
}
DELTA_NET = LIGHTNET | {
    "model_type": "delta_net",
    "architectures": ["DeltaNetForCausalLM"],
    "num_heads": 3,
    "expand_k": 1,
    "expand_v": 1,
    "use_gate": False,
    "use_short_conv": True,
    "conv_size": 4,
    "use_beta": True,
    "qk_norm": "l2",
    "qk_activation": "silu",
}
GATED_DELTA_NET = DELTA_NET | {
    "model_type": "gated_deltanet",
    "architectures": ["GatedDeltaNetForCausalLM"],
    "num_heads": 5,  # does not divide the width, as 6 heads at a width of 2048
    "num_v_heads": None,
    "head_dim": 4,
    "expand_v": 2.0,
    "use_gate": True,
    "allow_neg_eigval": False,
}
GATED_DELTA_PRODUCT = GATED_DELTA_NET | {
    "model_type": "gated_deltaproduct",
    "architectures": ["GatedDeltaProductForCausalLM"],
    "use_output_gate": True,
    "use_forget_gate": True,
    "allow_neg_eigval": True,
    "num_householder": 3,
}


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64) / shape[-1] ** 0.5


def language_model(settings, parts):
    """Return random weights with those of the mixers given by shape."""
    weights = {
        "model.embeddings.weight": random(VOCABULARY, WIDTH) * 5,
        "model.norm.weight": 1 + random(WIDTH),
        "lm_head.weight": random(VOCABULARY, WIDTH),
    }
    if settings["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    for i in range(DEPTH):
        layer = f"model.layers.{i}"
        for norm in ("attn_norm", "mlp_norm"):
            weights[f"{layer}.{norm}.weight"] = 1 + random(WIDTH)
        weights[f"{layer}.mlp.gate_proj.weight"] = random(HIDDEN, WIDTH)
        weights[f"{layer}.mlp.up_proj.weight"] = random(HIDDEN, WIDTH)
        weights[f"{layer}.mlp.down_proj.weight"] = random(WIDTH, HIDDEN)
        if settings["use_short_conv"]:
            parts = parts | convolution_shapes(settings, parts)
        for name, shape in parts.items():
            weights[f"{layer}.attn.{name}"] = random(*shape)
    return weights


def convolution_shapes(settings, parts):
    shapes = {}
    for part in "qkv":
        (channels, _), size = parts[f"{part}_proj.weight"], settings.get("conv_size", 4)
        shapes[f"{part}_conv1d.weight"] = (channels, 1, size)
        if settings.get("conv_bias"):
            shapes[f"{part}_conv1d.bias"] = (channels,)
    return shapes


def lightnet_weights(settings=LIGHTNET):
    heads = settings["num_heads"] or WIDTH // settings["expand_ratio"]
    keys = heads * (settings["expand_ratio"] or WIDTH // heads)
    rank = settings["gate_low_rank_dim"]
    norm = {"g_norm.weight": (WIDTH,)} if settings["elementwise_affine"] else {}
    shapes = {
        "q_proj.weight": (keys, WIDTH),
        "k_proj.weight": (keys, WIDTH),
        "v_proj.weight": (WIDTH, WIDTH),
        "g_proj.0.weight": (rank, WIDTH),
        "g_proj.1.weight": (WIDTH, rank),
        "o_proj.weight": (WIDTH, WIDTH),
    }
    return language_model(settings, shapes | norm)


def widths(settings):
    """Return the number of key and of value channels of all heads together."""
    return int(WIDTH * settings["expand_k"]), int(WIDTH * settings["expand_v"])


def retnet_weights(settings=RETNET, more=()):
    (keys, values), heads = widths(settings), settings["num_heads"]
    groups = heads // (settings["num_kv_heads"] or heads)
    shapes = {
        "q_proj.weight": (keys, WIDTH),
        "k_proj.weight": (keys // groups, WIDTH),
        "v_proj.weight": (values // groups, WIDTH),
        "o_proj.weight": (WIDTH, values),
    } | dict(more)
    norm = "g_norm"
    if settings["use_output_gate"]:
        shapes["g_proj.weight"], norm = (values, WIDTH), "g_norm_swish_gate"
    if settings["elementwise_affine"]:
        shapes[f"{norm}.weight"] = (values // heads,)
    return language_model(settings, shapes)


def gla_weights(settings=GLA, rank=4):
    keys = int(WIDTH * settings["expand_k"])
    if settings["num_kv_heads"]:
        keys = keys // settings["num_heads"] * settings["num_kv_heads"]
    more = {"gk_proj.0.weight": (rank, WIDTH), "gk_proj.1.weight": (keys, rank)}
    return retnet_weights(settings, more | {"gk_proj.1.bias": (keys,)})


def delta_net_weights(settings=DELTA_NET):
    keys, values = widths(settings)
    shapes = {
        "q_proj.weight": (keys, WIDTH),
        "k_proj.weight": (keys, WIDTH),
        "v_proj.weight": (values, WIDTH),
        "o_proj.weight": (WIDTH, values),
        "o_norm.weight": (values // settings["num_heads"],),
    }
    if settings["use_beta"]:
        shapes["b_proj.weight"] = (settings["num_heads"], WIDTH)
    if settings["use_gate"]:
        shapes["g_proj.weight"] = (values, WIDTH)
    return language_model(settings, shapes)


def gated_delta_net_weights(settings=GATED_DELTA_NET):
    heads, updates = settings["num_heads"], settings.get("num_householder", 1)
    value_heads = settings["num_v_heads"] or heads
    keys = heads * settings["head_dim"]
    values = value_heads * int(settings["head_dim"] * settings["expand_v"])
    shapes = {
        "q_proj.weight": (keys, WIDTH),
        "k_proj.weight": (updates * keys, WIDTH),
        "v_proj.weight": (updates * values, WIDTH),
        "b_proj.weight": (updates * value_heads, WIDTH),
        "o_norm.weight": (values // value_heads,),
        "o_proj.weight": (WIDTH, values),
    }
    if settings.get("use_forget_gate", True):
        shapes |= {"a_proj.weight": (value_heads, WIDTH)}
        shapes |= {"A_log": (value_heads,), "dt_bias": (value_heads,)}
    if settings.get("use_output_gate", settings["use_gate"]):
        shapes["g_proj.weight"] = (values, WIDTH)
    return language_model(settings, shapes)


def rms(x, weight, eps):
    x = x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    return x if weight is None else x * weight


def unit(x):
    return x / (x.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt()


def projected(x, attn, settings):
    """Return q, k and v, [B, T, channels], after their convolutions, if there are any."""
    found = []
    for part in "qkv":
        u, y = x @ attn[f"{part}_proj.weight"].T, 0
        if not settings["use_short_conv"]:
            found.append(u)
            continue
        kernel = attn[f"{part}_conv1d.weight"][:, 0]
        for lag in range(kernel.shape[1]):
            y = y + kernel[:, -1 - lag] * shifted(u, lag)
        found.append(y + attn.get(f"{part}_conv1d.bias", 0))
    return found


def shifted(x, steps):
    return torch.cat([torch.zeros_like(x[:, :steps]), x], dim=1)[:, : x.shape[1]]


def in_heads(x, heads, shared):
    """Split channels into heads, of which `heads` / `shared` in a row share theirs."""
    return x.unflatten(-1, (shared, -1)).repeat_interleave(heads // shared, dim=2)


def gated_norm(o, x, attn, settings):
    """Return the output of the layer from that of its heads, [B, T, H, V]."""
    (weight,) = [attn[name] for name in attn if "norm" in name] or [None]
    o = rms(o, weight, settings["norm_eps"]).flatten(2)
    if "g_proj.weight" in attn:
        o = o * silu(x @ attn["g_proj.weight"].T)
    return o @ attn["o_proj.weight"].T


def lightnet(x, attn, settings):
    """Eq. 13 without rotations: the weights of earlier keys are a running softmax."""
    heads = settings["num_heads"] or WIDTH // settings["expand_ratio"]
    q, k, v = (y.unflatten(-1, (heads, -1)) for y in projected(x, attn, settings))
    outputs = []
    for t in range(x.shape[1]):
        weights = k[:, : t + 1].softmax(dim=1)
        scores = torch.einsum("bhk,bshk->bhs", silu(q[:, t]), weights) * k.shape[-1] ** -0.5
        outputs.append(torch.einsum("bhs,bshv->bhv", scores, v[:, : t + 1]).flatten(1))
    # flash-linear-attention does not pass the norm_eps of its config to this norm
    o = rms(torch.stack(outputs, dim=1), attn.get("g_norm.weight"), 1e-6)
    gate = x @ attn["g_proj.0.weight"].T @ attn["g_proj.1.weight"].T
    return o * silu(gate) @ attn["o_proj.weight"].T


def linear_attention(x, attn, settings):
    """Return queries, keys and values of GLA and RetNet, which may share keys."""
    heads = settings["num_heads"]
    shared = settings["num_kv_heads"] or heads
    q, k, v = projected(x, attn, settings)
    if settings["use_short_conv"]:
        q, k, v = silu(q), silu(k), silu(v)
    if settings["feature_map"] == "relu":
        q, k = q.clamp(min=0), k.clamp(min=0)
    return in_heads(q, heads, heads), in_heads(k, heads, shared), in_heads(v, heads, shared)


def gla(x, attn, settings):
    """S_t = diag(a_t) S_{t-1} + k_t v_t^T with a = sigmoid(W_2 W_1 x + b)^(1/16)."""
    q, k, v = linear_attention(x, attn, settings)
    z = x @ attn["gk_proj.0.weight"].T @ attn["gk_proj.1.weight"].T + attn["gk_proj.1.bias"]
    heads = settings["num_heads"]
    decay = in_heads(torch.sigmoid(z) ** (1 / 16), heads, settings["num_kv_heads"] or heads)
    state, outputs = 0, []
    for t in range(x.shape[1]):
        state = state * decay[:, t, :, :, None] + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * k.shape[-1] ** -0.5)
    return gated_norm(torch.stack(outputs, dim=1), x, attn, settings)


def retnet(x, attn, settings):
    """o_n = sum over m <= n of gamma^(n - m) Re[q_n (k_m e^(i (m - n) theta))^*] v_m / sqrt(K).

    The real and imaginary parts of queries and keys are the halves of their channels.
    """
    q, k, v = linear_attention(x, attn, settings)
    count, half = x.shape[1], q.shape[-1] // 2
    q, k = (torch.complex(y[..., :half], y[..., half:]) for y in (q, k))
    theta = 10000.0 ** -(torch.arange(half, dtype=x.dtype) / half)
    lags = torch.arange(count, dtype=x.dtype)[:, None] - torch.arange(count, dtype=x.dtype)
    turn = torch.polar(torch.ones_like(lags)[..., None], lags[..., None] * theta)
    gamma = 1 - 2.0 ** -(5 + torch.arange(q.shape[2], dtype=x.dtype))
    mask = (gamma ** lags.clamp(min=0)[..., None]) * (lags >= 0)[..., None]
    scores = torch.einsum("bnhj,bmhj,nmj->bnmh", q, k.conj(), turn).real * (2 * half) ** -0.5
    o = torch.einsum("bnmh,nmh,bmhv->bnhv", scores, mask, v)
    return gated_norm(o, x, attn, settings)


def delta_net(x, attn, settings):
    """S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T with normalized keys and queries."""
    heads = settings["num_heads"]
    q, k, v = (y.unflatten(-1, (heads, -1)) for y in projected(x, attn, settings))
    activation = {
        "silu": silu,
        "relu": lambda y: y.clamp(min=0),
        "elu": lambda y: elu(y) + 1,
        "identity": lambda y: y,
    }[settings["qk_activation"]]
    norm = {"l2": unit, "sum": lambda y: y / y.sum(dim=-1, keepdim=True)}[settings["qk_norm"]]
    q, k, v = norm(activation(q)) * q.shape[-1] ** -0.5, norm(activation(k)), silu(v)
    beta = torch.ones(*x.shape[:2], heads, dtype=x.dtype)
    if settings["use_beta"]:
        beta = torch.sigmoid(x @ attn["b_proj.weight"].T)
    beta = beta * (2 if settings.get("allow_neg_eigval") else 1)
    state, outputs = torch.zeros(len(x), heads, k.shape[-1], v.shape[-1], dtype=x.dtype), []
    for t in range(x.shape[1]):
        stored = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        change = beta[:, t, :, None] * (v[:, t] - stored)
        state = state + k[:, t, :, :, None] * change[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return gated_norm(torch.stack(outputs, dim=1), x, attn, settings)


def gated_delta_net(x, attn, settings):
    """S_t = a_t (I - b k k^T) S_{t-1} + b k v^T, where a token may have several k, v and b.

    Queries and keys may have fewer heads than values, and are repeated for these.
    """
    heads, updates = settings["num_heads"], settings.get("num_householder", 1)
    value_heads = settings["num_v_heads"] or heads
    q, k, v = (silu(y) for y in projected(x, attn, settings))
    q = unit(in_heads(q, value_heads, heads)) * settings["head_dim"] ** -0.5
    # B T updates H K
    k = torch.stack([unit(in_heads(y, value_heads, heads)) for y in k.chunk(updates, -1)], dim=2)
    v = v.unflatten(-1, (updates, value_heads, -1))
    beta = torch.sigmoid(x @ attn["b_proj.weight"].T).unflatten(-1, (updates, value_heads))
    beta = beta * (2 if settings["allow_neg_eigval"] else 1)
    decay = torch.ones(*x.shape[:2], value_heads, dtype=x.dtype)
    if "a_proj.weight" in attn:
        step = softplus(x @ attn["a_proj.weight"].T + attn["dt_bias"])
        decay = torch.exp(-attn["A_log"].exp() * step)
    eye = torch.eye(k.shape[-1], dtype=x.dtype)
    state, outputs = torch.zeros(len(x), value_heads, *v.shape[-1:], *k.shape[-1:]).double(), []
    for t in range(x.shape[1]):  # the state is [V, K], as in the paper
        state = state * decay[:, t, :, None, None]
        for r in range(updates):
            b, key = beta[:, t, r, :, None, None], k[:, t, r, :, None]
            state = state @ (eye - b * key.mT @ key) + b * v[:, t, r, :, :, None] @ key
        outputs.append((state @ q[:, t, :, :, None])[..., 0])
    return gated_norm(torch.stack(outputs, dim=1), x, attn, settings)


def scores(tokens, weights, settings, mixer):
    """Return next-token logits of a stored model, [B, T, vocabulary]."""
    eps = settings["norm_eps"]
    x = weights["model.embeddings.weight"][tokens]
    for i in range(DEPTH):
        layer = {
            name.removeprefix(f"model.layers.{i}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"model.layers.{i}.")
        }
        attn = {n.removeprefix("attn."): x for n, x in layer.items() if n.startswith("attn.")}
        x = x + mixer(rms(x, layer["attn_norm.weight"], eps), attn, settings)
        y = rms(x, layer["mlp_norm.weight"], eps)
        y = silu(y @ layer["mlp.gate_proj.weight"].T) * (y @ layer["mlp.up_proj.weight"].T)
        x = x + y @ layer["mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embeddings.weight"])
    return rms(x, weights["model.norm.weight"], eps) @ head.T
