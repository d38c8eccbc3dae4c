"""torch.compile: code compiled for one length serves others, with the values of eager code."""

import pytest
import torch

import onescan
from onescan import nn

pytestmark = pytest.mark.compile

LAYERS = {
    "lightnet": lambda: nn.LightNetAttention(32, 4),
    "lion": lambda: nn.LionAttention(32, 4),
    "delta": lambda: nn.DeltaAttention(32, 4),
    "diffusion": lambda: nn.LinearDiffusion(32, 4),
    "mdtpe": lambda: nn.MDTPE(32),
}


def compiled(module):
    """Return the compiled module, and the list to which each compilation adds a graph."""
    torch.compiler.reset()
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    return torch.compile(module, backend=backend), graphs


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_compiled_twice_for_many_lengths(name):
    layer = LAYERS[name]().eval()
    fast, graphs = compiled(layer)
    for length in (20, 33, 47, 61):
        x = torch.randn(2, length, 32)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), layer(x), rtol=1e-5, atol=1e-5)
    assert len(graphs) == 2  # for the first length, and for any length


def test_an_image_classifier_is_compiled_twice_for_many_sizes():
    model = onescan.build("lightnet_tiny", depth=1, num_classes=3, patch_size=(4, 4)).eval()
    fast, graphs = compiled(model)
    for side in (20, 24, 28, 36):
        images = torch.randn(2, 3, side, side)
        with torch.no_grad():
            torch.testing.assert_close(fast(images), model(images), rtol=1e-5, atol=1e-5)
    assert len(graphs) == 2
