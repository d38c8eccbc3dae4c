"""Image files of every kind: orientation, range, transparency and damaged metadata."""

import io
import os
import re
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps, PngImagePlugin
from torch.testing import assert_close

from onescan.experiments.data.image_grid import image_bytes
from onescan.inputs import ArrayFormat, ImageFormat, read_image
from onescan.inputs import image_files as images
from onescan.inputs.image_files import read_header
from onescan.inputs.images import check_constants, check_unit_range, to_bytes, unit_pixels

GRAY = ImageFormat(channels=1, height=6, width=5, mean=(0.0,), std=(1.0,))
COLOR = ImageFormat(channels=3, height=6, width=5, mean=(0.0,) * 3, std=(1.0,) * 3)
XMP = '<x:xmpmeta><rdf:Description tiff:Orientation="{}"/></x:xmpmeta>'


def sized(height, width, channels=3):
    constants = {"mean": (0.0,) * channels, "std": (1.0,) * channels}
    return ImageFormat(channels=channels, height=height, width=width, **constants)


def noise(*shape, dtype=np.uint8):
    largest = np.iinfo(dtype).max
    return np.random.default_rng(0).integers(0, largest, shape, dtype=dtype, endpoint=True)


def with_orientation(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def chunk(name, data):
    check = zlib.crc32(name + data)
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)


def png(width, depth, colors, rows, *before, after=b""):
    """Write a PNG file from packed rows and further chunks."""
    header = struct.pack(">IIBBBBB", width, len(rows), depth, colors, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    parts = (chunk(b"IHDR", header), *before, chunk(b"IDAT", pixels), after, chunk(b"IEND", b""))
    return io.BytesIO(images.PNG_SIGNATURE + b"".join(parts))


def late(content):
    """Move the EXIF data of a PNG file behind its pixels."""
    at = content.index(b"eXIf") - 4
    end = at + 12 + int.from_bytes(content[at : at + 4], "big")
    return content[:at] + content[end:-12] + content[at:end] + content[-12:]


def saved(kind, orientation, size=(6, 5)):
    """Return an image file whose orientation is in its EXIF or XMP data."""
    image, file = Image.fromarray(noise(*size, 3)), io.BytesIO()
    name, _, variant = kind.partition(" ")
    options = {"lossless": True} if name == "WEBP" else {}
    if variant == "LZW":
        options["compression"] = "tiff_lzw"
    if variant != "XMP":
        options["exif"] = with_orientation(orientation)
    elif name == "PNG":
        info = PngImagePlugin.PngInfo()
        info.add_itxt("XML:com.adobe.xmp", XMP.format(orientation))
        options["pnginfo"] = info
    elif name == "TIFF":
        options["tiffinfo"] = {700: XMP.format(orientation).encode()}
    else:
        options["xmp"] = XMP.format(orientation).encode()
    image.save(file, name, **options)
    return late(file.getvalue()) if variant == "late" else file.getvalue()


KINDS = [
    *("JPEG", "JPEG XMP", "PNG", "PNG late", "PNG XMP", "WEBP", "WEBP XMP"),
    *("TIFF", "TIFF LZW", "TIFF XMP"),
]


@pytest.mark.sampled(34)
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", KINDS)
def test_images_are_turned_upright_once(kind, orientation, tmp_path):
    path = tmp_path / "image"
    path.write_bytes(saved(kind, orientation))
    with Image.open(path) as image:
        upright = np.array(ImageOps.exif_transpose(image))
    format, seen = sized(*upright.shape[:2]), []
    want = torch.from_numpy(upright / 255).float().permute(2, 0, 1)
    assert_close(read_image(path, format), want)
    assert_close(format.decode(io.BytesIO(path.read_bytes())).float() / 255, want)
    part = format.decode(path, lambda *size: seen.append(size) or (1, 1, 4, 4))
    same = sized(*upright.shape[:2]).decode(path, lambda *_: (1, 1, 4, 4))
    assert seen == [upright.shape[1::-1]]
    assert torch.equal(part, same)
    header = read_header(path)
    assert (header.height, header.width) == upright.shape[:2]
    assert header.is_upright == (orientation == 1)
    with Image.open(path) as image:  # opened, loaded, copied, or turned before
        assert_close(format.from_pil(image), want)
        assert_close(format.from_pil(image), want)
        assert_close(format.from_pil(ImageOps.exif_transpose(image)), want)
        assert_close(format.from_pil(image.copy()), want)
        assert_close(format.from_pil(image.convert("RGBA")), want)


def test_a_jpeg_that_the_caller_opened_is_left_as_it_is(tmp_path):
    Image.fromarray(noise(400, 300, 3)).save(tmp_path / "a.jpg")
    with Image.open(tmp_path / "a.jpg") as image:
        first = sized(10, 10).from_pil(image)
        assert image.size == (300, 400)
        assert torch.equal(sized(10, 10).from_pil(image), first)


def pixels_of(format, file):
    return format.decode(file) if isinstance(file, io.BytesIO) else read_image(file, format)


def tiff(array, bits=None, **tags):
    """Write an uncompressed little-endian TIFF file by hand, as Pillow writes few kinds."""
    bits = bits or array.dtype.itemsize * 8
    fields = {256: array.shape[1], 257: array.shape[0], 258: bits, 259: 1, 262: 1, 277: 1}
    fields |= {278: array.shape[0], 339: 1} | {int(tag[1:]): value for tag, value in tags.items()}
    data = array.tobytes()
    if bits == 12:
        pairs = array.reshape(-1, 2).astype(int)
        packed = [(a >> 4, (a & 15) << 4 | b >> 8, b & 255) for a, b in pairs]
        data = bytes(value for three in packed for value in three)
    fields |= {273: 8, 279: len(data)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, fields[tag]) for tag in sorted(fields))
    directory = struct.pack("<H", len(fields)) + entries + bytes(4)
    return io.BytesIO(b"II*\0" + struct.pack("<I", 8 + len(data)) + data + directory)


def pgm(array, largest, plain=False):
    height, width = array.shape
    head = f"P{2 if plain else 5} {width} {height} {largest}\n".encode()
    text = " ".join(map(str, array.flatten().tolist())).encode()
    return io.BytesIO(head + (text if plain else array.astype(">u2").tobytes()))


DEEP = noise(6, 4, dtype=np.uint16)
TWELVE = DEEP >> 4
WIDE = sized(6, 4, channels=1)


@pytest.mark.parametrize(
    ("file", "want"),
    [
        (png(4, 16, 0, [row.astype(">u2").tobytes() for row in DEEP]), DEEP / 65535),
        (tiff(DEEP), DEEP / 65535),
        (tiff(DEEP, t262=0), 1 - DEEP / 65535),  # 0 is white
        (tiff(TWELVE, bits=12), TWELVE / 4095),
        (pgm(DEEP, 65535), DEEP / 65535),
        (pgm(DEEP, 65535, plain=True), DEEP / 65535),
        (pgm(DEEP % 1001, 1000), DEEP % 1001 / 1000),
        (pgm(DEEP % 1001, 1000, plain=True), DEEP % 1001 / 1000),
    ],
    ids=["png", "tiff", "white is 0", "12 bits", "pgm", "plain pgm", "pgm to 1000", "plain"],
)
def test_the_file_tells_the_range_of_more_than_8_bits(file, want):
    pixels = WIDE.decode(file)
    assert pixels.dtype == torch.float32
    assert_close(pixels[0], torch.from_numpy(want).float(), atol=2e-5, rtol=0)


def test_big_endian_16_bits(tmp_path):
    Image.fromarray(DEEP.astype(">u2")).save(tmp_path / "a.tiff")
    assert_close(read_image(tmp_path / "a.tiff", WIDE)[0], torch.from_numpy(DEEP / 65535).float())


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        (tiff(DEEP.astype(np.int32) * 60, t339=2), "signed integers"),
        (tiff(DEEP.astype(np.uint32) * 60), "32-bit integers"),
        (tiff((DEEP >> 1).astype(np.int16), t339=2), "signed integers"),
        (tiff(noise(6, 4).astype(np.int8), t339=2), "signed integers"),
        (tiff(DEEP.astype(np.float32), t339=3), "floating point"),
    ],
    ids=["int32", "uint32", "int16", "int8", "float32"],
)
def test_pixels_of_unknown_range_are_refused(file, kind):
    with pytest.raises(ValueError, match=f"its pixels are {kind}, so their range is unknown"):
        WIDE.decode(file)
    with pytest.raises(ValueError, match="32-bit integers"):
        WIDE.from_pil(Image.fromarray(DEEP.astype(np.int32)))


def key(*values):
    return chunk(b"tRNS", struct.pack(f">{len(values)}H", *values))


@pytest.mark.parametrize(
    ("file", "want"),
    [
        (png(4, 1, 0, [b"\x50"], key(1)), [0.0, 0, 0, 0]),  # 0101
        (png(4, 1, 0, [b"\x50"], key(0)), [0.0, 1, 0, 1]),
        (png(4, 2, 0, [b"\x1b"], key(3)), [0, 1 / 3, 2 / 3, 0]),  # 0123
        (png(4, 4, 0, [b"\x05\xaf"], key(10)), [0, 1 / 3, 0, 1]),  # 0, 5, 10, 15
        (png(4, 8, 0, [bytes([0, 51, 102, 255])], key(102)), [0, 0.2, 0, 1]),
        (png(4, 16, 0, [struct.pack(">4H", 0, 257, 65534, 65535)], key(65535)), [0, 1 / 255, 1, 0]),
        (png(4, 8, 2, [bytes([0] * 3 + [51] * 3 + [9, 9, 8] + [9] * 3)], key(9, 9, 8)), None),
        (
            png(
                *(4, 16, 2),
                [struct.pack(">12H", *[0] * 3, *[0x3333] * 3, *[0x1234] * 3, *[0xFFFF] * 3)],
                key(0x1234, 0x1234, 0x1234),
            ),
            [0, 0.2, 0, 1],
        ),
    ],
)
def test_a_transparent_color_becomes_black(file, want):
    pixels = sized(1, 4).decode(file)
    pixels = unit_pixels(pixels)
    want = [0, 0.2, 0, 9 / 255] if want is None else want
    assert_close(pixels, torch.tensor(want).expand(3, 1, 4), atol=2e-5, rtol=0)


def transparent(mode):
    """Return an image of 5 x 6 white pixels in a mode, whose first column is transparent."""
    alpha = Image.fromarray(np.repeat([[0, 255, 255, 255, 255]], 6, axis=0).astype(np.uint8))
    if mode in ("P", "PA"):
        image = Image.fromarray(np.repeat([[1, 0, 0, 0, 0]], 6, axis=0).astype(np.uint8), "P")
        image.putpalette([255, 255, 255, 255, 0, 0])
        if mode == "PA":
            image = image.convert("PA")
            image.putalpha(alpha)
        return image
    image = Image.new("LA" if mode[0] == "L" else "RGBA", (5, 6), "white")
    image.putalpha(alpha)
    return image.convert(mode)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("mode", "kind", "options"),
    [
        *(("RGBA", kind, {}) for kind in ("PNG", "WEBP", "TIFF", "GIF")),
        ("LA", "PNG", {}),
        ("LA", "TIFF", {}),
        ("PA", "TIFF", {}),
        ("P", "PNG", {"transparency": 1}),
        ("P", "PNG", {"transparency": b"\xff\x00"}),
        ("P", "GIF", {"transparency": 1}),
        *((mode, None, {}) for mode in ("RGBA", "RGBa", "LA", "La", "PA")),
    ],
)
def test_transparent_pixels_become_black_in_every_mode(mode, kind, options, channels):
    image, file = transparent(mode), io.BytesIO()
    format = sized(6, 5, channels)
    if kind is None:
        pixels = format.from_pil(image)
    else:
        image.save(file, kind, **({"lossless": True} if kind == "WEBP" else {}), **options)
        pixels = unit_pixels(format.decode(file))
        assert read_header(file).has_alpha
    assert_close(pixels, torch.tensor([0.0, 1, 1, 1, 1]).expand(channels, 6, 5))


@pytest.mark.parametrize("mode", ["YCbCr", "LAB", "HSV", "CMYK", "RGBX"])
@pytest.mark.parametrize("channels", [1, 3])
def test_other_colors_are_converted(mode, channels):
    red = Image.new("RGB", (5, 6), (255, 0, 0))
    if mode == "LAB":
        from PIL import ImageCms

        profiles = [ImageCms.createProfile(name) for name in ("sRGB", "LAB")]
        red = ImageCms.applyTransform(red, ImageCms.buildTransform(*profiles, "RGB", "LAB"))
    else:
        red = red.convert(mode)
    want = [1.0, 0.0, 0.0] if channels == 3 else [0.299]
    pixels = sized(6, 5, channels).from_pil(red)
    assert_close(pixels[:, 0, 0], torch.tensor(want), atol=0.02, rtol=0)


def photo(kind, **options):
    file = io.BytesIO()
    Image.fromarray(noise(6, 5, 3)).save(file, kind, **options)
    return file.getvalue()


def segment(marker, data):
    return struct.pack(">BBH", 255, marker, len(data) + 2) + data


GARBAGE = b"garbagegarbage"
DAMAGED_CHUNKS = {
    "iCCP": chunk(b"iCCP", GARBAGE),
    "empty iCCP": chunk(b"iCCP", b""),
    "zTXt": chunk(b"zTXt", b"key\0\7" + GARBAGE),
    "gAMA": chunk(b"gAMA", b"1"),
    "pHYs": chunk(b"pHYs", b"1"),
    "cHRM": chunk(b"cHRM", b"1"),
    "sRGB": chunk(b"sRGB", b""),
    "short color": chunk(b"tRNS", b"1"),
    "color": chunk(b"tRNS", bytes(6))[:-4] + b"1234",
    "checksum": chunk(b"tEXt", b"key\0value")[:-4] + b"1234",
    "profile": chunk(b"tEXt", b"Raw profile type exif\0\nexif\n  9\nnot hexadecimal"),
}


@pytest.mark.filterwarnings("ignore")  # Pillow's, about damaged metadata
@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("name", DAMAGED_CHUNKS)
def test_damaged_chunks_of_a_png_file_are_ignored(name, place):
    content, begin = photo("PNG", exif=with_orientation(6)), 33
    begin = 33 if place == "before" else len(content) - 12
    damaged = content[:begin] + DAMAGED_CHUNKS[name] + content[begin:]
    want = sized(5, 6).decode(io.BytesIO(content))
    assert torch.equal(sized(5, 6).decode(io.BytesIO(damaged)), want)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "part",
    [
        segment(0xE1, b"Exif\0\0" + GARBAGE),
        segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + b"\xff\xfe" + GARBAGE),
        segment(0xE2, b"ICC_PROFILE\0"),
        segment(0xE2, b"MPF\0" + GARBAGE),
        segment(0xED, b"Photoshop 3.0\0" + b"8BIM" + GARBAGE),
        segment(0xE0, b"JFIF"),
        segment(0xEE, b"Adobe"),
    ],
    ids=["EXIF", "XMP", "ICC", "MPF", "Photoshop", "JFIF", "Adobe"],
)
def test_damaged_segments_of_a_jpeg_file_are_ignored(part):
    content = photo("JPEG")
    damaged = io.BytesIO(content[:2] + part + content[2:])
    assert torch.equal(COLOR.decode(damaged), COLOR.decode(io.BytesIO(content)))
    assert read_header(damaged)[:2] == (5, 6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(
    "options",
    [
        {"exif": b"Exif\0\0" + GARBAGE},
        {"exif": b"Exif\0\0II*\0\xff\xff\xff\xff"},
        {"exif": b"Exif\0\0"},
        {"icc_profile": GARBAGE},
        {"xmp": b"\xff\xfe" + GARBAGE},
    ],
)
def test_damaged_metadata_are_ignored(kind, options):
    lossless = {"lossless": True} if kind == "WEBP" else {}
    want = COLOR.decode(io.BytesIO(photo(kind, **lossless)))
    file = io.BytesIO(photo(kind, **lossless, **options))
    assert torch.equal(COLOR.decode(file), want)
    assert read_header(file).is_upright
    with Image.open(file) as image:
        assert_close(COLOR.from_pil(image), want.float() / 255)


@pytest.mark.filterwarnings("ignore")
def test_damaged_metadata_of_a_tiff_file_are_ignored():
    file = io.BytesIO()
    image = Image.fromarray(noise(6, 5, 3))
    image.save(file, "TIFF", tiffinfo={700: b"<xmp/>", 34665: 2**30})
    content = file.getvalue()
    at = content.index(struct.pack("<HH", 700, 1))
    numbers = content[:at] + struct.pack("<HHI", 700, 3, 3) + content[at + 8 :]  # not text
    want = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    for damaged in (content, numbers):
        assert torch.equal(COLOR.decode(io.BytesIO(damaged)), want)


def test_a_truncated_file_without_its_metadata_is_still_refused():
    content = photo("PNG")[:-40]
    for damaged in (content, content[:33] + DAMAGED_CHUNKS["iCCP"] + content[33:]):
        with pytest.raises(ValueError, match="cannot be read as an image"):
            COLOR.decode(io.BytesIO(damaged))


# Ranges of tensors


@pytest.mark.parametrize(
    ("dtype", "white"), [(torch.uint8, 255), (torch.uint16, 65535), (torch.bool, 1)]
)
def test_the_type_determines_the_range_of_pixels(dtype, white):
    for value in (0, white):
        pixels = torch.full((1, 6, 5), value).to(dtype)
        want = torch.full((1, 6, 5), float(value > 0))
        assert torch.equal(unit_pixels(pixels), want)
        assert torch.equal(GRAY.model_input(pixels), want)
        assert torch.equal(GRAY.model_input(pixels.numpy()), want)
        assert torch.equal(to_bytes(pixels), (want * 255).byte())
    ones = torch.ones(1, 6, 5)
    for floats in (ones, ones.half(), ones.double(), ones * 0.5):
        assert torch.equal(GRAY.model_input(floats).float(), floats.float())
    assert GRAY.model_input(ones.double()).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint32])
def test_integers_of_unknown_range_are_refused(dtype):
    with pytest.raises(ValueError, match=rf"pixels have type {dtype}, expected uint8"):
        GRAY.model_input(torch.ones(1, 6, 5).to(dtype))


@pytest.mark.parametrize("value", [255.0, 1.5, -1.0, float("nan"), float("inf")])
def test_floats_outside_the_range_are_refused(value):
    pixels = torch.zeros(1, 6, 5)
    pixels[0, 0, 0] = value
    with pytest.raises(ValueError, match=r"pixels are floats from .* expected floats from 0 to 1"):
        check_unit_range(pixels)
    with pytest.raises(ValueError, match="pixels are floats from"):
        GRAY.model_input(pixels)
    assert GRAY.standardize(pixels).shape == pixels.shape  # of values that are known to be right


def test_overshoots_of_an_interpolation_are_accepted():
    edges = (torch.arange(64).reshape(1, 1, 8, 8) % 3 // 2).float()
    larger = torch.nn.functional.interpolate(edges, scale_factor=3, mode="bicubic")
    assert larger.max() > 1.1
    assert torch.equal(GRAY.model_input(larger), larger)


def test_the_range_of_other_arrays_is_not_that_of_pixels():
    constants = {"channels": 1, "shape": (4,), "mean": (0.0,), "std": (1.0,)}
    for is_bytes in (False, None):
        values = torch.tensor([[-300.0, 0.0, 1.0, 4000.0]])
        format = ArrayFormat(**constants, is_bytes=is_bytes)
        assert torch.equal(format.model_input(values), values)
    with pytest.raises(ValueError, match="pixels are floats from -300 to 4000"):
        ArrayFormat(**constants, is_bytes=True).model_input(values)


@pytest.mark.parametrize("shape", [(2, 6, 5, 3), (2, 1, 6, 5), (6, 5), (3,), (2, 4, 6, 5), ()])
def test_other_shapes_are_refused(shape):
    message = re.escape(f"values has shape {shape}, expected [..., 3, *axes] with 2 axes")
    for values in (torch.zeros(shape), np.zeros(shape, np.uint8)):
        with pytest.raises(ValueError, match=message):
            COLOR.model_input(values)


def test_pil_images_are_resized_for_the_model(tmp_path):
    image = Image.fromarray(np.arange(768, dtype=np.uint8).reshape(16, 16, 3))
    image.save(tmp_path / "a.png")
    assert torch.equal(COLOR.model_input(image), read_image(tmp_path / "a.png", COLOR))


@pytest.mark.usefixtures("_unchecked")
def test_what_is_no_image_is_named():
    image = Image.new("L", (6, 5))
    array = ArrayFormat(channels=1, shape=(4,), mean=(0.0,), std=(1.0,))
    message = r"values is .*, expected an array or a tensor; onescan.inputs.read_image\(path, form"
    for values in ("a.png", [image]):
        with pytest.raises(ValueError, match=message):
            COLOR.model_input(values)
    with pytest.raises(ValueError, match=r"values is an Image, expected an array or a tensor$"):
        array.model_input(image)
    with pytest.raises(
        ValueError, match="path is an Image, expected the path of an image file; fo"
    ):
        read_image(image, COLOR)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_constants_are_finite(bad):
    for mean, std in (((bad,), (1.0,)), ((0.0,), (bad,))):
        with pytest.raises(ValueError, match="expected finite numbers"):
            check_constants(1, mean=mean, std=std)


def test_grids_take_bytes_and_floats():
    bytes_ = torch.tensor([[[[0, 51, 255]]]], dtype=torch.uint8)
    assert image_bytes(bytes_).flatten().tolist() == [0, 51, 255]
    assert torch.equal(image_bytes(bytes_ / 255), image_bytes(bytes_))


def test_a_pipe_is_no_image(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(ValueError, match="is not an image"):
        read_header(tmp_path / "a.png")


def test_16_bits_per_pixel_are_not_16_bits_per_channel():
    masks = struct.pack("<III", 0xF800, 0x07E0, 0x001F)
    header = struct.pack("<IiiHHIIiiII", 40, 2, 1, 1, 16, 3, 4, 0, 0, 0, 0)
    content = b"BM" + struct.pack("<IHHI", 70, 0, 0, 66) + header + masks + b"\xff\xff\0\0"
    assert not read_header(io.BytesIO(content)).has_16_bits
    assert COLOR.decode(io.BytesIO(content)).max() == 255


def test_long_doubles_become_float64():
    x = np.full((3, 6, 5), 0.5, dtype=np.longdouble)
    assert torch.equal(COLOR.model_input(x), COLOR.model_input(x.astype(np.float64)))
