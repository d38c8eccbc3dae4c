"""Commands that write images and latents: sample, encode."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from onescan.cli.options import (
    Argv,
    Checkpoint,
    Compute,
    Device,
    Imports,
    echo,
    import_files,
    parse,
    resumable,
)
from onescan.messages import printable


def sample(argv: Argv) -> None:
    """Generate images with a trained denoiser."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        checkpoint: Checkpoint
        """Run folder, its best.safetensors, zoo/NAME (see `onescan zoo`), or a folder saved by
        DenoiserPipeline.save_pretrained."""
        labels: tuple[str, ...] = ()
        """Classes to generate, by name or number; by default cycles through all."""
        num_images: int = 16
        """Images per class given by --labels; without --labels, images in total."""
        steps: int | None = None
        """Denoising steps per image; by default the run's, or 50."""
        guidance_scale: float | None = None
        """Scale of classifier-free guidance, 1 disables it; by default the run's, or 1."""
        sampler: str | None = None
        """ddpm, ddim, dpm or euler; by default the run's."""
        seed: int = 0
        """Random seed. Image i depends only on the seed and i, not on the number of images or the
        batch size."""
        size: tuple[int, int] | None = None
        """Height and width of the images; by default the training size."""
        batch_size: int = 64
        """Images per batch; affects memory, and results only by rounding."""
        out: Annotated[str, tyro.conf.arg(metavar="PATH")] = "samples.png"
        """NAME.png writes one grid, NAME.npz one uint8 array, and a folder one PNG per image."""
        vae: str | None = None
        """Folder or hub name of the VAE, if it has moved since the latents were encoded."""
        device: Device = "auto"
        compute: Compute
        imports: Imports = ()

    options = parse(Options, sample, argv)
    from onescan.experiments.training.distributed import Ranks, choose_device
    from onescan.experiments.training.sampling import (
        SampleConfig,
        check_out,
        default_sampler,
        load_pipeline,
        write_samples,
    )

    if not options.out:
        raise ValueError("out is empty, expected a file or folder name")
    out = Path(options.out)
    check_out(out)
    import_files(options.imports)
    default = default_sampler(options.checkpoint)
    steps, scale = options.steps, options.guidance_scale
    config = SampleConfig(
        num_images=options.num_images,
        steps=default.steps if steps is None else steps,
        guidance_scale=default.guidance_scale if scale is None else scale,
        seed=options.seed,
        size=options.size,
        batch_size=options.batch_size,
    )
    config.check()
    device = choose_device(options.device, Ranks())
    from onescan.integrations.diffusers import find_labels, parse_label

    pipeline = load_pipeline(options.checkpoint, sampler=options.sampler, vae=options.vae)
    parsed = [parse_label(argument, pipeline.names) for argument in options.labels]
    if parsed:
        classes = pipeline.num_classes
        labels = find_labels(parsed, pipeline.names, num_classes=classes)
        if classes in labels:  # the unconditional label, not a class
            raise ValueError(f"label {classes} is out of range, expected 0 to {classes - 1}")
        config = dataclasses.replace(config, labels=tuple(labels))
    with options.compute.applied():
        count = write_samples(pipeline.to(device), config, out, progress=True)
    echo(f"{out}: {count} image{'s' if count > 1 else ''}")


def encode(argv: Argv) -> None:
    """Encode an image dataset to VAE latents for training denoisers."""
    from onescan.experiments.data import ImageDatasetConfig
    from onescan.experiments.training.encode import EncodeConfig
    from onescan.experiments.training.encode import encode as encode_images

    @dataclass(frozen=True, kw_only=True)
    class Options:
        path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
        """Folder with one subfolder per class, parquet files, or hub dataset."""
        out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
        """Output folder, to be used as data.path of a run. An interrupted encoding resumes."""
        config: Annotated[EncodeConfig, tyro.conf.arg(name="")]
        image_size: int = 256
        """Height and width of the images, cropped from the center."""
        name: str | None = None
        """Configuration of a hub dataset."""
        train_split: str = "train"
        """Training split."""
        test_split: str | None = None
        """Test split; by default validation or test, or else a part of train_split."""
        test_fraction: float = 0.1
        """Fraction of each class held out if there is no test split."""
        image_column: str | None = None
        """Column of the images; by default the only image column."""
        label_column: str | None = None
        """Column of the labels; by default the only column of class labels, or the one named
        label."""
        on_error: Literal["raise", "skip"] = "raise"
        """On an unreadable image, stop (raise) or skip it (skip)."""
        workers: int | None = None
        """Data loading processes; by default one per core."""
        device: Device = "auto"

    options = parse(Options, encode, argv)
    shared = ("path", "name", "train_split", "test_split", "test_fraction", "image_column")
    data = ImageDatasetConfig(
        **{name: getattr(options, name) for name in (*shared, "label_column", "on_error")},
        image_size=(options.image_size, options.image_size),
        train_crop=None,
        test_crop=1.0,  # does not crop the shorter side, as in ADM and DiT
    )
    with resumable(options.out):
        notes = encode_images(
            data,
            options.config,
            options.out,
            device=options.device,
            workers=options.workers,
            progress=True,
        )
    for note in notes.notes:
        print(printable(f"note: {note}"), file=sys.stderr)
    latents, shards = notes.format, notes.shards
    train, test = (sum(sizes) for sizes in (shards.train, shards.test)) if shards else (0, 0)
    echo(
        f"{options.out}: {train:,} training and {test:,} test images, "
        f"as latents of {latents.channels} x {latents.height} x {latents.width}"
    )
