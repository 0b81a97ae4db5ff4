"""The image processor that travels with a checkpoint: from an image file to the bytes that its model reads."""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from transformers import AutoConfig, AutoImageProcessor

from storage.digest import canonical_json, digest_bytes, digest_file
from storage.faults import first_line
from storage.remembered import DigestMemory
from tasks.caching import Source

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
MODES = {1: "L", 3: "RGB"}  # by the number of channels
PROBE_SIZE = (64, 48)  # width and height, not square: a processor may treat the two sides differently
REPRODUCED = 1e-5  # float32 rounds near 1e-6 of the normalized range; one byte is 1/255 of it at least


class ProcessorSource(Source):
    """An image processor in a local ``folder``; the digest covers its files and the model's config."""

    folder: str

    def current_digest(self) -> str:
        return _digest(Path(self.folder), DigestMemory().digest)


@dataclass(frozen=True, kw_only=True)
class Processor:
    """``process``: the checkpoint's own; ``mean``, ``std``: (C,), of pixels as shares of 255."""

    process: Any
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def pixels(self, image: Image.Image) -> np.ndarray:  # -> (C, H, W) uint8
        """Returns what the model reads of ``image`` before it is rescaled and normalized."""
        return self._processed(image, do_rescale=False, do_normalize=False)

    def _processed(self, image: Image.Image, **switches: bool) -> np.ndarray:
        converted = as_channels(image, len(self.mean))
        arguments = {"do_convert_rgb": False, "return_tensors": "np", **switches}
        array: np.ndarray = self.process(converted, **arguments)["pixel_values"][0]
        return array


def find_processor(
    folder: Path, *, digest: Callable[[Path], str] = digest_file, partly: bool = False
) -> ProcessorSource:
    """Returns the image processor in ``folder`` with its content digested.

    ``digest``: what a file's digest is taken from. ``partly``: one that is not there is named in ``lacks``. Errors:
    ``ValueError`` if there is none.
    """
    lacks = None
    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        if not partly:
            raise ValueError(f"{folder} holds no {PROCESSOR_FILES[0]}: save the model's image processor there")
        lacks = f"the image processor of {folder} is there"
    return ProcessorSource(folder=str(folder), digest=_digest(folder, digest), lacks=lacks)


def load_processor(source: ProcessorSource) -> Processor:
    """Returns the processor, tried on an image: (bytes / 255 - mean) / std is what it gives as a whole.

    Errors: ``ValueError`` for one that rescales by another factor, or does more than to resize, crop, rescale and
    normalize.
    """
    try:
        process = AutoImageProcessor.from_pretrained(source.folder, backend="pil")
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(f"{source.folder}: its image processor cannot be loaded: {first_line(error)}") from None
    factor = process.rescale_factor if process.do_rescale else 1.0
    if not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        raise ValueError(
            f"{source.folder}: its image processor rescales by {factor:g}, and only 1/255 is known here: "
            "save one with rescale_factor 1/255"
        )
    channels = _channels(source.folder)
    mean, std = (
        _for_each_channel(given if process.do_normalize else neutral, channels, source.folder)
        for given, neutral in ((process.image_mean, 0.0), (process.image_std, 1.0))
    )
    processor = Processor(process=process, mean=mean, std=std)
    _try(processor, source.folder)
    return processor


def copy_processor(source: ProcessorSource, folder: Path) -> None:
    """Puts the processor's own files into ``folder``."""
    for name in PROCESSOR_FILES:
        if (Path(source.folder) / name).is_file():
            shutil.copyfile(Path(source.folder) / name, folder / name)


def read_image(content: Path | bytes, place: str) -> Image.Image:
    """Returns an image decoded, upright.

    Errors: ``ValueError`` naming ``place`` if it cannot be, or if it has more than 8 bits a channel.
    """
    try:
        with Image.open(BytesIO(content) if isinstance(content, bytes) else content) as opened:
            opened.load()
            image = ImageOps.exif_transpose(opened)
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's fault, and may pass
            raise
        raise ValueError(f"{place} is no image that can be read ({first_line(error)}): mend or delete it") from None
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"{place} has more than 8 bits a channel (mode {image.mode}): save it with 8")
    return image


def as_channels(image: Image.Image, channels: int) -> Image.Image:
    """Returns ``image`` in grey or in colours, on white where it is transparent."""
    if "A" in image.getbands() or "transparency" in image.info:
        opaque = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", opaque.size, "white"), opaque)
    return image.convert(MODES[channels])


def _channels(folder: str) -> int:
    config = AutoConfig.from_pretrained(folder)
    channels = getattr(config, "num_channels", 3)
    if channels not in MODES:
        raise ValueError(f"{folder}: the model reads images of {channels} channels: 1 and 3 are known here")
    return int(channels)


def _for_each_channel(value: Any, channels: int, folder: str) -> tuple[float, ...]:
    values = tuple(float(v) for v in value) if isinstance(value, list | tuple) else (float(value),) * channels
    if len(values) != channels:
        raise ValueError(
            f"{folder}: the image processor normalizes {len(values)} channels, the model reads {channels}: "
            "save the processor that belongs to the model"
        )
    return values


def _try(processor: Processor, folder: str) -> None:
    width, height = PROBE_SIZE
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    pixels, expected = processor.pixels(image), processor._processed(image)
    mean, std = (np.asarray(values)[:, None, None] for values in (processor.mean, processor.std))
    if (
        pixels.dtype != np.uint8
        or pixels.shape != expected.shape
        or np.abs((pixels / 255 - mean) / std - expected).max() > REPRODUCED
    ):
        raise ValueError(
            f"{folder}: its image processor ({type(processor.process).__name__}) does more than to resize, crop, "
            "rescale and normalize: what the model reads cannot be kept as bytes"
        )


def _digest(folder: Path, digest: Callable[[Path], str]) -> str:
    names = (*PROCESSOR_FILES, "config.json")  # the config may choose the processor's class, and has the channels
    return digest_bytes(
        canonical_json({name: digest(folder / name) for name in names if (folder / name).is_file()}).encode()
    )
