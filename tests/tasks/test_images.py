"""What is drawn of image sources, and that its bytes are what the checkpoint's own image processor makes of them."""

import logging
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    CLIPImageProcessorPil,
    ConvNextImageProcessorPil,
    EfficientNetImageProcessorPil,
    ViTConfig,
    ViTImageProcessorPil,
)

from storage.tensors import load_tensors
from tasks import images as module
from tasks.artifacts import read_json
from tasks.caching import Work
from tasks.images import (
    IMAGES,
    ImageOrigin,
    calibrate_images,
    count_images,
    draw,
    find_images,
    list_images,
    model_labels,
    read_classes,
)
from tasks.processors import as_channels, find_processor, load_processor, read_image
from tasks.text import HELD_OUT_EVERY

COMMIT = "0" * 40
SIZE = {"height": 8, "width": 8}
Files = Callable[..., Path]


def noise(seed: int, height: int = 20, width: int = 13, channels: int = 3) -> Image.Image:
    generator = np.random.default_rng(seed)
    return Image.fromarray(generator.integers(0, 256, (height, width, channels), dtype=np.uint8).squeeze())


def as_classes(folder: Path, counts: dict[str, int]) -> Path:
    """Writes images into class folders; every image is another."""
    number = 0
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for _ in range(count):
            noise(number).save(folder / name / f"{number:03}.png")
            number += 1
    return folder


def save_processor(folder: Path, processor: Any = None, channels: int = 3) -> Path:
    (processor or ViTImageProcessorPil(size=SIZE)).save_pretrained(folder)
    ViTConfig(num_channels=channels).save_pretrained(folder)
    return folder


@pytest.fixture
def processor(tmp_path: Path) -> Path:
    return save_processor(tmp_path / "processor")


def drawn(work: Work, origins: list[ImageOrigin], folder: Path, **settings: Any) -> dict[str, Tensor]:
    settings = {"take": None, "part": "all", "seed": 0} | settings
    shutil.rmtree(work.output)
    work.output.mkdir()
    calibrate_images.function(work, images=origins, processor=find_processor(folder), **settings)
    return load_tensors(work.output)


PROCESSORS = {
    "resize": ViTImageProcessorPil(
        size={"height": 9, "width": 7}, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4]
    ),
    "resize and crop": CLIPImageProcessorPil(size={"shortest_edge": 10}, crop_size={"height": 8, "width": 8}),
    "crop share": ConvNextImageProcessorPil(size={"shortest_edge": 8}),
    "no normalization": ViTImageProcessorPil(size=SIZE, do_normalize=False),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_bytes_reproduce_the_processors_own_output(name: str, work: Work, tmp_path: Path) -> None:
    folder = save_processor(tmp_path / "processor", PROCESSORS[name])
    source = as_classes(tmp_path / "images", {"a": 2, "b": 3})
    found = drawn(work, [find_images(path=source)], folder)
    whole = AutoImageProcessor.from_pretrained(folder, backend="pil")
    originals = [Image.open(path) for path in sorted(source.rglob("*.png"))]
    expected = torch.cat([whole(image, return_tensors="pt").pixel_values for image in originals])
    mean, std = (found[n].double().view(-1, 1, 1) for n in ("mean", "std"))
    ours = (found["pixels"].double() / 255 - mean) / std
    assert found["pixels"].dtype == torch.uint8
    # the processor computes in float32, with values up to 1/min(std): a few roundings of these
    assert (ours - expected).abs().max() < 8 * torch.finfo(torch.float32).eps / float(std.min())
    assert len(expected.flatten(1).unique(dim=0)) == 5
    assert found["labels"].tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (ViTImageProcessorPil(size=SIZE, rescale_factor=1 / 127.5), "rescales by 0.00784314"),
        (ViTImageProcessorPil(size=SIZE, do_rescale=False), "rescales by 1,"),
        (
            ViTImageProcessorPil(size=SIZE, image_mean=[0.5], image_std=[0.5]),
            "normalizes 1 channels, the model",
        ),
        (EfficientNetImageProcessorPil(size=SIZE, rescale_offset=True), "does more than to resize"),
    ],
)
def test_a_processor_whose_output_cannot_be_kept_as_bytes(refused: Any, said: str, tmp_path: Path) -> None:
    source = find_processor(save_processor(tmp_path, refused))
    with pytest.raises(ValueError, match=said):
        load_processor(source)


def test_a_folder_without_a_processor(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no preprocessor_config\.json"):
        find_processor(tmp_path)
    assert "is there" in (find_processor(tmp_path, partly=True).lacks or "")
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(ValueError, match="its image processor cannot be loaded"):
        load_processor(find_processor(tmp_path))


def test_a_processors_digest_is_of_its_files(tmp_path: Path, processor: Path) -> None:
    source = find_processor(processor)
    copy = shutil.copytree(processor, tmp_path / "copy")
    assert find_processor(copy).digest == source.digest == source.current_digest()
    (copy / "preprocessor_config.json").write_text("{}")
    assert find_processor(copy).digest != source.digest
    ViTConfig(num_channels=1).save_pretrained(processor)
    assert source.current_digest() != source.digest


def test_images_of_unequal_size_after_the_processor(work: Work, tmp_path: Path) -> None:
    folder = save_processor(tmp_path / "processor", ViTImageProcessorPil(size={"shortest_edge": 8}))
    source = as_classes(tmp_path / "images", {"a": 1})
    noise(7, height=12, width=30).save(source / "a" / "wide.png")
    with pytest.raises(ValueError, match=r"makes images of \(3, 12, 8\) and of \(3, 8, 20\)"):
        drawn(work, [find_images(path=source)], folder)


def test_channels_are_those_that_the_model_reads() -> None:
    grey = noise(0, channels=1)
    colours = np.asarray(as_channels(grey, 3))
    assert (colours == np.asarray(grey)[..., None]).all()
    assert as_channels(noise(0), 1).mode == "L"
    clear = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    clear.putpixel((1, 0), (10, 20, 30, 255))
    assert np.asarray(as_channels(clear, 3)).tolist() == [[[255, 255, 255], [10, 20, 30]]]


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_and_coloured_images_in_one_set(channels: int, work: Work, tmp_path: Path) -> None:
    values = [0.5] * channels
    given = CLIPImageProcessorPil(
        size={"shortest_edge": 8}, crop_size=SIZE, image_mean=values, image_std=values
    )  # converts to RGB by itself
    folder = save_processor(tmp_path / "processor", given, channels)
    (tmp_path / "images").mkdir()
    for name, image in (("a.png", noise(0)), ("b.JPG", noise(1, channels=1)), ("c.png", noise(2, channels=4))):
        image.save(tmp_path / "images" / name)
    found = drawn(work, [find_images(path=tmp_path / "images")], folder)
    assert found["pixels"].shape == (3, channels, 8, 8)
    assert found["labels"].tolist() == [-1, -1, -1]
    assert read_classes(work.output) is None


def test_an_image_is_read_upright(tmp_path: Path) -> None:
    path = tmp_path / "turned.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    noise(0, height=20, width=13).save(path, exif=exif)
    assert read_image(path, "here").size == (20, 13)


def test_a_broken_image_is_named(work: Work, tmp_path: Path, processor: Path) -> None:
    source = as_classes(tmp_path / "images", {"a": 2})
    whole = (source / "a" / "001.png").read_bytes()
    for content in (whole[: len(whole) // 2], b"no image"):
        (source / "a" / "001.png").write_bytes(content)
        with pytest.raises(ValueError, match=r"a/001\.png is no image that can be read \("):
            drawn(work, [find_images(path=source)], processor)
    Image.fromarray(np.zeros((3, 3), dtype=np.uint16)).save(source / "a" / "001.png")
    with pytest.raises(ValueError, match=r"a/001\.png has more than 8 bits a channel"):
        drawn(work, [find_images(path=source)], processor)


def test_one_original_is_held_at_a_time(
    work: Work, tmp_path: Path, processor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[weakref.ref[Image.Image]] = []
    most = 0

    def watched(*arguments: Any) -> Image.Image:
        nonlocal most
        image = read_image(*arguments)
        decoded.append(weakref.ref(image))
        most = max(most, sum(reference() is not None for reference in decoded))
        return image

    monkeypatch.setattr(module, "read_image", watched)
    drawn(work, [find_images(path=as_classes(tmp_path / "images", {"a": 9}))], processor)
    assert len(decoded) == 9
    assert most <= 2


def test_the_digest_is_of_content_and_selection(tmp_path: Path) -> None:
    here = as_classes(tmp_path / "here", {"a": 2, "b": 1})
    origin = find_images(path=here)
    there = shutil.copytree(here, tmp_path / "there")
    assert find_images(path=there).digest == origin.digest == origin.current_digest()
    others = [find_images(path=here, cap=2), find_images(path=here, cap=3), find_images(path=here, classes=["a"])]
    assert len({origin.digest, *(other.digest for other in others)}) == 4
    assert others[0].current_digest() == others[0].digest
    (there / "a").rename(there / "z")
    assert find_images(path=there).digest != origin.digest
    noise(99).save(here / "a" / "000.png")
    assert origin.current_digest() != origin.digest


def test_a_folder_that_is_no_image_source(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such folder"):
        find_images(path=tmp_path / "none")
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(ValueError, match="holds no images"):
        find_images(path=tmp_path)
    as_classes(tmp_path, {"a": 1})
    noise(0).save(tmp_path / "beside.png")
    with pytest.raises(ValueError, match=r"class folders and, beside them, beside\.png"):
        find_images(path=tmp_path)


def test_ids_are_the_order_of_the_class_folders(tmp_path: Path) -> None:
    origin = find_images(path=as_classes(tmp_path / "images", {"b": 1, "10": 2, "9": 1}))
    listing = list_images(origin)
    assert listing.classes == ["10", "9", "b"]
    assert listing.labels.tolist() == [0, 0, 1, 2]
    for chosen, labels in ((["b"], [2]), ([0], [0, 0]), (["9", 0], [0, 0, 1])):
        some = find_images(path=tmp_path / "images", classes=chosen)
        assert labels == [listing.labels[at] for _, at in draw([some], [listing], take=None, part="all", seed=0)]
    for strange in ("c", 3, 9):
        some = find_images(path=tmp_path / "images", classes=[strange])
        with pytest.raises(ValueError, match=f"has no class {strange!r}, it has 10, 9, b"):
            draw([some], [listing], take=None, part="all", seed=0)


def positions(origins: list[ImageOrigin], **settings: Any) -> list[tuple[int, int]]:
    settings = {"take": None, "part": "all", "seed": 0} | settings
    return [tuple(row) for row in draw(origins, [list_images(origin) for origin in origins], **settings).tolist()]


def test_calibration_and_validation_are_disjoint_and_together_all(tmp_path: Path) -> None:
    origins = [
        find_images(path=as_classes(tmp_path / "one", {"a": 20, "b": 15})),
        find_images(path=as_classes(tmp_path / "two", {"c": 40}), cap=33),
    ]
    every, calibration, validation = (set(positions(origins, part=p)) for p in ("all", "calibration", "validation"))
    assert validation | calibration == every
    assert not validation & calibration
    assert [len([s for s, _ in every if s == number]) for number in (0, 1)] == [35, 33]
    assert [at for source, at in sorted(validation) if source == 0] == [HELD_OUT_EVERY - 1, 2 * HELD_OUT_EVERY - 1]
    assert sum(count_images(origin, "validation") or 0 for origin in origins) == len(validation) == 4


def test_what_a_cap_draws_depends_on_the_seed_and_not_on_other_sources(tmp_path: Path) -> None:
    one = find_images(path=as_classes(tmp_path / "one", {"a": 30}), cap=10)
    two = find_images(path=as_classes(tmp_path / "two", {"a": 25}), cap=10)
    alone = [at for _, at in positions([one])]
    assert len(set(alone)) == 10
    assert [at for source, at in positions([two, one]) if source == 1] == alone
    assert [at for _, at in positions([one], seed=1)] != alone


def test_take_draws_from_the_whole_pool(tmp_path: Path) -> None:
    origins = [find_images(path=as_classes(tmp_path / name, {"a": 30})) for name in ("one", "two")]
    some = positions(origins, take=25)
    assert len(set(some)) == 25
    assert set(some) < set(positions(origins))
    # hypergeometric: of either source 12.5 expected, standard deviation 1.9; five of these
    assert 3 <= sum(source for source, _ in some) <= 22
    assert positions(origins, take=25) == some
    assert positions(origins, take=25, seed=1) != some


def test_too_few_images_state_counts_and_remedy(tmp_path: Path) -> None:
    origin = find_images(path=as_classes(tmp_path / "few", {"a": 15}))
    with pytest.raises(ValueError, match=r"few: 15 calibration images, 16 are asked for: add images"):
        positions([origin], take=16, part="calibration")
    with pytest.raises(ValueError, match=r"few: 0 validation images, 1 are asked for"):
        positions([origin], part="validation")


def test_drawn_pixels_belong_to_their_labels(work: Work, tmp_path: Path, processor: Path) -> None:
    source = tmp_path / "levels"
    for label in range(3):
        (source / str(label)).mkdir(parents=True)
        for number in range(4):
            Image.new("L", (5, 5), 50 * label + number).save(source / str(label) / f"{number}.png")
    found = drawn(work, [find_images(path=source)], processor, take=7)
    levels = found["pixels"].flatten(1).unique(dim=1)
    assert levels.shape == (7, 1)
    assert (levels[:, 0] // 50).tolist() == found["labels"].tolist()
    assert len(set(levels[:, 0].tolist())) == 7


@pytest.mark.parametrize(
    ("second", "expected", "classes"),
    [("same", [0, 1, 0, 1], ["a", "b"]), ("plain", [0, 1, -1, -1], ["a", "b"]), ("other", [-1] * 4, None)],
)
def test_labels_of_a_pool(
    second: str, expected: list[int], classes: list[str] | None, work: Work, tmp_path: Path, processor: Path
) -> None:
    one = as_classes(tmp_path / "one", {"a": 1, "b": 1})
    two = tmp_path / "two"
    if second == "plain":
        two.mkdir()
        noise(0).save(two / "0.png")
        noise(1).save(two / "1.png")
    else:
        as_classes(two, {"a": 1, "b" if second == "same" else "c": 1})
    found = drawn(work, [find_images(path=one), find_images(path=two)], processor)
    assert found["labels"].tolist() == expected
    assert read_json(work.output / IMAGES) == {"counts": [2, 2], "classes": classes}


def test_labels_by_the_names_that_the_model_knows(caplog: pytest.LogCaptureFixture) -> None:
    labels = torch.tensor([0, 1, 1, -1])
    animals = {0: "dog", 1: "owl", 2: "cat"}
    assert model_labels(labels, ["cat", "dog"], animals).tolist() == [2, 0, 0, -1]
    assert model_labels(labels, ["cat", "dog", "extra"], animals).tolist() == [2, 0, 0, -1]  # it does not occur
    assert model_labels(labels, None, {0: "dog", 1: "owl"}).tolist() == labels.tolist()
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert model_labels(labels, ["n01", "n02"], {0: "LABEL_0", 1: "LABEL_1"}).tolist() == labels.tolist()
    assert "by number" in caplog.text
    for classes, known in (
        (["n01", "n02"], {0: "dog", 1: "owl"}),  # as many, and others
        (["n01", "n02"], animals),
        (["cat", "dog"], {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}),
        (None, {0: "dog"}),
    ):
        with pytest.raises(ValueError, match=r"the images' classes .* are not among the \d that the model knows"):
            model_labels(labels, classes, known)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Has a hub with one dataset of five images; returns how it was asked."""
    names = datasets.ClassLabel(names=["cat", "dog"])
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": names,
            "kind": datasets.Value("string"),
            "share": datasets.Value("float64"),
        }
    )
    rows = {
        "image": [noise(number) for number in range(5)],
        "label": [1, 0, 1, -1, 0],
        "kind": ["y", "x", "y", "y", "x"],
        "share": [0.5] * 5,
    }
    data = datasets.Dataset.from_dict(rows, features=features)
    asked = []

    def load(*arguments: Any, **named: Any) -> datasets.Dataset:
        asked.append((*arguments, named))
        return data

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


def from_hub(**settings: Any) -> ImageOrigin:
    return find_images(dataset="some/images", revision=COMMIT, **settings)


def test_a_hub_dataset_is_read_at_its_commit(hub: list[tuple[Any, ...]], work: Work, processor: Path) -> None:
    found = drawn(work, [from_hub(label_field="label", split="test")], processor)
    assert found["labels"].tolist() == [1, 0, 1, -1, 0]
    loaded = load_processor(find_processor(processor))
    expected = np.stack([loaded.pixels(noise(number)) for number in range(5)])
    assert np.array_equal(found["pixels"].numpy(), expected)
    assert hub == [("some/images", None, {"split": "test", "revision": COMMIT})]
    assert read_classes(work.output) == ["cat", "dog"]
    assert drawn(work, [from_hub()], processor)["labels"].tolist() == [-1] * 5
    assert drawn(work, [from_hub(label_field="kind")], processor)["labels"].tolist() == [1, 0, 1, 1, 0]
    assert drawn(work, [from_hub(label_field="label", classes=["cat"])], processor)["labels"].tolist() == [0, 0]
    origin = from_hub(label_field="label")
    assert origin.current_digest() == origin.digest != from_hub().digest
    assert count_images(origin, "all") is None


@pytest.mark.usefixtures("hub")
def test_a_wrong_field_names_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"some/images \(train\) has no field 'img', only image, label, kind, share"):
        list_images(from_hub(image_field="img"))
    with pytest.raises(ValueError, match="its field 'kind' holds no images"):
        list_images(from_hub(image_field="kind"))
    with pytest.raises(ValueError, match="its field 'share' holds no labels"):
        list_images(from_hub(label_field="share"))
    origin = from_hub(classes=["cat"])
    with pytest.raises(ValueError, match="has no class 'cat', it has no classes: name its label_field"):
        draw([origin], [list_images(origin)], take=None, part="all", seed=0)
