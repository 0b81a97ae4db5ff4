"""The vision demo's images are held apart by number alone, its pools are of one size, and its model repeats itself."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from transformers import AutoModelForImageClassification

from flows import commands, demo_digits, demo_vision
from flows.commands import Demo
from flows.demo_digits import (
    LOG,
    SOURCE_CLASSES,
    DigitsTraining,
    photo_squares,
    split_of,
    strokes,
    train_digits_model,
    write_images,
)
from flows.demo_vision import POOLS, RATIOS, TRANSFER, gains, vision_config
from storage.digest import digest_folder
from tasks.images import find_images, list_images

TINY = DigitsTraining(image_size=8, hidden_size=16, intermediate_size=24, blocks=2, heads=2, epochs=1, warmup_steps=2)
Folders = dict[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture
def few(folders: Folders, tmp_path: Path) -> Folders:
    """Returns folders with some of the digits."""
    some = {name: tmp_path / "few" / name for name in ("train", "validation", "test")}
    for name, folder in some.items():
        for path in sorted(folders[name].rglob("*.png"))[::7]:
            copy = folder / path.relative_to(folders[name])
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    return some


def test_every_digit_is_in_one_set_and_classes_for_transfer_in_no_other(folders: Folders) -> None:
    numbers = {name: {path.name for path in folder.rglob("*.png")} for name, folder in folders.items()}
    sets = {name: numbers[name] for name in ("train", "validation", "test", "transfer-train", "transfer-test")}
    assert sum(map(len, sets.values())) == len(set.union(*sets.values())) == 1797
    for name in sets:
        own = {path.name for path in folders[name].iterdir()}
        assert own == {str(label) for label in range(10) if (label in SOURCE_CLASSES) == ("transfer" not in name)}
    # 1,264 digits of the task: shares of 70, 10 and 20 %, five standard deviations are 81, 53 and 71
    assert abs(len(sets["train"]) - 885) < 81
    assert abs(len(sets["validation"]) - 126) < 53
    assert abs(len(sets["test"]) - 253) < 71
    assert abs(len(sets["transfer-train"]) - len(sets["transfer-test"])) < 2 * 5 * 0.5 * 533**0.5
    assert split_of(5, 3) == split_of(5, 4)


def test_files_hold_the_digits_and_are_written_once(folders: Folders) -> None:
    root = folders["train"].parent
    digits = load_digits()
    for number in (0, 900, 1796):
        label = int(digits.target[number])
        pixels = np.asarray(Image.open(root / split_of(number, label) / str(label) / f"{number:04}.png"))
        assert np.abs(pixels * (16 / 255) - digits.images[number]).max() < 16 / 255
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*.png")}
    spoilt = next(iter(before))
    Image.new("L", (8, 8)).save(spoilt)
    content = digest_folder(folders["strokes"])[0]
    assert write_images(root) == folders
    changed = {path for path, when in before.items() if path.stat().st_mtime_ns != when}
    assert changed == {spoilt}
    assert np.asarray(Image.open(spoilt)).any()
    assert digest_folder(folders["strokes"])[0] == content


def test_strokes_are_made_as_the_digits_were() -> None:
    drawn, digits = np.stack(list(strokes(50))), load_digits().images
    assert drawn.shape == (50, 8, 8)
    assert set(np.unique(drawn)) == set(range(17)) == set(np.unique(digits))
    assert 0.5 < drawn.mean() / digits.mean() < 1.5
    assert drawn.mean(axis=(1, 2)).min() > 0.5
    assert len(np.unique(drawn.reshape(50, -1), axis=0)) == 50


def test_squares_are_cut_out_of_both_photographs() -> None:
    squares = list(photo_squares(40))
    assert {square.shape[0] == square.shape[1] and square.shape[2] == 3 for square in squares} == {True}
    assert len({square.shape for square in squares}) > 20
    assert squares[0].mean() != squares[1].mean()


def test_pools_are_of_one_size_and_hold_nothing_that_is_tested_on(folders: Folders, tmp_path: Path) -> None:
    assert len({sum(pool.values()) for pool in POOLS.values()}) == 1
    for name, pool in POOLS.items():
        config = vision_config(tmp_path, folders, name, output=tmp_path, store=str(tmp_path / "store"))
        sources = config.calibration.images
        assert config.calibration.sequences == sum(source.cap or 0 for source in sources) == sum(pool.values())
        assert {source.path for source in sources} <= {folders[one] for one in ("train", "strokes", "photos")}
        for source in sources:
            listed = len(list_images(find_images(**source.model_dump())).labels)
            assert source.cap is not None
            assert source.cap <= listed
        for source in config.validation.images:
            assert len(list_images(find_images(**source.model_dump())).labels) >= config.validation.sequences
        assert [target.ratio for target in config.targets] == list(RATIOS)
        labelled = all((list_images(find_images(**s.model_dump())).labels >= 0).all() for s in config.validation.images)
        assert labelled == all(target.objective == "task" for target in config.targets)


def results(folder: Path) -> tuple[str, Any]:
    return digest_folder(folder)[0], json.loads((folder / LOG).read_text())


def test_training_repeats_itself_and_is_done_once(
    few: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = torch.random.get_rng_state()
    one = results(train_digits_model(few, tmp_path / "one", TINY))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert results(train_digits_model(few, tmp_path / "two", TINY)) == one
    trained = []
    train = demo_digits._train
    monkeypatch.setattr(demo_digits, "_train", lambda *given: trained.append(1) or train(*given))
    assert results(train_digits_model(few, tmp_path / "one", TINY)) == one
    assert not trained
    weights = tmp_path / "one" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert results(train_digits_model(few, tmp_path / "one", TINY)) == one
    assert len(trained) == 1
    next(few["train"].rglob("*.png")).unlink()
    assert results(train_digits_model(few, tmp_path / "one", TINY)) != one
    assert len(trained) == 2


def test_the_model_is_an_ordinary_folder(few: Folders, tmp_path: Path) -> None:
    folder = train_digits_model(few, tmp_path / "model", TINY)
    model = AutoModelForImageClassification.from_pretrained(folder)
    assert model.config.id2label == {number: str(number) for number in SOURCE_CLASSES}
    log = json.loads((folder / LOG).read_text())
    assert log["parameters"] == sum(p.numel() for p in model.parameters())
    assert log["images"] == {name: len(list(few[name].rglob("*.png"))) for name in few}
    assert (folder / "preprocessor_config.json").is_file()


def test_gains_compare_the_pools_ratio_by_ratio() -> None:
    def evaluated(accuracy: float, transfer: float) -> dict[str, Any]:
        return {"accuracy": accuracy, "transfer": {TRANSFER: {"acc": transfer}}}

    def report(transfer: float) -> dict[str, Any]:
        kl = [{"ratio": ratio, "objective": "kl", **evaluated(0.9, transfer - ratio / 10)} for ratio in RATIOS]
        return {"dense": evaluated(0.99, 0.85), "results": kl}

    lines = gains({"single": report(0.8), "diverse": report(0.845)})
    assert [len(line) for line in lines] == [len(lines[0])] * (3 + len(RATIOS))
    assert lines[2].split("|")[1:3] == ["   dense ", "          99.0% "]
    assert lines[3].split() == ["|", "30%", "|", "90.0%", "|", "90.0%", "|", "77.0%", "|", "81.5%", "|", "+4.5", "|"]


def test_the_command_has_no_use_for_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ({"retrain": True}, {"text": tmp_path}):
        with pytest.raises(ValueError, match="drop --text and --retrain"):
            Demo(vision=True, **other)
    started: list[dict[str, Any]] = []
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.setattr(commands, "import_prefect", lambda: None)  # it starts a server
    monkeypatch.setattr(demo_vision, "demo_vision", lambda **given: started.append(given))
    Demo(vision=True, output=tmp_path, store=str(tmp_path / "store")).cli_cmd()
    assert started == [{"output": tmp_path / "vision", "store": str(tmp_path / "store")}]


@pytest.mark.slow
def test_the_model_learns_its_task(folders: Folders, tmp_path: Path) -> None:
    folder = train_digits_model(folders, tmp_path / "model", DigitsTraining())
    assert json.loads((folder / LOG).read_text())["accuracy"]["test"] >= 0.97
