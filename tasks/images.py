"""Image sources, and the sets of images that are drawn from them, kept as bytes of pixels."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from storage.digest import canonical_json, digest_bytes, digest_file
from storage.remembered import DigestMemory
from storage.tensors import save_tensors
from tasks.artifacts import read_json, write_json
from tasks.caching import Source, Work, stage
from tasks.hub import commit_of
from tasks.processors import ProcessorSource, load_processor, read_image
from tasks.text import HELD_OUT_EVERY, Part

log = logging.getLogger(__name__)

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
IMAGES = "images.json"
UNLABELLED = -1


class ImageOrigin(Source):
    """Images in a local folder ``path`` or in a hub ``dataset`` at a commit; the digest covers content and selection.

    ``cap``: at most so many, drawn by a seed; ``classes``: only these, by name or by id; empty: all.
    """

    path: str | None
    dataset: str | None
    config: str | None
    split: str
    revision: str | None
    image_field: str
    label_field: str | None
    cap: int | None
    classes: tuple[str | int, ...]

    @property
    def name(self) -> str:
        return self.path or f"{self.dataset} ({self.split})"

    def current_digest(self) -> str:
        if self.path is None:  # a commit does not change
            return self.digest
        memory = DigestMemory()
        return find_images(path=Path(self.path), cap=self.cap, classes=self.classes, digest=memory.digest).digest

    def facts(self) -> dict[str, Any]:
        return {"name": self.name, "revision": self.revision, "cap": self.cap, "classes": list(self.classes)}


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The images of a source in their order: ``labels`` (N,) are class ids, -1 where there is none.

    ``classes``: the name of each id, or None where ids have no names; ``read``: decodes the image at a position.
    """

    labels: np.ndarray
    classes: list[str] | None
    read: Callable[[int], Image.Image]


def find_images(
    *,
    path: Path | None = None,
    dataset: str | None = None,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    image_field: str = "image",
    label_field: str | None = None,
    cap: int | None = None,
    classes: Sequence[str | int] = (),
    digest: Callable[[Path], str] = digest_file,
    partly: bool = False,
) -> ImageOrigin:
    """Returns an image source with its content digested (local) or its revision resolved to a commit (hub).

    ``digest``: what a file's digest is taken from. ``partly``: a hub out of reach is named in ``lacks``.
    Errors: ``ValueError`` if it does not exist, holds no images, or holds them both in sub-folders and beside them.
    """
    lacks = None
    if path is not None:
        path = path.expanduser()
        files = _image_files(path)
        content: dict[str, object] = {
            "files": {file.relative_to(path).as_posix(): digest(file) for file in files},
            "classes": _folder_classes(path, files),
        }
    else:
        assert dataset is not None
        try:
            revision = commit_of("dataset", dataset, revision)
        except ConnectionError:
            if not partly:
                raise
            lacks = f"the hub tells the commit of {dataset}"
        content = {"dataset": dataset, "config": config, "split": split, "revision": revision}
        content |= {"image_field": image_field, "label_field": label_field}
    content |= {"cap": cap, "chosen": list(classes)}
    return ImageOrigin(
        digest=digest_bytes(canonical_json(content).encode()),
        lacks=lacks,
        path=None if path is None else str(path),
        dataset=dataset,
        config=config,
        split=split,
        revision=revision,
        image_field=image_field,
        label_field=label_field,
        cap=cap,
        classes=tuple(classes),
    )


@stage(name="calibrate")
def calibrate_images(
    work: Work, *, images: list[ImageOrigin], processor: ProcessorSource, take: int | None, part: Part, seed: int
) -> None:
    """Publishes ``take`` images, drawn from one part of the pool ``images``; None: all of them, in their order.

    ``pixels`` (N, C, H, W) uint8, of which the model reads (pixels / 255 - mean) / std; ``labels`` (N,) int64, -1
    where there is none; ``mean`` and ``std`` (C,) float32; in ``images.json`` how many came of each source, and the
    classes' names.
    """
    loaded = load_processor(processor)
    listings = [list_images(origin) for origin in images]
    chosen = draw(images, listings, take=take, part=part, seed=seed)
    pixels = None
    labels, classes = labels_of(listings, chosen)
    with work.progress() as progress:
        for done, slot in enumerate(np.lexsort(chosen.T[::-1])):  # each source in its own order
            source, position = chosen[slot].tolist()
            array = torch.from_numpy(loaded.pixels(listings[source].read(position)))
            if pixels is None:
                pixels = torch.empty((len(chosen), *array.shape), dtype=torch.uint8)
            if array.shape != pixels.shape[1:]:
                raise ValueError(
                    f"{images[source].name}: the image processor makes images of {tuple(pixels.shape[1:])} and of "
                    f"{tuple(array.shape)}: save one that crops them all to one size"
                )
            pixels[slot] = array
            progress(done + 1, len(chosen))
    assert pixels is not None
    mean, std = (torch.tensor(values, dtype=torch.float32) for values in (loaded.mean, loaded.std))
    save_tensors(work.output, {"pixels": pixels, "labels": labels, "mean": mean, "std": std})
    counts = np.bincount(chosen[:, 0], minlength=len(images)).tolist()
    write_json(work.output / IMAGES, {"counts": counts, "classes": classes})


def labels_of(listings: Sequence[Listing], chosen: np.ndarray) -> tuple[Tensor, list[str] | None]:  # (N, 2) -> (N,)
    """Returns the class ids of drawn images, -1 where there is none, and the classes' names.

    Sources of different classes count as unlabelled.
    """
    classes, labelled = _common_classes(listings)
    if not labelled:
        return torch.full((len(chosen),), UNLABELLED), classes
    return torch.tensor([int(listings[source].labels[position]) for source, position in chosen.tolist()]), classes


def read_classes(folder: Path) -> list[str] | None:
    """Returns the classes' names, by id, of a set of images in ``folder``; None where they have none."""
    classes: list[str] | None = read_json(folder / IMAGES)["classes"]
    return classes


def model_labels(labels: Tensor, classes: list[str] | None, id2label: Mapping[int, str]) -> Tensor:  # (N,) -> (N,)
    """Returns the ids under which a model knows the classes of ``labels``.

    By the names of the classes that occur, where the model knows them all; by number where the images' classes, or the
    model's, have none. Errors: ``ValueError`` if neither.
    """
    known = {name: number for number, name in id2label.items()}
    occurring = {int(label) for label in labels.unique()} - {UNLABELLED}
    named = set() if classes is None else {classes[label] for label in occurring}
    if classes is not None and named <= set(known):
        ids = torch.tensor([known.get(name, UNLABELLED) for name in classes] + [UNLABELLED])
        return ids[labels]  # -1 is the last
    unnamed = all(name == f"LABEL_{number}" for number, name in id2label.items())
    fits = max(occurring, default=0) < len(id2label) and (classes is None or len(classes) == len(id2label))
    if not fits or (classes is not None and not unnamed):
        strange = sorted(named - set(known))[:5]
        raise ValueError(
            f"the images' classes ({', '.join(strange) or max(occurring)}, ...) are not among the {len(id2label)} "
            "that the model knows: name images of these, or rename the class folders"
        )
    if classes is not None:
        log.warning("the model's classes have no names: those of the images are taken by number")
    return labels


def draw(
    images: Sequence[ImageOrigin], listings: Sequence[Listing], *, take: int | None, part: Part, seed: int
) -> np.ndarray:  # -> (N, 2) int64
    """Returns the source and the position therein of each drawn image.

    Every sixteenth image of what a source's ``classes`` and ``cap`` leave is its validation part. What is drawn of one
    source by its cap does not depend on the others. Errors: ``ValueError`` with the counts if there are too few.
    """
    pool = np.concatenate(
        [
            np.stack([np.full(len(positions), number), positions], axis=1)
            for number, (origin, listing) in enumerate(zip(images, listings, strict=True))
            for positions in [_part(_selected(origin, listing, seed), part)]
        ]
    )
    names = ", ".join(origin.name for origin in images)
    wanted = len(pool) if take is None else take
    if len(pool) < max(1, wanted):
        raise ValueError(
            f"{names}: {len(pool)} {'' if part == 'all' else part + ' '}images, {max(1, wanted)} are asked for: "
            "add images, raise the cap, or ask for fewer (one in 16 is held out to validate on where validation.images "
            "names no others)"
        )
    return pool if take is None else np.random.default_rng(seed).permutation(pool)[:take]


def list_images(origin: ImageOrigin) -> Listing:
    """Returns what a source holds, without decoding it. Errors: ``ValueError`` for a field that is no such field."""
    return _list_dataset(origin) if origin.path is None else _list_folder(Path(origin.path))


def count_images(origin: ImageOrigin, part: Part) -> int | None:
    """Returns how many images one part of a local source has; None for a hub dataset."""
    if origin.path is None:
        return None
    return len(_part(_selected(origin, list_images(origin), seed=0), part))


def _selected(origin: ImageOrigin, listing: Listing, seed: int) -> np.ndarray:
    """Returns the positions that ``classes`` and ``cap`` leave, in their order."""
    positions = np.arange(len(listing.labels))
    if origin.classes:
        wanted = [_class_id(name, origin, listing) for name in origin.classes]
        positions = positions[np.isin(listing.labels, wanted)]
    if origin.cap is not None:
        positions = np.sort(np.random.default_rng(seed).permutation(positions)[: origin.cap])
    return positions


def _part(positions: np.ndarray, part: Part) -> np.ndarray:
    held_out = np.arange(len(positions)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return positions if part == "all" else positions[held_out if part == "validation" else ~held_out]


def _class_id(name: str | int, origin: ImageOrigin, listing: Listing) -> int:
    if isinstance(name, int) and name in listing.labels:
        return name
    if isinstance(name, str) and listing.classes is not None and name in listing.classes:
        return listing.classes.index(name)
    known = listing.classes or sorted({int(label) for label in listing.labels} - {UNLABELLED})
    said = ", ".join(map(str, known[:10])) or "no classes: name its label_field, or a folder for each class"
    raise ValueError(f"{origin.name} has no class {name!r}, it has {said}{', ...' if len(known) > 10 else ''}")


def _common_classes(listings: Sequence[Listing]) -> tuple[list[str] | None, bool]:
    """Returns the classes' names and whether labels mean the same wherever there are any."""
    spaces = [listing.classes for listing in listings if (listing.labels != UNLABELLED).any()]
    if any(space is None or space != spaces[0] for space in spaces[1:]):
        log.info("the sources have different classes: their images count as unlabelled")
        return None, False
    return (spaces[0] if spaces else None), bool(spaces)


def _image_files(path: Path) -> list[Path]:
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such folder to read images from")
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not files:
        raise ValueError(f"{path} holds no images: expected files ending in {', '.join(sorted(SUFFIXES))}")
    return files


def _folder_classes(path: Path, files: list[Path]) -> list[str] | None:
    """Returns the names of the class folders, sorted; None where the images lie right in ``path``."""
    beside = [file for file in files if file.parent == path]
    if len(beside) == len(files):
        return None
    if beside:
        raise ValueError(
            f"{path} holds class folders and, beside them, {beside[0].name}: move it into one, or the others out"
        )
    return sorted({file.relative_to(path).parts[0] for file in files})


def _list_folder(path: Path) -> Listing:
    files = _image_files(path)
    classes = _folder_classes(path, files)
    ids = {name: number for number, name in enumerate(classes or ())}
    labels = [ids.get(file.relative_to(path).parts[0], UNLABELLED) for file in files]
    return Listing(labels=np.array(labels), classes=classes, read=lambda at: read_image(files[at], str(files[at])))


def _list_dataset(origin: ImageOrigin) -> Listing:
    import datasets  # a second to import, and needed for hub datasets only

    # downloaded whole, unlike text: several stages draw from it at random
    rows: Any = datasets.load_dataset(origin.dataset, origin.config, split=origin.split, revision=origin.revision)
    for field in (origin.image_field, origin.label_field):
        if field is not None and field not in rows.features:
            raise ValueError(f"{origin.name} has no field {field!r}, only {', '.join(rows.features)}")
    if not isinstance(rows.features[origin.image_field], datasets.Image):
        raise ValueError(f"{origin.name}: its field {origin.image_field!r} holds no images")
    encoded = rows.select_columns([origin.image_field]).cast_column(origin.image_field, datasets.Image(decode=False))

    def read(position: int) -> Image.Image:
        content = encoded[position][origin.image_field]
        place = f"{origin.name}, image {position}"
        return read_image(Path(content["path"]) if content["bytes"] is None else content["bytes"], place)

    classes, labels = None, np.full(len(rows), UNLABELLED)
    if origin.label_field is not None:
        given = list(rows[origin.label_field])
        classes = getattr(rows.features[origin.label_field], "names", None)
        if any(isinstance(label, str) for label in given):
            classes = sorted({label for label in given if label is not None})
            given = [None if label is None else classes.index(label) for label in given]
        if any(label is not None and not isinstance(label, int) for label in given):
            raise ValueError(f"{origin.name}: its field {origin.label_field!r} holds no labels")
        labels = np.array([UNLABELLED if label is None else label for label in given], dtype=np.int64)
    return Listing(labels=labels, classes=classes, read=read)
