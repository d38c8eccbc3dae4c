"""Language models of flash-linear-attention, converted: the same scores, or a clear refusal."""

import json

import pytest
import torch
from fla_models import (
    DELTA_NET,
    DEPTH,
    GLA,
    LIGHTNET,
    VOCABULARY,
    WIDTH,
    delta_net,
    delta_net_weights,
    gla,
    gla_weights,
    lightnet,
    lightnet_weights,
    scores,
)
from safetensors.torch import save_file

import onescan
from onescan.integrations.transformers import OnescanForCausalLM
from onescan.integrations.weights import Foreign, Tensors, convert_model

MODELS = {
    "lightnet": (LIGHTNET, lightnet_weights, lightnet),
    "lightnet, tied": (LIGHTNET | {"tie_word_embeddings": True}, lightnet_weights, lightnet),
    "lightnet, wide keys": (
        LIGHTNET | {"num_heads": 2, "expand_ratio": 16, "elementwise_affine": False},
        lightnet_weights,
        lightnet,
    ),
    "gla": (GLA, gla_weights, gla),
    "gla, no gate": (GLA | {"use_output_gate": False, "expand_k": 1}, gla_weights, gla),
    "delta_net": (DELTA_NET, delta_net_weights, delta_net),
}
over_models = pytest.mark.parametrize(("settings", "draw", "mixer"), MODELS.values(), ids=MODELS)


def converted(settings, weights):
    return convert_model(Foreign(fields=settings, tensors=Tensors(weights)))


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
    "feature map": (GLA, {"feature_map": "relu"}, "feature_map is 'relu'"),
    "shared keys": (GLA, {"num_kv_heads": 1}, "num_kv_heads is 1 .* expected None or 3"),
    "norm of keys": (DELTA_NET, {"qk_norm": "sum"}, "qk_norm is 'sum'"),
    "gate": (DELTA_NET, {"use_gate": True}, "use_gate is True"),
    "rotation": (GLA, {"model_type": "retnet"}, "queries and keys are rotated"),
}


@pytest.mark.parametrize(("settings", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_settings_that_differ_are_refused(settings, changes, message):
    draw = delta_net_weights if settings is DELTA_NET else gla_weights
    weights = lightnet_weights() if settings is LIGHTNET else draw()
    with pytest.raises(ValueError, match=message):
        converted(settings | changes, weights)


def test_tensors_that_differ_are_refused():
    weights, layer = gla_weights(), "model.layers.1.attn"
    with pytest.raises(ValueError, match=f"which has no {layer}.q_conv1d.weight"):
        converted(GLA, weights | {f"{layer}.q_conv1d.weight": torch.zeros(12, 1, 4)})
    with pytest.raises(ValueError, match=f"no tensor {layer}.v_proj.weight"):
        converted(GLA, {n: x for n, x in weights.items() if n != f"{layer}.v_proj.weight"})
    wide = {f"model.layers.{i}.attn.v_proj.weight": torch.zeros(48, WIDTH) for i in range(DEPTH)}
    with pytest.raises(ValueError, match="v_proj has 48 rows, expected 24"):
        converted(GLA | {"expand_v": 2}, weights | wide)


def test_a_folder_is_written_for_transformers(tmp_path):
    source, weights = tmp_path / "source", lightnet_weights()
    source.mkdir()
    (source / "config.json").write_text(json.dumps(LIGHTNET))
    save_file({n: x.float() for n, x in weights.items()}, source / "model.safetensors")
    model = onescan.convert(source, tmp_path / "out")
    tokens = torch.randint(VOCABULARY, (2, 9))
    loaded = OnescanForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded(tokens).logits, model(tokens)[0])
