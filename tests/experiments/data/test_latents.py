"""Images encoded once by a VAE, and latents read from what was written."""

import json
import multiprocessing
import os
import signal
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from einops import rearrange
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_images import write_folders, write_parquet
from tiny_vae import CLASSES, SIZE, TEST, TRAIN, save_vae

from onescan import configs
from onescan.checkpoint.weights import save_weights
from onescan.cli import main
from onescan.experiments.data import Example, ImageDatasetConfig, derive_seed
from onescan.experiments.data.latents import (
    FLIPPED_MEAN,
    FLIPPED_STD,
    LABELS,
    MEAN,
    STD,
    LatentsConfig,
)
from onescan.experiments.tasks import BatchPlan
from onescan.experiments.training.data import Loader
from onescan.experiments.training.encode import EncodeConfig, Encoder, encode
from onescan.inputs.latents import LatentFormat, load_vae

diffusers = pytest.importorskip("diffusers")

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    return save_vae(tmp_path_factory.mktemp("vae"))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Colored noise, wider than high, in folders of splits and classes."""
    root = tmp_path_factory.mktemp("images")
    rng = torch.Generator().manual_seed(0)
    for split, count in (("train", TRAIN), ("test", TEST)):
        for name in CLASSES:
            (root / split / name).mkdir(parents=True)
            for place in range(count):
                pixels = torch.randint(256, (10, 14, 3), dtype=torch.uint8, generator=rng)
                Image.fromarray(pixels.numpy()).save(root / split / name / f"{place}.png")
    return str(root)


def source(path, **changes):
    fields = {"path": path, "image_size": (SIZE, SIZE), "train_crop": None, "test_crop": 1.0}
    return ImageDatasetConfig(**fields | changes)


def encoded(images, vae, out, *, on_error="raise", **changes):
    """Encode in shards of 4, 2 images at once."""
    config = EncodeConfig(
        **{"vae": vae, "shard_size": 4, "batch_size": 2, "dtype": "float32"} | changes
    )
    return encode(source(images, on_error=on_error), config, out, device="cpu", workers=0)


@pytest.fixture(scope="module")
def whole(images, vae, tmp_path_factory):
    """A read-only folder of latents in float32."""
    out = tmp_path_factory.mktemp("latents") / "whole"
    encoded(images, vae, out)
    return out


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def posteriors(images, vae, split, *, flipped=False):
    """Encode all images of a split at once: means, standard deviations, labels."""
    data = getattr(source(images).build(), split)
    pixels, labels = data.read([Example(place) for place in range(len(data))]).batch
    pixels = pixels.flip(-1) if flipped else pixels
    with torch.no_grad():
        posterior = (
            diffusers.AutoencoderKL.from_pretrained(vae).encode(pixels / 127.5 - 1).latent_dist
        )
    return posterior.mean, posterior.std, labels


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-5), ("float16", 2**-10), ("bfloat16", 2**-7)]
)
def test_shards_hold_the_posteriors_of_images_and_of_flipped_images(
    dtype, tolerance, images, vae, tmp_path
):
    encoded(images, vae, tmp_path, dtype=dtype)
    shards = [load_file(path) for path in sorted(tmp_path.glob("train-*"))]
    assert [len(shard[LABELS]) for shard in shards] == [4, 4, 2]
    for names, flipped in (((MEAN, STD), False), ((FLIPPED_MEAN, FLIPPED_STD), True)):
        *expected, labels = posteriors(images, vae, "train", flipped=flipped)
        assert torch.equal(torch.cat([shard[LABELS] for shard in shards]), labels)
        for name, values in zip(names, expected, strict=True):
            stored = torch.cat([shard[name] for shard in shards])
            assert stored.dtype == getattr(torch, dtype)
            torch.testing.assert_close(stored.float(), values, rtol=tolerance, atol=1e-5)
    assert sorted(load_file(tmp_path / "test-00000.safetensors")) == [LABELS, MEAN, STD]


def test_the_center_is_encoded(vae, tmp_path):
    for split in ("train", "test"):
        for name, brightness in (("dark", 0), ("light", 255)):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            wide = Image.new("RGB", (40, SIZE), "red")
            wide.paste(Image.new("RGB", (SIZE, SIZE), (brightness,) * 3), (16, 0))
            wide.save(tmp_path / "images" / split / name / "a.png")
    assert main(command(str(tmp_path / "images"), vae, tmp_path / "out")) == 0
    gray = torch.tensor([0, 255], dtype=torch.uint8)
    gray = rearrange(gray, "n -> n 1 1 1").expand(2, 3, SIZE, SIZE)
    mean, _ = Encoder(load_vae(vae), "float32", torch.device("cpu"))(gray)
    stored = load_file(tmp_path / "out" / "test-00000.safetensors")[MEAN]
    torch.testing.assert_close(stored, mean, rtol=1e-5, atol=1e-5)


def test_examples_without_a_seed_are_scaled_means(images, vae, whole):
    splits = LatentsConfig(path=str(whole)).build()
    assert splits.class_names == CLASSES
    assert splits.format == LatentFormat(
        channels=4, height=4, width=4, scale=0.5, shift=0.25, vae=vae
    )
    for split, count in (("train", 2 * TRAIN), ("test", 2 * TEST)):
        data = getattr(splits, split)
        assert len(data) == count
        mean, _, labels = posteriors(images, vae, split)
        latents, read = data.read([example for example, _ in data.examples(seed=None)]).batch
        torch.testing.assert_close(latents, (mean - 0.25) * 0.5, rtol=1e-5, atol=1e-5)
        assert torch.equal(read, labels)
        torch.testing.assert_close(splits.format.unscaled(latents), mean, rtol=1e-5, atol=1e-5)
        assert torch.equal(splits.format.model_input(latents), latents)


def test_a_seed_samples_the_posterior_of_the_image_or_of_the_flipped_image(images, vae, whole):
    data, place, draws = LatentsConfig(path=str(whole)).build().train, 7, 2000
    (latents, labels), failures = data.read([Example(place, seed) for seed in range(draws)])
    assert not failures
    assert set(labels.tolist()) == {1}
    ways = [posteriors(images, vae, "train", flipped=flipped)[:2] for flipped in (False, True)]
    normal = torch.stack([(data.format.unscaled(latents) - m[place]) / s[place] for m, s in ways])
    distance, way = normal.square().mean(dim=(2, 3, 4)).min(dim=0)
    assert distance.max() < 2
    assert 0.45 < way.float().mean() < 0.55
    for drawn in (normal[0, way == 0], normal[1, way == 1]):
        assert drawn.mean(dim=0).abs().max() < 0.2
        assert (drawn.std(dim=0) - 1).abs().max() < 0.15


def test_samples_depend_on_the_seed_and_the_format_survives_json(whole):
    config = LatentsConfig(path=str(whole), sample=True)
    assert configs.from_dict(LatentsConfig, configs.to_dict(config)) == config
    splits = config.build()
    assert configs.from_dict(LatentFormat, configs.to_dict(splits.format)) == splits.format
    examples = [Example(3, derive_seed("a")), Example(9, 2**64 - 1), Example(3, derive_seed("b"))]
    latents, labels = splits.train.read(examples).batch
    alone = torch.cat([splits.train.read([example]).batch[0] for example in reversed(examples)])
    assert torch.equal(latents, alone.flip(0))
    assert not torch.equal(latents[0], latents[2])
    assert latents.dtype == torch.float32
    assert labels.tolist() == [0, 1, 0]


def test_sampling_and_flipping_can_be_disabled(images, vae, whole):
    examples = [Example(4, seed) for seed in range(20)]
    both = LatentsConfig(path=str(whole), sample=False).build().train.read(examples).batch[0]
    assert len({latent.sum().item() for latent in both}) == 2
    one = LatentsConfig(path=str(whole), sample=False, flip=False).build().train
    mean = one.format.scaled(posteriors(images, vae, "train")[0][4:5])
    torch.testing.assert_close(one.read(examples).batch[0], mean.expand(20, -1, -1, -1))


def test_worker_processes_read_the_same(whole):
    data = LatentsConfig(path=str(whole)).build().train
    plan = [
        BatchPlan([example for example, _ in data.examples(seed=1, epoch=epoch)], None)
        for epoch in range(3)
    ]
    here = [data.read(batch.examples).batch for batch in plan]  # the files are open then
    loader = Loader(data, iter(plan), workers=2)
    for (latents, labels), batch in zip(here, loader, strict=True):
        assert torch.equal(latents, batch[0])
        assert torch.equal(labels, batch[1])
    sent = deepcopy(data)  # as for a spawned process
    assert torch.equal(sent.read(plan[0].examples).batch[0], here[0][0])


class Interrupted(Encoder):
    """Raises KeyboardInterrupt after `left` calls."""

    left = 0

    def __call__(self, images):
        Interrupted.left -= 1
        if Interrupted.left < 0:
            raise KeyboardInterrupt
        return super().__call__(images)


# Training images are also encoded flipped, so a shard of two batches takes four calls.
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("calls", "shards"), [(0, 0), (1, 0), (7, 1), (11, 3)])
def test_a_resumed_encoding_gives_the_same_bits(
    calls, shards, images, vae, whole, tmp_path, monkeypatch
):
    Interrupted.left = calls
    with monkeypatch.context() as patch:
        patch.setattr("onescan.experiments.training.encode.Encoder", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            encoded(images, vae, tmp_path)
    written = files(tmp_path)
    assert len(written) == 1 + shards
    with pytest.raises(ValueError, match="not finished"):
        LatentsConfig(path=str(tmp_path)).build()
    first_missing = min(
        files(whole).keys() - written.keys(), key=lambda name: (name[:2] == "te", name)
    )
    (tmp_path / f"{first_missing}.partial").write_bytes(b"half")  # as left by SIGKILL
    encoded(images, vae, tmp_path)
    assert files(tmp_path) == files(whole)


def save_or_be_killed(path, tensors, notes):
    if path.name == "train-00001.safetensors":
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # written, not yet in place
    save_weights(path, tensors, notes)


def test_a_killed_process_leaves_complete_shards(images, vae, whole, tmp_path, monkeypatch):
    given = (images, vae, tmp_path)
    process = multiprocessing.get_context("fork").Process(target=encoded, args=given)
    with monkeypatch.context() as patch:
        patch.setattr("onescan.experiments.training.encode.save_weights", save_or_be_killed)
        process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert sorted(files(tmp_path)) == [
        "latents.json",
        "train-00000.safetensors",
        "train-00001.safetensors.partial",
    ]
    first = tmp_path / "train-00000.safetensors"
    time = first.stat().st_mtime_ns
    encoded(*given)
    assert files(tmp_path) == files(whole)
    assert first.stat().st_mtime_ns == time  # a complete shard is kept


def test_another_encoding_is_refused(images, vae, whole, tmp_path):
    other = save_vae(tmp_path / "other", seed=1)
    before = files(whole)
    base = {"vae": vae, "shard_size": 4, "batch_size": 2, "dtype": "float32"}
    for fields, changes, message in (
        ({}, {"vae": other}, "vae_digest"),
        ({}, {"vae": other}, "format.vae is '.*vae.*' in the folder and '.*other' in this call"),
        ({}, {"flip": False}, "flip is True in the folder and False"),
        ({}, {"dtype": "float16"}, "dtype is 'float32' in the folder and 'float16'"),
        ({}, {"shard_size": 3}, "encoded.shard_size is 4 in the folder and 3"),
        ({}, {"precision": "bfloat16"}, "encoded.precision is 'float32' in the folder"),
        ({"image_size": (10, 10)}, {}, "format.height is 4 in the folder and 5"),
        ({"test_crop": None}, {}, "encoded.source.test_crop is 1.0 in the folder and None"),
        ({"train_split": "test", "test_split": "train"}, {}, "source.train_split is 'train'"),
    ):
        config = EncodeConfig(**base | changes)
        with pytest.raises(ValueError, match=message):
            encode(source(images, **fields), config, whole, device="cpu", workers=0)
    assert files(whole) == before


def test_other_folders_are_refused(images, vae, tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds 'note.txt' and no latents"):
        encoded(images, vae, tmp_path)
    with pytest.raises(ValueError, match="which is a file"):
        encoded(images, vae, tmp_path / "note.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


def test_unreadable_images_raise_or_are_skipped(vae, tmp_path):
    names = [f"{split}/{name}" for split in ("train", "test") for name in CLASSES]
    root = write_folders(tmp_path / "images", *names, count=3)
    for name in ("train/bird/1.png", "train/cat/1.png", "train/cat/2.png"):  # a batch is 2
        (tmp_path / "images" / name).write_bytes(b"none")
    with pytest.raises(ValueError, match=r"bird/1.png\) is not an image"):
        encoded(root, vae, tmp_path / "out")
    notes = encoded(root, vae, tmp_path / "out", on_error="skip")
    assert (notes.shards.train, notes.shards.test) == ((3, 0), (4, 2))
    data = LatentsConfig(path=str(tmp_path / "out")).build().train
    latents, labels = data.read([Example(place, 1) for place in range(3)]).batch
    assert latents.shape == (3, 4, 4, 4)
    assert labels.tolist() == [0, 0, 1]


def test_unusable_settings_are_refused(images, vae, tmp_path):
    (tmp_path / "empty").mkdir()
    gray = {"channels": 1, "mean": (0.5,), "std": (0.5,)}
    streams = write_parquet(tmp_path / "rows" / "train.parquet", [0, 1])
    write_parquet(tmp_path / "rows" / "test.parquet", [0, 1])
    stream = {"path": str(Path(streams).parent), "streaming": True, "class_names": CLASSES}
    for changes, fields, message in (
        ({"vae": "./nowhere"}, {}, "no such folder"),
        ({"vae": str(tmp_path / "empty")}, {}, "cannot load as an AutoencoderKL"),
        ({}, {"image_size": (9, 8)}, r"data.image_size is \(9, 8\), expected multiples of 2"),
        ({}, gray, "data.channels is 1, expected 3"),
        ({}, stream, "data.streaming is on, expected off"),
        ({"shard_size": 0}, {}, "shard_size is 0, expected .* above 0"),
        ({"batch_size": 0}, {}, "batch_size is 0, expected .* above 0"),
    ):
        config = EncodeConfig(**{"vae": vae, **changes})
        with pytest.raises(ValueError, match=message):
            encode(source(**{"path": images, **fields}), config, tmp_path / "out", workers=0)
        assert not (tmp_path / "out").exists()


def test_unusable_vaes_are_refused(images, vae, tmp_path):
    broken = save_vae(tmp_path / "broken")
    weights = Path(broken) / "diffusion_pytorch_model.safetensors"
    good = load_file(weights)
    zero = torch.zeros_like(good["quant_conv.weight"])
    for changed, message in (
        (
            {name: x for name, x in good.items() if "quant_conv" not in name},
            "it has 4 missing weights, such as post_quant_conv.bias",
        ),
        (
            good | {"quant_conv.weight": good["quant_conv.weight"] * torch.inf},
            "the latents are not finite",
        ),
        (
            good | {"quant_conv.weight": zero, "quant_conv.bias": torch.full((8,), 1e6)},
            "dtype is 'float16', which cannot represent all values of mean",
        ),
    ):
        save_file(changed, weights, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            encode(source(images), EncodeConfig(vae=broken), tmp_path / "out", workers=0)
    assert not list((tmp_path / "out").glob("*.safetensors"))


@pytest.fixture
def copied(whole, tmp_path):
    for name, content in files(whole).items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_missing_damaged_and_foreign_shards_are_named(copied):
    path = copied / "train-00001.safetensors"
    content, config = path.read_bytes(), LatentsConfig(path=str(copied))
    other = load_file(path)
    for broken, message in (
        (None, "is missing"),
        (content[:-1], "is damaged"),
        (content[:10], "is damaged"),
        (b"", "is damaged"),
        ((copied / "test-00000.safetensors").read_bytes(), "has no tensor 'mirr"),
        ((copied / "train-00002.safetensors").read_bytes(), "holds 2 images, expected 4"),
        ({MEAN: other[MEAN].half()}, r"mean is F16 \[4, 4, 4, 4\], exp"),
        ({STD: other[STD][:, :3]}, r"std is F32 \[4, 3, 4, 4\], expected F32 \[4, 4, 4, 4\]"),
        ({LABELS: torch.tensor(3)}, r"labels is I64 \[\]"),
    ):
        path.unlink(missing_ok=True)
        if isinstance(broken, dict):
            save_file(other | {name: tensor.contiguous() for name, tensor in broken.items()}, path)
        elif broken is not None:
            path.write_bytes(broken)
        with pytest.raises(ValueError, match=rf"train-00001.safetensors.* {message}"):
            config.build()
    save_file(other | {LABELS: torch.tensor([0, 0, 2, 1])}, path)
    data = config.build().train
    with pytest.raises(ValueError, match=r"00001.safetensors is damaged: image 2 has class 2"):
        data.read([Example(6)])
    (copied / "train-00002.safetensors").unlink()  # while the data is in use
    data.read([Example(0, 1)])
    with pytest.raises(ValueError, match=r"train-00002.safetensors is missing"):
        data.read([Example(9, 1)])


def test_damaged_notes(copied):
    config, path = LatentsConfig(path=str(copied)), copied / "latents.json"
    notes = json.loads(path.read_text())
    assert notes["encoded"]["source"]["path"].startswith("/")
    for text, message in (
        ("{", "is damaged"),
        ("[]", "is damaged: .* list"),
        (json.dumps(notes | {"version": 2}), "version 2, expected 1"),
        (json.dumps(notes | {"format": {}}), "format.channels is missing"),
        (None, r"has no latents\.json"),
    ):
        path.unlink() if text is None else path.write_text(text)
        with pytest.raises(ValueError, match=message):
            config.build()
    with pytest.raises(ValueError, match="no such folder"):
        LatentsConfig(path=str(copied / "nowhere")).build()


def test_flipped_images_that_were_not_encoded(images, vae, tmp_path):
    encoded(images, vae, tmp_path, flip=False)
    splits = LatentsConfig(path=str(tmp_path), vae="elsewhere").build()
    assert splits.format.vae == "elsewhere"
    assert splits.train.read([Example(0, 1)]).batch[0].shape == (1, 4, 4, 4)
    with pytest.raises(ValueError, match=r"data.flip is on, but"):
        LatentsConfig(path=str(tmp_path), flip=True).build()


def command(images, vae, out, *words):
    given = ["encode", images, "--vae", vae, "--out", str(out), "--image-size", str(SIZE)]
    return [*given, "--dtype", "float32", "--workers", "0", "--device", "cpu", *words]


def test_the_command_encodes(images, vae, whole, tmp_path, capsys):
    words = command(images, vae, tmp_path / "out", "--batch-size", "2", "--shard-size", "4")
    assert main(words) == 0
    assert capsys.readouterr().out == (
        f"{tmp_path / 'out'}: 10 training and 4 test images, as latents of 4 x 4 x 4\n"
    )
    shards = {name: content for name, content in files(whole).items() if name != "latents.json"}
    assert files(tmp_path / "out").items() >= shards.items()
    assert main([*words, "--no-flip"]) == 2
    assert "flip is True in the folder and False in this call" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "value"),
    [("scale", float("nan")), ("scale", 0.0), ("shift", float("inf")), ("height", 0)],
)
def test_formats_of_latents_are_checked(field, value):
    fields = {"channels": 4, "height": 4, "width": 4, "scale": 1.0, "vae": "vae"}
    with pytest.raises(ValueError, match=rf"{field} is {value}, expected"):
        LatentFormat(**{**fields, field: value})
