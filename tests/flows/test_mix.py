"""What a run draws from a mix of texts: the training set, some of it to measure on, and what was held out."""

import copy
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from flows.config import CompressConfig
from flows.prepared import prepare
from flows.sets import allocation_examples, calibration_examples, validation_examples
from storage.grid import load_tokens
from storage.manifest import ArtifactRef
from storage.store import Store
from tasks.caching import Runtime, Stage, Work, split
from tasks.calibrate import MIX

Make = Callable[..., CompressConfig]


class Drawn:
    """Runs the stages described to it at once, and keeps what each published by its label."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sets: dict[str, np.ndarray] = {}
        self.sources: dict[str, list[int]] = {}
        self.keys: dict[str, str] = {}

    def run(self, stage: Stage, label: str = "", /, *, hints: Any = None, **arguments: Any) -> ArtifactRef:
        output = self.folder / label
        output.mkdir(parents=True)
        store = Store(str(self.folder / "store"))
        work = Work(store=store, label=label, output=output, scratch=output, runtime=Runtime())
        stage.function(work, **arguments)
        self.sets[label] = load_tokens(output)
        if (output / MIX).exists():
            self.sources[label] = [part["sequences"] for part in json.loads((output / MIX).read_text())]
        self.keys[label] = stage.key(*split(arguments))
        return ArtifactRef(kind=stage.name, key=label, uri="", digest=label, num_bytes=0)


@pytest.fixture(scope="module")
def chatting_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the tiny model with a chat template."""
    folder = Path(shutil.copytree(tiny_model, tmp_path_factory.mktemp("chatting") / "model"))
    tokenizer: PreTrainedTokenizerBase = copy.deepcopy(AutoTokenizer.from_pretrained(folder))
    tokenizer.chat_template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def write_texts(folder: Path) -> list[dict[str, Any]]:
    """Returns a mix of two texts and of conversations: each holds one letter of its own, and numbers."""
    (folder / "x.txt").write_text("".join(f"x{number:05}" for number in range(900)))
    (folder / "y.txt").write_text("".join(f"y{number:05}" for number in range(900)))
    records = [[{"role": "user", "content": f"z{number:05}"}] for number in range(900)]
    (folder / "z.jsonl").write_text("".join(json.dumps({"messages": record}) + "\n" for record in records))
    return [
        {"text": {"path": folder / "x.txt"}, "weight": 3.0, "cap": 9},
        {"text": {"path": folder / "y.txt"}, "weight": 1.0},
        {"text": {"path": folder / "z.jsonl", "format": "chat"}, "weight": 2.0},
    ]


def drawn(config: CompressConfig, folder: Path) -> Drawn:
    stages, prepared = Drawn(folder), prepare(config)
    for describe in (calibration_examples, validation_examples, allocation_examples):
        describe(stages, prepared)
    return stages


def letters(model: Path, ids: np.ndarray) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = Counter(next(letter for letter in "xyz" if letter in tokenizer.decode(row)) for row in ids)
    return [found[letter] for letter in "xyz"]


def rows(ids: np.ndarray) -> set[tuple[int, ...]]:
    return set(map(tuple, ids.tolist()))


@pytest.fixture
def make(tiny_config: Make, chatting_model: Path, tmp_path: Path) -> Make:
    def configure(**calibration: Any) -> CompressConfig:
        values = {"mix": write_texts(tmp_path), "sequences": 24, "sequence_length": 32, "seed": 5} | calibration
        model = {"name_or_path": str(chatting_model)}
        return tiny_config(tmp_path, model=model, calibration=values, allocation={"sequences": 8})

    return configure


def test_every_set_holds_the_shares_of_the_mix(make: Make, chatting_model: Path, tmp_path: Path) -> None:
    stages = drawn(make(), tmp_path / "first")
    # x asks for 12 and has a cap of 9: the other 15 go to y and z as 1 to 2
    assert stages.sources == {"training": [9, 5, 10], "validation": [1, 1, 2], "allocation": [3, 2, 3]}
    for label, counts in stages.sources.items():
        assert letters(chatting_model, stages.sets[label]) == counts
        assert stages.sets[label].shape == (sum(counts), 32)
    training, validation, allocation = (rows(stages.sets[label]) for label in ("training", "validation", "allocation"))
    assert len(training) == 24
    assert allocation < training
    assert not validation & training


def test_weights_that_give_the_same_counts_give_the_same_key(make: Make, tmp_path: Path) -> None:
    stages = drawn(make(), tmp_path / "first")
    parts = write_texts(tmp_path)
    twice = [part | {"weight": 2 * part["weight"]} for part in parts]
    assert drawn(make(mix=twice), tmp_path / "twice").keys == stages.keys
    other = drawn(make(mix=[parts[0] | {"cap": None}, *parts[1:]]), tmp_path / "other")
    assert other.sources["training"] == [12, 4, 8]
    assert not set(other.keys.values()) & set(stages.keys.values())


def test_conversations_to_validate_and_to_measure_on(tiny_config: Make, chatting_model: Path, tmp_path: Path) -> None:
    plain, _, chat = (part["text"] for part in write_texts(tmp_path))
    config = tiny_config(
        tmp_path,
        model={"name_or_path": str(chatting_model)},
        calibration={"text": plain, "sequences": 16, "sequence_length": 32},
        allocation={"text": chat, "sequences": 8},
        validation={"text": chat, "sequences": 6},
    )
    stages = drawn(config, tmp_path / "sets")
    found = {label: letters(chatting_model, ids) for label, ids in stages.sets.items()}
    assert found == {"training": [16, 0, 0], "validation": [0, 0, 6], "allocation": [0, 0, 8]}
    assert stages.sources == {}
