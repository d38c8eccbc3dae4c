"""Feature extractors, sources of images, and statistics of references."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_denoiser import NAMES, BarsConfig
from tiny_generation import (
    CLASSIFIER,
    CPU,
    Alone,
    Scripted,
    Tuple,
    Wrong,
    adm_file,
    images_of,
    samples_config,
    saved_classifier,
    saved_denoiser,
    saved_run,
    scripted,
    write_npz,
    write_pngs,
)

from onescan.experiments.data import ImageDatasetConfig
from onescan.experiments.evaluation.features import open_features
from onescan.experiments.evaluation.generation import open_reference, reference_cache
from onescan.experiments.evaluation.images import FolderSource, NpzSource, open_dataset
from onescan.experiments.tasks import ImageClassificationConfig
from onescan.experiments.tasks.feature_distance import convert_images, frechet_distance
from onescan.experiments.training.config import RunConfig
from onescan.experiments.training.runs import run_config
from onescan.inference.loading import load
from onescan.inputs.images import to_bytes


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONESCAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "generation"


@pytest.fixture
def classifier(tmp_path):
    return saved_classifier(tmp_path)


# Feature extractors


def test_classifier_features_are_the_input_of_the_head(classifier):
    features, run, images = open_features(classifier, CPU), load(classifier), images_of(5, 1)
    found = features(images)
    tokens = run.model.forward_features(run.format.standardize(images))
    torch.testing.assert_close(found.pooled, run.model.pooled(tokens))
    torch.testing.assert_close(found.spatial.view(5, 7, 4), tokens[:, 1:, :7].transpose(1, 2))
    probabilities = run.model(run.format.standardize(images)).softmax(dim=1)
    torch.testing.assert_close(found.probabilities, probabilities)
    assert (features.name, features.is_inception) == ("runs/classifier", False)
    assert (features.class_names, features.sizes((4, 4))) == (NAMES, (8, 28, 3))


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [({"distillation_token": True}, (16, 7 * 4)), ({"patch_size": (1, 1)}, (8, 7 * 16))],
)
def test_classifier_features_of_other_models(tmp_path, changes, sizes):
    model, task = replace(CLASSIFIER, **changes), ImageClassificationConfig()
    run = RunConfig(name="other", model=model, data=BarsConfig(), task=task)
    features = open_features(saved_run(tmp_path / "other", run), CPU)
    assert features.sizes((4, 4))[:2] == sizes
    if "patch_size" in changes:
        features.format = replace(features.format, height=36, width=20)
        assert features.sizes((4, 4)).spatial == 7 * 17 * 17


def test_classifier_features_convert_images(classifier):
    features, color = open_features(classifier, CPU), images_of(3, size=8)
    gray = (color * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
    torch.testing.assert_close(features(color), features(gray))


def test_images_are_only_converted_if_necessary():
    images = images_of(2)
    assert convert_images(images, channels=3, height=4, width=4) is images
    enlarged = convert_images(images.round(), channels=3, height=32, width=32)
    assert 0 <= enlarged.min() <= enlarged.max() <= 1
    with pytest.raises(ValueError, match="4 channels"):
        convert_images(torch.zeros(1, 4, 4, 4), channels=3, height=4, width=4)


def test_cache_key_of_features_identifies_weights(tmp_path, classifier):
    run, key = run_config(classifier), open_features(classifier, CPU).cache_key
    assert open_features(saved_run(tmp_path / "other", run, seed=9), CPU).cache_key != key
    assert open_features(saved_run(tmp_path / "same", run), CPU).cache_key == key


def test_arguments_of_nvidias_file_are_recognized(tmp_path):
    features = open_features(scripted(tmp_path / "inception.pt", Scripted()), CPU)
    found, pixels = features(images_of(4)), images_of(4).mean(dim=1).flatten(1)
    torch.testing.assert_close(found.pooled, pixels)
    torch.testing.assert_close(found.probabilities, (3 * pixels[:, :5]).softmax(dim=1))
    assert found.spatial is None
    assert (features.name, features.is_inception) == ("inception.pt", True)


def test_torchscript_may_return_a_tuple_or_pooled_features(tmp_path):
    images = images_of(4)
    found = open_features(scripted(tmp_path / "tuple.pt", Tuple()), CPU)(images)
    torch.testing.assert_close(found.pooled, images.mean(dim=1).flatten(1))
    torch.testing.assert_close(found.spatial, images[:, 0].flatten(1))
    torch.testing.assert_close(found.probabilities, images[:, 0, 0].softmax(dim=1))
    alone = open_features(scripted(tmp_path / "alone.pt", Alone()), CPU)
    assert alone.sizes((4, 4)) == (48, 0, 0)
    assert alone(images_of(2, channels=1)).pooled.shape == (2, 48)


class Failing(torch.nn.Module):
    def forward(self, images):
        return images.view(7, 11)


@pytest.mark.parametrize(
    ("module", "message"),
    [(Failing(), r"bytes of shape \(2, 3, 4, 4\)"), (Wrong(), r"\(\) for 2 images")],
)
def test_torchscript_that_returns_no_features_is_rejected(tmp_path, module, message):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(module).save(str(tmp_path / "x.pt"))
    features = open_features(tmp_path / "x.pt", CPU)
    with pytest.raises(ValueError, match=f"x.pt.*{message}"):
        features(images_of(2))


def test_files_without_features_are_rejected(tmp_path):
    (tmp_path / "damaged.pt").write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"damaged\.pt"):
        open_features(tmp_path / "damaged.pt", CPU)
    with pytest.raises(FileNotFoundError, match="features is 'nowhere'"):
        open_features("nowhere", CPU)
    with pytest.raises(ValueError, match="Denoiser, expected an ImageClassifier"):
        open_features(saved_denoiser(tmp_path), CPU)


# Sources


@pytest.mark.parametrize("store", [np.savez, np.savez_compressed])
def test_npz_files_are_read_in_parts(tmp_path, store):
    images, labels = images_of(9), np.arange(9) % 3
    store(tmp_path / "x.npz", to_bytes(images).permute(0, 2, 3, 1).numpy(), labels)
    source = NpzSource(tmp_path / "x.npz")
    assert (len(source), source.size) == (9, (4, 4))
    for start, stop in ((0, 4), (4, 7), (7, 12), (2, 5)):
        found, classes = source.images(start, stop)
        assert torch.equal(found, images[start:stop])
        assert classes.tolist() == labels[start:stop].tolist()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"other": np.zeros(3)}, "no arr_0"),
        ({"arr_0": np.zeros((2, 4, 4, 3))}, r"\(2, 4, 4, 3\) of float64"),
        ({"arr_0": np.zeros((2, 4, 4), dtype=np.uint8)}, r"\(2, 4, 4\) of uint8"),
        ({"arr_0": np.zeros((2, 4, 4, 3), np.uint8), "arr_1": np.arange(3)}, r"arr_1 \(3,\)"),
        ({"arr_0": np.array([{}, print], dtype=object)}, "arr_0"),  # nothing is unpickled
    ],
)
def test_npz_files_with_other_arrays_are_rejected(tmp_path, arrays, message):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        NpzSource(tmp_path / "x.npz")


def test_damaged_files_are_named(tmp_path):
    path = write_npz(tmp_path / "x.npz", images_of(9))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"x\.npz"):
        NpzSource(path)
    folder = write_pngs(tmp_path / "x", images_of(2))
    (folder / "001.png").write_bytes((folder / "001.png").read_bytes()[:60])
    with pytest.raises(ValueError, match=r"001\.png"):
        FolderSource(folder).images(0, 2)


def test_folders_are_read_in_order(tmp_path):
    images = images_of(5)
    source = FolderSource(write_pngs(tmp_path / "x", images))
    found, labels = source.images(1, 4)
    assert torch.equal(found, images[1:4])
    assert (labels, len(source), source.size) == (None, 5, (4, 4))


def test_folders_of_samples_need_images_of_one_size(tmp_path):
    folder = write_pngs(tmp_path / "x", images_of(2))
    Image.new("RGB", (6, 5)).save(folder / "z.png")
    with pytest.raises(ValueError, match=r"z\.png has size \(5, 6\)"):
        FolderSource(folder).images(0, 3)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty contains no images"):
        FolderSource(tmp_path / "empty")


def test_reference_images_are_cropped_at_the_center(tmp_path):
    image = torch.zeros(1, 3, 4, 8)
    image[..., 2:6] = 1
    found, _ = open_dataset(str(write_pngs(tmp_path / "x", image)), (4, 4)).images(0, 1)
    torch.testing.assert_close(found, torch.ones(1, 3, 4, 4))


def test_class_folders_are_read_with_labels(tmp_path):
    write_pngs(tmp_path / "x" / "dog", images_of(3, seed=1))
    write_pngs(tmp_path / "x" / "cat", images_of(2))
    source = open_dataset(str(tmp_path / "x"), (4, 4))
    images, labels = source.images(0, 5)
    assert (source.class_names, labels.tolist()) == (("cat", "dog"), [0, 0, 1, 1, 1])
    torch.testing.assert_close(images[:2], images_of(2))
    torch.testing.assert_close(source.images(3, 9)[0], images_of(3, seed=1)[1:])


# References


def reference_of(name, features, data=None):
    config = samples_config("x", reference=str(name), batch_size=7, precision_recall_samples=100)
    return open_reference(config, data, features, (4, 4))


def test_statistics_of_a_reference_are_cached(cache, classifier, monkeypatch):
    features, data = open_features(classifier, CPU), BarsConfig()
    first = reference_of("train", features, data)
    assert reference_cache() == cache
    monkeypatch.setattr("onescan.experiments.evaluation.images.DataSource.images", None)
    again = reference_of("train", features, data)
    assert torch.equal(first.pooled.covariance, again.pooled.covariance)
    assert torch.equal(first.rows, again.rows)
    assert first.frequencies == again.frequencies == (8, 8, 8)
    assert first.real == again.real
    for name, other in (("train", BarsConfig(examples=21)), ("test", data)):
        with pytest.raises(TypeError):
            reference_of(name, features, other)


def test_cached_statistics_depend_on_features_and_files(tmp_path, cache, classifier):
    folder, features = write_pngs(tmp_path / "x", images_of(9)), open_features(classifier, CPU)
    first = reference_of(folder, features)
    reference_of(folder, open_features(scripted(tmp_path / "x.pt", Alone()), CPU))
    assert len(list(cache.iterdir())) == 2
    write_pngs(folder / "more", images_of(2, seed=5))
    assert (first.real.count, reference_of(folder, features).real.count) == (9, 11)


def test_damaged_statistics_are_computed_again(cache, classifier, caplog):
    features, data = open_features(classifier, CPU), BarsConfig()
    first = reference_of("train", features, data)
    (entry,) = cache.iterdir()
    state = entry / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1] + b"\x01")
    again = reference_of("train", features, data)
    assert "state.safetensors is damaged" in caplog.text
    assert torch.equal(first.pooled.covariance, again.pooled.covariance)
    assert torch.equal(first.rows, again.rows)


@pytest.mark.parametrize("with_images", [False, True])
def test_statistics_of_adm_are_read(tmp_path, with_images):
    features = open_features(scripted(tmp_path / "tuple.pt", Tuple()), CPU)
    images = images_of(40)
    given = reference_of(adm_file(tmp_path / "adm.npz", images, with_images), features)
    own = reference_of(write_pngs(tmp_path / "x", images), features)
    assert frechet_distance(given.pooled, own.pooled).distance == pytest.approx(0, abs=1e-6)
    assert frechet_distance(given.spatial, own.spatial).distance == pytest.approx(0, abs=1e-6)
    assert (given.real.count, given.pooled.samples) == (None, None)
    assert torch.equal(given.rows, own.rows) if with_images else given.rows is None


def test_images_of_an_npz_file_are_a_reference(tmp_path, classifier):
    features = open_features(classifier, CPU)
    npz = reference_of(write_npz(tmp_path / "x.npz", images_of(9)), features)
    assert torch.equal(
        npz.rows, reference_of(write_pngs(tmp_path / "x", images_of(9)), features).rows
    )


@pytest.mark.parametrize(
    ("name", "arrays", "message"),
    [
        ("x.npz", {"mu": np.zeros(16), "sigma": np.eye(16)}, "statistics of Inception-v3"),
        ("x.npz", {"x": np.zeros(3)}, "neither arr_0 nor mu and sigma"),
        ("no.npz", {}, "'no.npz', which does not exist"),
        ("train", {}, "'train', but there is no run"),
        ("x.npz", {"arr_0": np.zeros((3, 4, 4, 3), np.uint8)}, "3 images, expected more than 3"),
    ],
)
def test_references_that_do_not_fit_are_rejected(tmp_path, classifier, name, arrays, message):
    np.savez(tmp_path / "x.npz", **arrays)
    name = tmp_path / name if name == "x.npz" else name
    with pytest.raises(ValueError, match=f"reference is .*{message}"):
        reference_of(name, open_features(classifier, CPU))


@pytest.mark.parametrize("mean", [np.zeros(3), np.zeros(16)])
def test_statistics_of_other_sizes_are_rejected(tmp_path, mean):
    features = open_features(scripted(tmp_path / "tuple.pt", Tuple()), CPU)
    np.savez(tmp_path / "odd.npz", mu=mean, sigma=np.zeros((3, 3)))
    with pytest.raises(ValueError, match=rf"mu is \({len(mean)},\) and sigma \(3, 3\)"):
        reference_of(tmp_path / "odd.npz", features)


def test_statistics_that_are_not_finite_are_rejected(tmp_path):
    features = open_features(scripted(tmp_path / "tuple.pt", Tuple()), CPU)
    size = features.sizes((4, 4)).pooled
    np.savez(tmp_path / "nan.npz", mu=np.full(size, np.nan), sigma=np.eye(size))
    with pytest.raises(ValueError, match=r"reference is .*nan\.npz.* mu or sigma is not finite"):
        reference_of(tmp_path / "nan.npz", features)


def test_a_reference_needs_enough_readable_images(tmp_path, classifier):
    for split in ("train", "test"):
        for name in ("a", "b"):
            folder = write_pngs(tmp_path / "x" / split / name, images_of(2))
            (folder / "damaged.png").write_bytes(b"no image")
    data = ImageDatasetConfig(
        path=str(tmp_path / "x"), image_size=(4, 4), on_error="skip", train_crop=None
    )
    features = open_features(classifier, CPU)
    assert reference_of("train", features, data).real.count == 4
    for file in (tmp_path / "x" / "train" / "a").glob("*.png"):
        file.write_bytes(b"no image")
    with pytest.raises(ValueError, match="reference is 'train', which has 2 images"):
        reference_of("train", features, data)


def test_sizes_of_samples_are_those_of_upright_images(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (8, 4)).save(tmp_path / "0.jpg", exif=exif)
    Image.new("RGB", (4, 8)).save(tmp_path / "1.png")
    Image.new("RGB", (8, 4)).save(tmp_path / "2.tiff", exif=exif)
    source = FolderSource(tmp_path)
    assert source.size == (8, 4)
    assert source.images(0, 3)[0].shape == (3, 3, 8, 4)
    Image.new("RGB", (4, 8)).save(tmp_path / "3.jpg", exif=exif)
    with pytest.raises(ValueError, match=r"3\.jpg has size \(4, 8\), but .*0\.jpg has \(8, 4\)"):
        FolderSource(tmp_path).images(0, 4)


def test_files_beside_samples_are_counted(tmp_path, caplog):
    for name in ("0.png", "1.png"):
        Image.new("RGB", (8, 4)).save(tmp_path / name)
    (tmp_path / "2.heic").touch()
    assert len(FolderSource(tmp_path)) == 2
    assert "1 of 3 files in " in caplog.text
