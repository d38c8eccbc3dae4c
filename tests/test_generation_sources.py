"""What generated images are judged by: features, sources of images, references."""

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
    saved_classifier,
    saved_denoiser,
    saved_run,
    scripted,
    write_npz,
    write_pngs,
)

from onescan.data.images import to_bytes
from onescan.evaluation.generation.features import fitted, open_features
from onescan.evaluation.generation.folders import FolderSource, data_at
from onescan.evaluation.generation.npz import NpzSource
from onescan.evaluation.generation.reference import open_reference, reference_cache
from onescan.tasks import ImageClassificationConfig
from onescan.tasks.feature_distance import frechet_distance
from onescan.training.config import RunConfig
from onescan.training.loading import load


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONESCAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "generation"


@pytest.fixture
def classifier(tmp_path, cache):
    return saved_classifier(tmp_path)


@pytest.fixture
def denoiser(tmp_path, cache):
    return saved_denoiser(tmp_path)


# features


def test_a_classifiers_features_are_what_its_head_reads(classifier):
    features = open_features(classifier, CPU)
    images = images_of(5, channels=1)
    found = features(images)
    run = load(classifier)
    tokens = run.model.forward_features(run.format.standardize(images))
    torch.testing.assert_close(found.pooled, tokens[:, 0])
    assert torch.equal(tokens[:, 0], run.model.pooled(tokens))
    shares = run.model(run.format.standardize(images)).softmax(dim=1)
    torch.testing.assert_close(found.probabilities, shares)
    torch.testing.assert_close(found.spatial.view(5, 7, 4), tokens[:, 1:, :7].transpose(1, 2))
    assert (features.name, features.is_inception) == ("runs/judge", False)
    assert features.class_names == NAMES


def test_a_second_heads_token_is_a_feature_too(tmp_path, cache):
    model = replace(CLASSIFIER, distillation_token=True)
    task = ImageClassificationConfig()
    run = RunConfig(name="two", model=model, data=BarsConfig(), task=task)
    found = open_features(saved_run(tmp_path / "two", run), CPU)(images_of(2, channels=1))
    assert found.pooled.shape == (2, 16)
    assert found.spatial.shape == (2, 7 * 4)


def test_large_maps_are_averaged_for_spatial_features(tmp_path, cache):
    run = RunConfig(
        name="fine",
        model=replace(CLASSIFIER, patch_size=(1, 1)),
        data=BarsConfig(),
        task=ImageClassificationConfig(),
    )
    features = open_features(saved_run(tmp_path / "fine", run), CPU)
    assert features(images_of(2, channels=1)).spatial.shape == (2, 7 * 16)
    features.format = replace(features.format, height=36, width=20)
    assert features(images_of(2, channels=1)).spatial.shape == (2, 7 * 17 * 17)


def test_images_are_brought_to_what_the_classifier_reads(classifier):
    features = open_features(classifier, CPU)
    colour = images_of(3, size=8)
    assert features(colour).pooled.shape == (3, 8)
    grey = (colour * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
    torch.testing.assert_close(features(colour), features(grey))


def test_fitted_images_stay_as_they_are_where_they_fit():
    images = images_of(2)
    assert fitted(images, channels=3, height=4, width=4) is images
    assert fitted(images_of(2, channels=1), channels=3, height=4, width=4).shape == images.shape
    enlarged = fitted(images.round(), channels=3, height=32, width=32)
    assert 0 <= enlarged.min() <= enlarged.max() <= 1
    with pytest.raises(ValueError, match="images have 4 channels, expected 3, or 1 for grey"):
        fitted(torch.zeros(1, 4, 4, 4), channels=3, height=4, width=4)


def test_other_weights_have_another_fingerprint(tmp_path, classifier):
    run = load(classifier).config
    first = open_features(classifier, CPU).fingerprint
    other = saved_run(tmp_path / "other", run, seed=9)
    same = saved_run(tmp_path / "same", run)
    assert open_features(other, CPU).fingerprint != first
    assert open_features(same, CPU).fingerprint == first


def test_nvidias_file_is_known_by_its_schema(tmp_path):
    features = open_features(scripted(tmp_path / "inception.pt", Scripted()), CPU)
    images = images_of(4)
    found = features(images)
    pixels = images.mean(dim=1).flatten(1)
    torch.testing.assert_close(found.pooled, pixels)
    torch.testing.assert_close(found.probabilities, (3 * pixels[:, :5]).softmax(dim=1))
    assert found.spatial is None
    assert (features.name, features.is_inception) == ("inception.pt", True)


def test_grey_images_are_shown_in_three_channels(tmp_path):
    features = open_features(scripted(tmp_path / "alone.pt", Alone()), CPU)
    assert features(images_of(2, channels=1)).pooled.shape == (2, 48)


class Failing(torch.nn.Module):
    def forward(self, images):
        return images.view(7, 11)


def test_a_module_that_fails_is_told_in_a_sentence(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(Failing()).save(str(tmp_path / "failing.pt"))
    features = open_features(tmp_path / "failing.pt", CPU)
    with pytest.raises(ValueError, match=r"failing.pt', which fails on \(2, 3, 4, 4\) bytes"):
        features(torch.zeros(2, 3, 4, 4))


def test_a_module_may_give_a_tuple(tmp_path):
    features = open_features(scripted(tmp_path / "tuple.pt", Tuple()), CPU)
    images = images_of(4)
    found = features(images)
    torch.testing.assert_close(found.pooled, images.mean(dim=1).flatten(1))
    torch.testing.assert_close(found.spatial, images[:, 0].flatten(1))
    torch.testing.assert_close(found.probabilities, images[:, 0, 0].softmax(dim=1))


def test_a_module_may_give_pooled_features_alone(tmp_path):
    found = open_features(scripted(tmp_path / "alone.pt", Alone()), CPU)(images_of(2))
    assert found.pooled.shape == (2, 48)
    assert found.spatial is None
    assert found.probabilities is None


def test_what_gives_no_features_is_refused(tmp_path):
    features = open_features(scripted(tmp_path / "wrong.pt", Wrong()), CPU)
    with pytest.raises(ValueError, match=r"gave \(\) for 2 images, expected features \[B, F\]"):
        features(images_of(2))


def test_files_that_are_no_features_are_refused(tmp_path, denoiser):
    (tmp_path / "damaged.pt").write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"damaged.pt', which is no TorchScript file, or a damag"):
        open_features(tmp_path / "damaged.pt", CPU)
    with pytest.raises(FileNotFoundError, match="features is 'nowhere', where there is nothing"):
        open_features("nowhere", CPU)
    with pytest.raises(ValueError, match="a Denoiser, expected an ImageClassifier"):
        open_features(denoiser, CPU)


# sources


@pytest.mark.parametrize("store", [np.savez, np.savez_compressed], ids=["plain", "compressed"])
def test_an_npz_is_read_piece_by_piece(tmp_path, store):
    images = images_of(9)
    arrays = to_bytes(images).permute(0, 2, 3, 1).numpy()
    store(tmp_path / "x.npz", arrays, np.arange(9) % 3)
    source = NpzSource(tmp_path / "x.npz")
    assert (len(source), source.size) == (9, (4, 4))
    for start, stop in ((0, 4), (4, 7), (7, 12), (2, 5)):
        found, labels = source.images(start, stop)
        torch.testing.assert_close(found, images[start:stop], rtol=0, atol=0)
        assert labels.tolist() == [i % 3 for i in range(9)][start:stop]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"other": np.zeros(3)}, "has no arr_0"),
        ({"arr_0": np.zeros((2, 4, 4, 3))}, r"holds arr_0 \(2, 4, 4, 3\) of float64"),
        ({"arr_0": np.zeros((2, 4, 4), dtype=np.uint8)}, r"holds arr_0 \(2, 4, 4\) of uint8"),
        (
            {"arr_0": np.zeros((2, 4, 4, 3), dtype=np.uint8), "arr_1": np.arange(3)},
            r"holds arr_1 \(3,\), expected a label for each image",
        ),
    ],
    ids=["none", "floats", "flat", "labels"],
)
def test_other_arrays_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        NpzSource(tmp_path / "x.npz")


def test_a_damaged_npz_is_refused(tmp_path):
    path = write_npz(tmp_path / "x.npz", images_of(9))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"x.npz is no npz file, or is damaged"):
        NpzSource(path)


def test_an_npz_of_pickles_runs_nothing(tmp_path):
    np.savez(tmp_path / "x.npz", arr_0=np.array([{}, print], dtype=object))
    with pytest.raises(ValueError, match="holds arr_0"):
        NpzSource(tmp_path / "x.npz")


def test_a_folder_of_images_is_read_in_order(tmp_path):
    images = images_of(5)
    source = FolderSource(write_pngs(tmp_path / "x", images))
    found, labels = source.images(1, 4)
    torch.testing.assert_close(found, images[1:4], rtol=0, atol=0)
    assert labels is None
    assert (len(source), source.size) == (5, (4, 4))


def test_a_folder_of_several_sizes_is_refused_as_samples(tmp_path):
    folder = write_pngs(tmp_path / "x", images_of(2))
    Image.new("RGB", (6, 5)).save(folder / "z.png")
    with pytest.raises(ValueError, match=r"z.png has 5 x 6 pixels, and .*000.png has 4 x 4"):
        FolderSource(folder).images(0, 3)


def test_a_damaged_image_is_named(tmp_path):
    folder = write_pngs(tmp_path / "x", images_of(2))
    (folder / "001.png").write_bytes((folder / "001.png").read_bytes()[:60])
    with pytest.raises(ValueError, match=r"001.png cannot be read as an image"):
        FolderSource(folder).images(0, 2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no images"):
        FolderSource(tmp_path / "empty")


def test_reference_images_are_cut_to_their_middle(tmp_path):
    image = torch.zeros(1, 3, 4, 8)
    image[..., 2:6] = 1
    (found, _) = data_at(str(write_pngs(tmp_path / "x", image)), (4, 4)).images(0, 1)
    torch.testing.assert_close(found, torch.ones(1, 3, 4, 4))


def test_folders_of_classes_are_read_whole(tmp_path):
    write_pngs(tmp_path / "x" / "dog", images_of(3, seed=1))
    write_pngs(tmp_path / "x" / "cat", images_of(2))
    source = data_at(str(tmp_path / "x"), (4, 4))
    images, labels = source.images(0, 5)
    assert source.class_names == ("cat", "dog")
    assert labels.tolist() == [0, 0, 1, 1, 1]
    torch.testing.assert_close(images[:2], images_of(2))
    torch.testing.assert_close(source.images(3, 9)[0], images_of(3, seed=1)[1:])


# references


def reference_of(name, features, data=None):
    return open_reference(name, data, features, size=(4, 4), rows=100, batch=7, device=CPU)


def test_a_reference_is_summed_up_once(cache, classifier, monkeypatch):
    features, data = open_features(classifier, CPU), BarsConfig()
    first = reference_of("train", features, data)
    assert reference_cache() == cache
    monkeypatch.setattr("onescan.evaluation.generation.folders.DataSource.images", None)
    again = reference_of("train", features, data)
    assert torch.equal(first.pooled.covariance, again.pooled.covariance)
    assert torch.equal(first.rows, again.rows)
    assert first.frequencies.tolist() == again.frequencies.tolist() == [8, 8, 8]
    assert first.real == again.real
    for other in ({"examples": 21},):
        with pytest.raises(TypeError):
            reference_of("train", features, BarsConfig(**other))
    with pytest.raises(TypeError):
        reference_of("test", features, data)


def test_other_features_make_another_reference(tmp_path, cache, classifier):
    data = BarsConfig()
    reference_of("train", open_features(classifier, CPU), data)
    reference_of("train", open_features(scripted(tmp_path / "x.pt", Alone()), CPU), data)
    assert len(list(cache.iterdir())) == 2


def test_a_changed_folder_makes_another_reference(tmp_path, cache, classifier):
    folder, features = write_pngs(tmp_path / "x", images_of(9)), open_features(classifier, CPU)
    first = reference_of(str(folder), features)
    write_pngs(folder / "more", images_of(2, seed=5))
    second = reference_of(str(folder), features)
    assert (first.real.count, second.real.count) == (9, 11)


@pytest.mark.parametrize("file", ["state.safetensors", "features.bin"])
def test_a_damaged_reference_is_made_anew(cache, classifier, caplog, file):
    features, data = open_features(classifier, CPU), BarsConfig()
    first = reference_of("train", features, data)
    rows = first.rows.clone()  # of a file that changes
    (entry,) = cache.iterdir()
    (entry / file).write_bytes(b"no")
    again = reference_of("train", features, data)
    assert "made anew" in caplog.text
    assert torch.equal(first.pooled.covariance, again.pooled.covariance)
    assert torch.equal(rows, again.rows)


@pytest.mark.parametrize("pixels_too", [False, True], ids=["moments", "both"])
def test_adms_statistics_are_read_as_they_are(tmp_path, cache, pixels_too):
    features = open_features(scripted(tmp_path / "tuple.pt", Tuple()), CPU)
    images = images_of(40)
    given = reference_of(str(adm_file(tmp_path / "adm.npz", images, pixels_too)), features)
    folder = write_pngs(tmp_path / "x", images)
    own = reference_of(str(folder), features)
    assert frechet_distance(given.pooled, own.pooled).distance == pytest.approx(0, abs=1e-6)
    assert frechet_distance(given.spatial, own.spatial).distance == pytest.approx(0, abs=1e-6)
    assert given.real.count is None
    assert given.pooled.samples is None
    if pixels_too:
        assert torch.equal(given.rows, own.rows)
    else:
        assert given.rows is None


def test_images_in_an_npz_are_a_reference(tmp_path, classifier):
    features = open_features(classifier, CPU)
    npz = reference_of(str(write_npz(tmp_path / "x.npz", images_of(9))), features)
    folder = reference_of(str(write_pngs(tmp_path / "x", images_of(9))), features)
    assert torch.equal(npz.rows, folder.rows)


def test_references_that_do_not_fit_are_refused(tmp_path, classifier):
    features = open_features(classifier, CPU)
    adm = adm_file(tmp_path / "adm.npz", images_of(40), pixels_too=False)
    with pytest.raises(ValueError, match="holds statistics of Inception's features, but features"):
        reference_of(str(adm), features)
    np.savez(tmp_path / "none.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match="which has neither arr_0 nor mu and sigma"):
        reference_of(str(tmp_path / "none.npz"), features)
    with pytest.raises(ValueError, match=r"reference is 'no.npz', where there is no file"):
        reference_of("no.npz", features)
    with pytest.raises(ValueError, match="reference is 'train', but the images are no run's"):
        reference_of("train", features)
    inception = open_features(scripted(tmp_path / "tuple.pt", Tuple()), CPU)
    np.savez(tmp_path / "odd.npz", mu=np.zeros(3), sigma=np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"whose mu is \(3,\) and sigma \(2, 2\)"):
        reference_of(str(tmp_path / "odd.npz"), inception)
