"""The images of the vision demo, all of them offline, and the small ViT that is trained on some.

The 1,797 handwritten digits of scikit-learn: 0 to 6 are the model's task, 7 to 9 are for transfer alone. Beside them
two kinds of unlabelled images for a diverse calibration pool: strokes drawn by the rule that made the digits (32 x 32
bits, counted in 4 x 4 blocks), and squares cut out of scikit-learn's two photographs. What is trained and held out is
decided by a hash of an image's number alone.
"""

import hashlib
import json
import logging
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from storage.digest import canonical_json, digest_bytes, digest_file, digest_folder
from storage.files import write_whole
from tasks.images import find_images, list_images
from tasks.processors import find_processor, load_processor

SOURCE_CLASSES = range(7)
STROKES, PHOTOS = 300, 300
PHOTO_SIDES = (24, 97)  # pixels
LOG = "training_log.json"
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DigitsTraining:
    """Everything that decides the vision demo's model; images have 3 channels, as those of common ViTs."""

    image_size: int = 16
    patch_size: int = 4
    hidden_size: int = 24
    intermediate_size: int = 48
    blocks: int = 6
    heads: int = 4
    epochs: int = 60
    batch: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    warmup_steps: int = 40
    label_smoothing: float = 0.05
    seed: int = 0


def write_images(folder: Path) -> dict[str, Path]:
    """Writes the demo's images below ``folder`` and returns their folders by name.

    ``train``, ``validation``, ``test``: digits 0 to 6; ``transfer-train``, ``transfer-test``: digits 7 to 9, in halves;
    ``strokes``, ``photos``, and ``validation-unlabelled``, the images of ``validation``: without labels. Files that are
    there with the right content are left alone.
    """
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        split = split_of(number, int(label))
        _write(folder / split / str(label) / f"{number:04}.png", _grey(image))
        if split == "validation":
            _write(folder / "validation-unlabelled" / f"{number:04}.png", _grey(image))
    for number, image in enumerate(strokes(STROKES)):
        _write(folder / "strokes" / f"{number:04}.png", _grey(image))
    for number, image in enumerate(photo_squares(PHOTOS)):
        _write(folder / "photos" / f"{number:04}.png", image)
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_dir()}


def split_of(number: int, label: int) -> str:
    """Returns the set that digit ``number`` belongs to: 70 % train, 10 % validation, 20 % test; halves for transfer."""
    percent = int.from_bytes(hashlib.sha256(f"digit {number}".encode()).digest()[:8], "big") % 100
    if label not in SOURCE_CLASSES:
        return "transfer-train" if percent < 50 else "transfer-test"
    return "train" if percent < 70 else "validation" if percent < 80 else "test"


def strokes(count: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Yields images (8, 8) of values from 0 to 16: three or four bent strokes each, drawn as the digits were."""
    generator = np.random.default_rng(seed)
    places = np.stack(np.meshgrid(np.arange(32), np.arange(32), indexing="ij"), axis=-1)  # (32, 32, 2)
    along = np.linspace(0, 1, 40)[:, None]
    for _ in range(count):
        bits = np.zeros((32, 32), dtype=bool)
        for _ in range(generator.integers(3, 5)):
            start, bend, end = generator.uniform((2, 5), (30, 27), size=(3, 2))
            curve = (1 - along) ** 2 * start + 2 * along * (1 - along) * bend + along**2 * end  # (40, 2)
            nearest = np.square(places[:, :, None] - curve).sum(-1).min(-1)
            bits |= nearest < generator.uniform(1.4, 2.4) ** 2
        yield bits.reshape(8, 4, 8, 4).sum(axis=(1, 3)).astype(np.float64)


def photo_squares(count: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Yields squares (S, S, 3) uint8 of either photograph in turn, of many sizes."""
    photos = load_sample_images().images
    generator = np.random.default_rng(seed)
    for number in range(count):
        photo = photos[number % len(photos)]
        side = int(generator.integers(*PHOTO_SIDES))
        top, left = (int(generator.integers(length - side + 1)) for length in photo.shape[:2])
        yield photo[top : top + side, left : left + side]


def train_digits_model(folders: dict[str, Path], output: Path, settings: DigitsTraining) -> Path:
    """Trains on ``folders['train']``, writes model, image processor and log to ``output``, and returns it.

    Nothing is done where ``output`` holds what these images and settings give.
    """
    run = {
        "settings": asdict(settings),
        "images": {name: digest_folder(folders[name])[0] for name in ("train", "validation", "test")},
    }
    if _is_there(output, run):
        return output
    output.mkdir(parents=True, exist_ok=True)
    size = {"height": settings.image_size, "width": settings.image_size}
    ViTImageProcessorPil(size=size).save_pretrained(output)
    _config(settings).save_pretrained(output)
    images = {name: _read(folders[name], output) for name in run["images"]}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = ViTForImageClassification(_config(settings))
        records = _train(model, *images["train"], settings)
    model.eval().save_pretrained(output)
    scores = {name: round(_accuracy(model, *pair), 4) for name, pair in images.items()}
    summary = {
        "run": run,
        "weights": digest_file(output / "model.safetensors"),
        "parameters": model.num_parameters(),
        "images": {name: len(labels) for name, (_, labels) in images.items()},
        "accuracy": scores,
        "log": records,
    }
    log.info("%d parameters, accuracy %s", model.num_parameters(), scores)
    write_whole(output / LOG, json.dumps(summary, indent=1) + "\n")
    return output


def _config(settings: DigitsTraining) -> ViTConfig:
    names = {number: str(label) for number, label in enumerate(SOURCE_CLASSES)}
    return ViTConfig(
        image_size=settings.image_size,
        patch_size=settings.patch_size,
        num_channels=3,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.blocks,
        num_attention_heads=settings.heads,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        id2label=names,
        label2id={name: number for number, name in names.items()},
        architectures=["ViTForImageClassification"],
    )


def _train(
    model: ViTForImageClassification, pixels: Tensor, labels: Tensor, settings: DigitsTraining
) -> list[dict[str, float]]:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, betas=(0.9, 0.95)
    )
    total = math.ceil(len(pixels) / settings.batch) * settings.epochs
    generator = torch.Generator().manual_seed(settings.seed)
    model.train()
    step, records = 0, []
    for epoch in range(settings.epochs):
        losses = []
        for batch in torch.randperm(len(pixels), generator=generator).split(settings.batch):
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * _schedule(step, settings.warmup_steps, total)
            logits = model(pixel_values=_moved(pixels[batch], generator)).logits
            loss = F.cross_entropy(logits, labels[batch], label_smoothing=settings.label_smoothing)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            step += 1
        records.append({"epoch": epoch + 1, "train_loss": round(sum(losses) / len(losses), 4)})
    return records


def _moved(pixels: Tensor, generator: torch.Generator) -> Tensor:  # (B, C, H, W) -> (B, C, H, W)
    """Returns the images turned by up to 12 degrees, and scaled and shifted by up to an eighth."""
    count = len(pixels)
    angle, scale, x, y = (2 * torch.rand(4, count, generator=generator) - 1).unbind()
    angle, scale = angle * math.radians(12), 1 + scale / 8
    rows = (scale * angle.cos(), -scale * angle.sin(), x / 8), (scale * angle.sin(), scale * angle.cos(), y / 8)
    grid = F.affine_grid(
        torch.stack([torch.stack(row, -1) for row in rows], 1), list(pixels.shape), align_corners=False
    )
    return F.grid_sample(pixels, grid, padding_mode="border", align_corners=False)


def _schedule(step: int, warmup: int, total: int) -> float:
    return (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


@torch.no_grad()
def _accuracy(model: ViTForImageClassification, pixels: Tensor, labels: Tensor) -> float:
    return float((model(pixel_values=pixels).logits.argmax(-1) == labels).double().mean())


def _read(folder: Path, processor_folder: Path) -> tuple[Tensor, Tensor]:
    """Returns the images (N, C, H, W) as the model reads them, and their labels (N,)."""
    processor = load_processor(find_processor(processor_folder))
    listing = list_images(find_images(path=folder))
    pixels = np.stack([processor.pixels(listing.read(position)) for position in range(len(listing.labels))])
    mean, std = (np.array(values, dtype=np.float32)[:, None, None] for values in (processor.mean, processor.std))
    return torch.from_numpy((pixels / np.float32(255) - mean) / std), torch.from_numpy(listing.labels)


def _is_there(output: Path, run: dict[str, object]) -> bool:
    try:
        found = json.loads((output / LOG).read_text(encoding="utf-8"))
        same_run = digest_bytes(canonical_json(found["run"]).encode()) == digest_bytes(canonical_json(run).encode())
        return same_run and found["weights"] == digest_file(output / "model.safetensors")
    except (FileNotFoundError, ValueError, KeyError):
        return False


def _grey(image: np.ndarray) -> np.ndarray:  # (8, 8) of 0 to 16 -> uint8
    return np.round(image * (255 / 16)).astype(np.uint8)


def _write(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        with Image.open(path) as there:
            if np.array_equal(np.asarray(there), pixels):
                return
    Image.fromarray(pixels).save(path)
