"""Image datasets of a few pixels: class folders, parquet files, and a hub without a network."""

import io

import datasets
import pyarrow as pa
from PIL import Image
from pyarrow import parquet


def encoded(brightness):
    """Return the bytes of an image of one brightness, which identifies it."""
    file = io.BytesIO()
    Image.new("L", (4, 4), brightness).save(file, "PNG")
    return file.getvalue()


def write_folders(root, *names, count=2):
    """Write folders with images of brightness 0, 1, ..."""
    for name in names:
        (root / name).mkdir(parents=True, exist_ok=True)
        for place in range(count):
            (root / name / f"{place}.png").write_bytes(encoded(place))
    return str(root)


def write_parquet(path, labels, /, *, first=0, **columns):
    """Write a parquet file with images of brightness `first`, `first` + 1, ..."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": encoded(first + row), "path": None} for row in range(len(labels))]
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    labels = pa.array(labels, None if labels else pa.int64())
    rows = {"image": pa.array(images, kind), "label": labels, **columns}
    parquet.write_table(pa.table(rows), path, row_group_size=3)
    return str(path)


def damage(path, how):
    """Cut a parquet file in half, or overwrite its beginning."""
    content = bytearray(path.read_bytes())
    if how == "cut":
        del content[len(content) // 2 :]
    else:
        content[4:2000] = bytes(1996)
    path.write_bytes(content)


def serve_hub(monkeypatch, data, *splits):
    """Replace the hub by one dataset and return the list of calls that load it."""
    calls = []

    def load_dataset(path, name, *, split, streaming):
        calls.append((path, name, split, streaming))
        is_table = isinstance(data, datasets.Dataset)
        return data.to_iterable_dataset(num_shards=3) if streaming and is_table else data

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_: list(splits))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls
