"""Language models of flash-linear-attention, converted: the same scores, or a clear refusal."""

import json

import pytest
import torch
from fla_models import (
    DELTA_NET,
    GATED_DELTA_NET,
    GATED_DELTA_PRODUCT,
    GLA,
    LIGHTNET,
    RETNET,
    VOCABULARY,
    delta_net,
    delta_net_weights,
    gated_delta_net,
    gated_delta_net_weights,
    gla,
    gla_weights,
    lightnet,
    lightnet_weights,
    retnet,
    retnet_weights,
    scores,
)
from safetensors.torch import save_file

import onescan
from onescan.integrations.transformers import OnescanForCausalLM
from onescan.integrations.weights import Foreign, Tensors, convert_model

CONVOLUTIONS = {"use_short_conv": True, "conv_size": 3, "conv_bias": True}
MODELS = {
    "lightnet": (LIGHTNET, lightnet_weights, lightnet),
    "lightnet, tied": (LIGHTNET | {"tie_word_embeddings": True}, lightnet_weights, lightnet),
    "lightnet, wide keys": (
        LIGHTNET | {"num_heads": 2, "expand_ratio": 16, "elementwise_affine": False},
        lightnet_weights,
        lightnet,
    ),
    "lightnet, convolutions": (LIGHTNET | CONVOLUTIONS, lightnet_weights, lightnet),
    "gla": (GLA, gla_weights, gla),
    "gla, no gate": (GLA | {"use_output_gate": False, "expand_k": 1}, gla_weights, gla),
    "gla, convolutions": (
        GLA | CONVOLUTIONS | {"expand_v": 2, "num_kv_heads": 1},
        gla_weights,
        gla,
    ),
    "gla, relu": (GLA | {"feature_map": "relu", "elementwise_affine": False}, gla_weights, gla),
    "retnet": (RETNET, retnet_weights, retnet),
    "retnet, shared keys": (
        RETNET | CONVOLUTIONS | {"num_heads": 4, "num_kv_heads": 2, "use_output_gate": False},
        retnet_weights,
        retnet,
    ),
    "delta_net": (DELTA_NET, delta_net_weights, delta_net),
    "delta_net, no convolutions": (
        DELTA_NET | {"use_short_conv": False, "allow_neg_eigval": True},
        delta_net_weights,
        delta_net,
    ),
    "delta_net, gate": (
        DELTA_NET | CONVOLUTIONS | {"use_gate": True, "expand_k": 0.5, "expand_v": 2},
        delta_net_weights,
        delta_net,
    ),
    "delta_net, elu": (
        DELTA_NET | {"qk_activation": "elu", "qk_norm": "sum", "use_beta": False},
        delta_net_weights,
        delta_net,
    ),
    "delta_net, relu": (DELTA_NET | {"qk_activation": "relu"}, delta_net_weights, delta_net),
    "delta_net, identity": (
        DELTA_NET | {"qk_activation": "identity"},
        delta_net_weights,
        delta_net,
    ),
    "gated_deltanet": (GATED_DELTA_NET, gated_delta_net_weights, gated_delta_net),
    "gated_deltanet, more value heads": (
        GATED_DELTA_NET | CONVOLUTIONS | {"num_v_heads": 10, "allow_neg_eigval": True},
        gated_delta_net_weights,
        gated_delta_net,
    ),
    "gated_deltanet, plain": (
        GATED_DELTA_NET | {"use_gate": False, "use_short_conv": False, "expand_v": 1.0},
        gated_delta_net_weights,
        gated_delta_net,
    ),
    "gated_deltaproduct": (GATED_DELTA_PRODUCT, gated_delta_net_weights, gated_delta_net),
    "gated_deltaproduct, plain": (
        GATED_DELTA_PRODUCT | {"use_forget_gate": False, "use_output_gate": False},
        gated_delta_net_weights,
        gated_delta_net,
    ),
}
over_models = pytest.mark.parametrize(("settings", "draw", "mixer"), MODELS.values(), ids=MODELS)


def converted(settings, weights):
    return convert_model(Foreign(fields=settings, tensors=Tensors(weights)))


@pytest.mark.sampled(5)
@over_models
def test_scores_are_equal(settings, draw, mixer):
    weights = draw(settings)
    tokens = torch.randint(VOCABULARY, (2, 70))  # more than one chunk
    expected = scores(tokens, weights, settings, mixer)
    torch.testing.assert_close(
        converted(settings, weights)(tokens)[0], expected, atol=1e-10, rtol=0
    )
    single = {name: tensor.float() for name, tensor in weights.items()}
    y, _ = converted(settings, single)(tokens)
    torch.testing.assert_close(y, expected.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.sampled(7)
@over_models
def test_generation_continues_from_the_state(settings, draw, mixer):
    model = converted(settings, draw(settings))
    tokens = torch.randint(VOCABULARY, (2, 9))
    whole, _ = model(tokens)
    _, state = model(tokens[:, :5])
    torch.testing.assert_close(model(tokens[:, 5:], state)[0], whole[:, 5:])


REFUSED = {
    "convolutions": (LIGHTNET, {"use_short_conv": True}, "use_short_conv is True"),
    "hybrid": (LIGHTNET, {"attn": {"layers": [0]}}, "attn is {'layers': .0.}"),
    "activation": (LIGHTNET, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "feature map": (GLA, {"feature_map": "gelu"}, "feature_map 'gelu' is unknown"),
    "shared keys": (GLA, {"num_kv_heads": 2}, "num_kv_heads is 2, expected a divisor of .* 3"),
    "norm of keys": (DELTA_NET, {"qk_norm": "softmax"}, "qk_norm is 'softmax'"),
    "activation of keys": (DELTA_NET, {"qk_activation": "tanh"}, "qk_activation 'tanh' is unknown"),
    "decay per channel": (DELTA_NET, {"model_type": "kda"}, "its output gate has a bias"),
    "value heads": (
        GATED_DELTA_NET,
        {"num_v_heads": 7},
        "num_heads is 5, expected a divisor of num_v_heads 7",
    ),
    "value heads of several updates": (
        GATED_DELTA_PRODUCT,
        {"num_v_heads": 10},
        "num_v_heads is 10 .* expected None",
    ),
}
WEIGHTS = {
    "lightnet": lightnet_weights,
    "gla": gla_weights,
    "delta_net": delta_net_weights,
    "gated_deltanet": gated_delta_net_weights,
    "gated_deltaproduct": gated_delta_net_weights,
}


@pytest.mark.parametrize(("settings", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_settings_that_differ_are_refused(settings, changes, message):
    weights = WEIGHTS[settings["model_type"]](settings)
    with pytest.raises(ValueError, match=message):
        converted(settings | changes, weights)


def test_tensors_that_differ_are_refused():
    weights, layer = gla_weights(), "model.layers.1.attn"
    with pytest.raises(ValueError, match=f"unexpected tensors: {layer}.b_proj.weight"):
        converted(GLA, weights | {f"{layer}.b_proj.weight": torch.zeros(3, 24)})
    with pytest.raises(ValueError, match=f"no tensor {layer}.v_proj.weight"):
        converted(GLA, {n: x for n, x in weights.items() if n != f"{layer}.v_proj.weight"})
    shared = RETNET | {"num_heads": 4, "num_kv_heads": 2}
    odd = retnet_weights(shared) | {"model.layers.0.attn.k_proj.weight": torch.zeros(13, 24)}
    with pytest.raises(ValueError, match=r"k_proj.weight has 13 rows, expected a multiple of 2"):
        converted(shared, odd)
    settings = GLA | {"use_short_conv": True, "feature_map": "relu"}
    with pytest.raises(ValueError, match=r"feature_map is 'relu' .* expected None"):
        converted(settings, gla_weights(settings))


def test_a_folder_is_written_for_transformers(tmp_path):
    source, weights = tmp_path / "source", lightnet_weights()
    source.mkdir()
    (source / "config.json").write_text(json.dumps(LIGHTNET))
    save_file({n: x.float() for n, x in weights.items()}, source / "model.safetensors")
    model = onescan.convert(source, tmp_path / "out")
    tokens = torch.randint(VOCABULARY, (2, 9))
    loaded = OnescanForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded(tokens).logits, model(tokens)[0])
