"""The part of `onescan predict` for models that predict a class or values at each position."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onescan.checkpoint.files import check_writable, write_atomically
from onescan.cli.options import echo
from onescan.cli.readers import Sizes, images_at
from onescan.messages import plural, printable

if TYPE_CHECKING:
    from torch import Tensor

    from onescan.inference.loading import Checkpoint
    from onescan.inputs.targets import Target

Write = Callable[[Path], object]

ARRAY_FILES = (".npz", ".npy")
PNG_CLASSES = 256  # of a file with one byte per pixel


def predict_maps(
    checkpoint: "Checkpoint", inputs: Sequence[str], out: Path | None, sizes: Sizes
) -> None:
    """Predict a class or values at each position of images, arrays or volumes; print summaries.

    Args:
        checkpoint: The trained model.
        inputs: Image files and folders, files of arrays, or NIfTI files and folders of them.
        out: File for the maps of one file of arrays; folder for those of images, as .png files, and
            of volumes, as .nii.gz files.
        sizes: The number of windows per batch, if it is given.

    Raises:
        ValueError: If an input cannot be read, or `out` does not fit the inputs.
    """
    from onescan.inputs import VolumeFormat

    if isinstance(checkpoint.format, VolumeFormat):
        _predict_volumes(checkpoint, inputs, out, sizes)
        return
    of_arrays = all(Path(path).suffix in ARRAY_FILES for path in inputs)
    _check_out(checkpoint, inputs, out, of_arrays=of_arrays)
    (_predict_arrays if of_arrays else _predict_images)(checkpoint, inputs, out, sizes)


def _check_out(
    checkpoint: "Checkpoint", inputs: Sequence[str], out: Path | None, *, of_arrays: bool
) -> None:
    if not of_arrays and any(Path(path).suffix in ARRAY_FILES for path in inputs):
        raise ValueError("inputs contains images and arrays, expected only one kind")
    if out is None:
        return
    if of_arrays and out.suffix not in ARRAY_FILES:
        raise ValueError(f"out is '{out}', expected a name ending in .npz or .npy")
    if of_arrays:
        check_writable("out", out)
    if of_arrays and len(inputs) > 1:
        raise ValueError(f"out is '{out}', but inputs has {len(inputs)} files, expected one")
    if of_arrays and any(out.resolve() == Path(path).resolve() for path in inputs):
        raise ValueError(f"out is '{out}', which is the input, expected another name")
    if not of_arrays and checkpoint.target.kind != "class_map":
        raise ValueError(
            f"out is '{out}', but predicted values cannot be saved as .png files; leave out --out"
        )
    if not of_arrays:
        check_writable("out", out, folder=True)


def _predict_arrays(
    checkpoint: "Checkpoint", inputs: Sequence[str], out: Path | None, sizes: Sizes
) -> None:
    import numpy as np

    for path in inputs:
        maps = []
        for row, outputs in enumerate(_maps_of_arrays(checkpoint, path, sizes)):
            predicted = _predicted_map(outputs, checkpoint.target)
            echo(f"{printable(path)}[{row}]: {_summary(predicted, checkpoint)}")
            if out is not None:
                maps.append(_stored(predicted, checkpoint.target))
        if out is None:
            continue
        stacked = _stacked(maps)
        name = "classes" if checkpoint.target.kind == "class_map" else "values"

        def write(partial: Path, stacked: Any = stacked, name: str = name) -> None:
            with partial.open("wb") as file:  # np.save would add a suffix to a name
                if out.suffix == ".npy":
                    np.save(file, stacked)
                else:
                    np.savez_compressed(file, **{name: stacked})

        write_atomically(out, write)
        echo(f"{out}: {name} of shape {stacked.shape}, {stacked.dtype}")


def _maps_of_arrays(checkpoint: "Checkpoint", path: str, sizes: Sizes) -> "Iterator[Tensor]":
    """Yield the outputs [outputs, *sides] for each example of a file."""
    from onescan.experiments.data import Example
    from onescan.experiments.data.arrays import read_inputs
    from onescan.inference.dense import predict_map
    from onescan.inputs import GridFormat

    format, data = checkpoint.format, checkpoint.run.get("data")
    if not isinstance(format, GridFormat):
        raise ValueError(f"the model does not read arrays, such as {path}")
    layout = isinstance(data, dict) and bool(data.get("channels_first", False))
    examples = read_inputs(path, format, channels_first=layout, any_size=True)
    for row in range(len(examples)):
        stored = examples.read([Example(row)]).batch[0]
        try:
            yield predict_map(checkpoint, format.model_input(stored).float(), **sizes)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _predict_images(
    checkpoint: "Checkpoint", inputs: Sequence[str], out: Path | None, sizes: Sizes
) -> None:
    from onescan.inference.dense import map_picture, predict_file
    from onescan.inputs import ImageFormat

    if not isinstance(checkpoint.format, ImageFormat):
        raise ValueError(f"the model reads arrays (.npz or .npy files), not '{inputs[0]}'")

    def predict(file: Path) -> tuple[str, Write]:
        predicted = _predicted_map(predict_file(checkpoint, file, **sizes), checkpoint.target)
        return _summary(predicted, checkpoint), lambda target: map_picture(predicted).save(
            target, format="PNG"
        )

    files = list(images_at([Path(path) for path in inputs]))
    _predict_files(files, predict, out, lambda file: f"{file.stem}.png")


def _predict_volumes(
    checkpoint: "Checkpoint", inputs: Sequence[str], out: Path | None, sizes: Sizes
) -> None:
    from onescan.inference.dense import predict_volume
    from onescan.inputs.volumes import open_volume, volume_bytes, volume_stem

    if out is not None:
        check_writable("out", out, folder=True)

    def predict(file: Path) -> tuple[str, Write]:
        volume = open_volume(file)
        classes = _predicted_map(predict_volume(checkpoint, volume, **sizes), checkpoint.target)
        summary = _summary(classes, checkpoint, volume.voxel_ml)
        return summary, lambda target: target.write_bytes(volume_bytes(volume, classes))

    files = list(_volumes_at([Path(path) for path in inputs]))
    _predict_files(files, predict, out, lambda file: f"{volume_stem(file.name)}.nii.gz")


def _predict_files(
    files: Sequence[tuple[Path, bool]],
    predict: Callable[[Path], tuple[str, Write]],
    out: Path | None,
    name: Callable[[Path], str],
) -> None:
    """Predict maps of files one by one, print summaries, and write the maps to a folder.

    Args:
        files: Files, and whether they were found in a folder; those are skipped if they cannot be
            read.
        predict: Returns the summary of a map, and a function that writes it.
        out: The folder, if any.
        name: Returns the name of the file to write.

    Raises:
        ValueError: If no file can be read, or two files to write have the same name.
    """
    targets = {} if out is None else _targets(files, out, name)
    count = 0
    for file, is_in_folder in files:
        try:
            summary, write = predict(file)
        except (OSError, ValueError) as error:
            if not is_in_folder:
                raise
            echo(f"skipped: {printable(str(error))}")
            continue
        echo(f"{printable(str(file))}: {summary}")
        count += 1
        if file in targets:
            write_atomically(targets[file], write)
    if not count:
        raise ValueError("there is no readable file in inputs")
    if out is not None:
        echo(f"{out}: {plural(count, 'class map')}")


def _volumes_at(paths: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    """Yield files and the NIfTI files in folders, and whether they are in a folder."""
    from onescan.inputs.volumes import is_volume_name

    for path in paths:
        if not path.is_dir():
            yield path, False
            continue
        for file in sorted(path.rglob("*")):
            if is_volume_name(file.name) and not file.name.startswith("."):
                yield file, True


def _targets(
    files: Sequence[tuple[Path, bool]], out: Path, name: Callable[[Path], str]
) -> dict[Path, Path]:
    """Return the file to write for each input.

    Raises:
        ValueError: If it is the input itself, or the same for two inputs.
    """
    inputs: dict[Path, Path] = {}
    for file, _ in files:
        target = out / name(file)
        if target.resolve() == file.resolve():
            raise ValueError(
                f"out is '{out}', where {file} would be overwritten, expected another folder"
            )
        if target in inputs:
            raise ValueError(
                f"{inputs[target]} and {file} would both be written to {target}, expected inputs "
                "with different names"
            )
        inputs[target] = file
    return {file: target for target, file in inputs.items()}


def _predicted_map(outputs: "Tensor", target: "Target") -> "Tensor":
    """Return the class [*sides] of each position, or the values [values, *sides]."""
    return outputs.argmax(dim=0) if target.kind == "class_map" else outputs


def _summary(predicted: "Tensor", checkpoint: "Checkpoint", voxel_ml: float | None = None) -> str:
    """Return the share, and volume, of each class, or the range and mean of each value."""
    names, target = checkpoint.class_names, checkpoint.target
    if target.kind == "class_map":
        counts = predicted.flatten().bincount(minlength=len(names)).tolist()
        total = predicted.numel()
        shares = []
        for name, count in zip(names, counts, strict=True):
            volume = "" if voxel_ml is None else f" ({count * voxel_ml:.4g} ml)"
            shares += [f"{name} {count / total:.1%}{volume}"] * bool(count)
        return printable(", ".join(shares))
    from onescan.cli.predict import rounded

    rows = zip(names, predicted.flatten(1), target.std, strict=True)
    return printable(
        ", ".join(
            f"{name} {rounded(x.min().item(), std)} to {rounded(x.max().item(), std)}, mean "
            f"{rounded(x.mean().item(), std)}"
            for name, x, std in rows
        )
    )


def _stacked(maps: Sequence[Any]) -> Any:
    """Stack arrays. Smaller ones are padded: classes with 0, and values with NaN."""
    import numpy as np

    shape = np.max([array.shape for array in maps], axis=0)
    dtype = np.result_type(*maps)
    stacked = np.full((len(maps), *shape), np.nan if dtype.kind == "f" else 0, dtype)
    for row, array in enumerate(maps):
        inside: Any = (row, *map(slice, array.shape))
        stacked[inside] = array
    return stacked


def _stored(predicted: "Tensor", target: "Target") -> Any:
    """Return a map as an array: classes in the smallest type, a single value without its axis."""
    if target.kind == "class_map":
        return predicted.numpy().astype("uint8" if int(predicted.max()) < PNG_CLASSES else "uint16")
    values = predicted.movedim(0, -1).numpy()
    return values[..., 0] if len(predicted) == 1 else values
