"""Prediction window by window: exact where windows do not matter, and weighted means elsewhere."""

from itertools import product
from pathlib import Path

import pytest
import torch

from onescan.inference.dense import predict_map
from onescan.inference.loading import Checkpoint
from onescan.inference.windows import predict_windows
from onescan.inputs import ArrayFormat
from onescan.inputs.targets import Target
from onescan.layers.mixers import LightNetMixerConfig
from onescan.models.dense_predictor import DensePredictorConfig


@pytest.mark.parametrize(
    ("sides", "window", "overlap"),
    [
        ((37,), 8, 0.5),
        ((37,), (37,), 0.0),
        ((9, 20), (4, 7), 0.25),
        ((9, 20), (100, 3), 0.9),
        ((5, 6, 7), 3, 0.0),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 5])
def test_a_map_of_each_position_is_the_same_in_windows(sides, window, overlap, batch_size):
    images = torch.randn(2, 3, *sides, dtype=torch.float64)
    weight = torch.randn(4, 3, dtype=torch.float64)

    def model(x):
        return torch.einsum("oc,bc...->bo...", weight, x).tanh()

    found = predict_windows(model, images, window, overlap=overlap, batch_size=batch_size)
    torch.testing.assert_close(found, model(images), rtol=1e-12, atol=1e-12)


def test_one_window_is_the_model_itself():
    config = DensePredictorConfig(
        image_size=(8, 8),
        patch_size=(2, 2),
        width=12,
        depth=1,
        mixer=LightNetMixerConfig(num_heads=2),
    )
    model = config.build().double().eval()
    images = torch.randn(3, 3, 7, 9, dtype=torch.float64)
    torch.testing.assert_close(predict_windows(model, images, (16, 9)), model(images))


def test_overlapping_windows_are_averaged_by_their_distance_to_the_center():
    images = torch.zeros(1, 1, 6, dtype=torch.float64)
    calls = []

    def model(x):
        calls.append(len(x))
        return x + torch.arange(len(x), dtype=x.dtype).view(-1, 1, 1)  # the number of the window

    found = predict_windows(model, images, 4, overlap=0.5, batch_size=8).flatten()
    assert calls == [2]
    line = [torch.tensor(-0.5 * (8 * (i - 1.5) / 4) ** 2).double().exp() for i in range(4)]
    want = [0, 0, line[0] / (line[0] + line[2]), line[1] / (line[1] + line[3]), 1, 1]
    torch.testing.assert_close(found, torch.tensor(want, dtype=torch.float64))


def test_windows_cover_every_position():
    for side, size, overlap in product(range(1, 12), range(1, 12), (0.0, 0.3, 0.9)):
        images = torch.zeros(1, 1, side)
        seen = torch.zeros(side)
        where = torch.arange(side, dtype=torch.float32).view(1, 1, -1)

        def model(x, seen=seen):
            seen[x.long().flatten()] += 1
            return x

        predict_windows(model, images + where, size, overlap=overlap)
        assert seen.all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, r"window\[0\] is 0"),
        ({"window": (2, 2, 2)}, "window has 3 sizes, but images have 2 axes"),
        ({"overlap": 1.0}, "overlap is 1.0, expected 0 or more and less than 1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"images": torch.zeros(0, 1, 4, 4)}, r"images.shape\[0\] is 0"),
        ({"images": torch.zeros(1, 1, 4, 0)}, r"images.shape\[3\] is 0"),
        (
            {"model": lambda x: x[..., :1]},
            r"outputs of size \(2, 1\) for a window of size \(2, 2\)",
        ),
    ],
)
def test_impossible_windows_are_errors(changes, message):
    arguments = {"model": lambda x: x, "images": torch.zeros(1, 1, 4, 4), "window": 2}
    with pytest.raises(ValueError, match=message):
        predict_windows(**{**arguments, **changes})


def test_maps_are_predicted_in_batches_of_windows():
    batches = []

    class Counting(torch.nn.Conv1d):
        def forward(self, x):
            batches.append(len(x))
            return super().forward(x)

    checkpoint = Checkpoint(
        folder=Path("nowhere"),
        run={"task": {"window": [4], "window_overlap": 0.0}},
        model=Counting(1, 2, 1),
        format=ArrayFormat(channels=1, shape=(28,), mean=(0.0,), std=(1.0,)),
        class_names=("a", "b"),
        target=Target(kind="class_map"),
        metrics={},
    )
    grid = torch.randn(1, 1, 28)
    torch.testing.assert_close(
        predict_map(checkpoint, grid, batch_size=5), predict_map(checkpoint, grid)
    )
    assert batches == [5, 2, 4, 3]
