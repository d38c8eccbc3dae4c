"""Small language models with flash-linear-attention's tensor names, computed token by token.

Written from the equations of LightNet (arXiv:2405.21022, Eq. 13), GLA (arXiv:2312.06635, Eq. 3 and
Sec. 4.4) and DeltaNet (arXiv:2406.06484, Sec. 2.2) in their published form. Sizes and names of
tensors are those that flash-linear-attention stores.
"""

import torch
from torch.nn.functional import silu

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
DELTA_NET = LIGHTNET | {
    "model_type": "delta_net",
    "architectures": ["DeltaNetForCausalLM"],
    "num_heads": 3,
    "expand_k": 1,
    "expand_v": 1,
    "use_gate": False,
    "use_beta": True,
    "qk_norm": "l2",
    "qk_activation": "silu",
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
        for name, shape in parts.items():
            weights[f"{layer}.attn.{name}"] = random(*shape)
    return weights


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


def gla_weights(settings=GLA, rank=4):
    keys = int(WIDTH * settings["expand_k"])
    shapes = {
        "q_proj.weight": (keys, WIDTH),
        "k_proj.weight": (keys, WIDTH),
        "v_proj.weight": (WIDTH, WIDTH),
        "gk_proj.0.weight": (rank, WIDTH),
        "gk_proj.1.weight": (keys, rank),
        "gk_proj.1.bias": (keys,),
        "o_proj.weight": (WIDTH, WIDTH),
    }
    norm = "g_norm"
    if settings["use_output_gate"]:
        shapes["g_proj.weight"], norm = (WIDTH, WIDTH), "g_norm_swish_gate"
    shapes[f"{norm}.weight"] = (WIDTH // settings["num_heads"],)
    return language_model(settings, shapes)


def delta_net_weights(settings=DELTA_NET):
    shapes = {f"{part}_proj.weight": (WIDTH, WIDTH) for part in "qkvo"}
    shapes["b_proj.weight"] = (settings["num_heads"], WIDTH)
    shapes["o_norm.weight"] = (WIDTH // settings["num_heads"],)
    return language_model(settings, shapes)


def rms(x, weight, eps):
    x = x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    return x if weight is None else x * weight


def unit(x):
    return x / (x.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt()


def lightnet(x, attn, settings):
    """Eq. 13 without rotations: the weights of earlier keys are a running softmax."""
    heads = settings["num_heads"] or WIDTH // settings["expand_ratio"]
    q, k, v = ((x @ attn[f"{part}_proj.weight"].T).unflatten(-1, (heads, -1)) for part in "qkv")
    outputs = []
    for t in range(x.shape[1]):
        weights = k[:, : t + 1].softmax(dim=1)
        scores = torch.einsum("bhk,bshk->bhs", silu(q[:, t]), weights) * k.shape[-1] ** -0.5
        outputs.append(torch.einsum("bhs,bshv->bhv", scores, v[:, : t + 1]).flatten(1))
    # flash-linear-attention does not pass the norm_eps of its config to this norm
    o = rms(torch.stack(outputs, dim=1), attn.get("g_norm.weight"), 1e-6)
    gate = x @ attn["g_proj.0.weight"].T @ attn["g_proj.1.weight"].T
    return o * silu(gate) @ attn["o_proj.weight"].T


def gla(x, attn, settings):
    """S_t = diag(a_t) S_{t-1} + k_t v_t^T with a = sigmoid(W_2 W_1 x + b)^(1/16)."""
    heads = settings["num_heads"]
    q, k, v = ((x @ attn[f"{part}_proj.weight"].T).unflatten(-1, (heads, -1)) for part in "qkv")
    z = x @ attn["gk_proj.0.weight"].T @ attn["gk_proj.1.weight"].T + attn["gk_proj.1.bias"]
    decay = (torch.sigmoid(z) ** (1 / 16)).unflatten(-1, (heads, -1))
    state, outputs = 0, []
    for t in range(x.shape[1]):
        state = state * decay[:, t, :, :, None] + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * k.shape[-1] ** -0.5)
    norm = "g_norm_swish_gate" if settings["use_output_gate"] else "g_norm"
    o = rms(torch.stack(outputs, dim=1), attn[f"{norm}.weight"], settings["norm_eps"])
    o = o.flatten(2)
    if settings["use_output_gate"]:
        o = o * silu(x @ attn["g_proj.weight"].T)
    return o @ attn["o_proj.weight"].T


def delta_net(x, attn, settings):
    """S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T with unit keys and queries."""
    heads = settings["num_heads"]
    q, k, v = (silu(x @ attn[f"{part}_proj.weight"].T).unflatten(-1, (heads, -1)) for part in "qkv")
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    beta = torch.sigmoid(x @ attn["b_proj.weight"].T)
    state, outputs = torch.zeros(len(x), heads, k.shape[-1], v.shape[-1], dtype=x.dtype), []
    for t in range(x.shape[1]):
        stored = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        change = beta[:, t, :, None] * (v[:, t] - stored)
        state = state + k[:, t, :, :, None] * change[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    o = rms(torch.stack(outputs, dim=1), attn["o_norm.weight"], settings["norm_eps"])
    return o.flatten(2) @ attn["o_proj.weight"].T


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
