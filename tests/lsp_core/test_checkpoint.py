"""Checkpoints of training: when they are written, that two are kept, and what becomes of damaged ones."""

import dataclasses
import logging

import pytest
import torch
from safetensors import safe_open

from lsp_core.checkpoint import FIELDS, SLOTS, UNFINISHED, read_fields
from lsp_core.training import Trainer, train_projectors
from lsp_core.training_settings import TrainingSettings

# 6 sequences in steps of 2: three steps an epoch, six in all
SETTINGS = TrainingSettings(
    learning_rate=1e-2,
    objective="task",
    epochs=2,
    batch_sequences=2,
    micro_batch=2,
    patience=9,
    dropout=0.2,
    checkpoint_steps=1,
)


class Killed(Exception):  # noqa: N818
    """Stands in for the end of the process."""


def train(case, settings=SETTINGS, **options):
    return train_projectors(
        case.model, case.units, case.bases, case.removed, case.tokens, case.tokens[:3], settings, **options
    )


def train_until(case, step, folder, settings=SETTINGS):
    def progress(done, *_):
        if done == step:
            raise Killed

    with pytest.raises(Killed):
        train(case, settings, work=folder, progress=progress)


def assert_same(result, expected):
    assert result.history == expected.history
    assert result.best_epoch == expected.best_epoch
    assert all(torch.equal(v, expected.vectors[name]) for name, v in result.vectors.items())


def steps_kept(folder):
    """Returns the steps of the checkpoints, the newest first."""
    assert {path.name for path in folder.iterdir()} <= set(SLOTS)
    return sorted((read_fields(path / FIELDS)["step"] for path in folder.iterdir()), reverse=True)


def slots(folder):
    """Returns the folders of the checkpoints, the newest first."""
    return sorted(folder.iterdir(), key=lambda path: -read_fields(path / FIELDS)["step"])


def tensors_in(slot):
    (path,) = slot.glob("*.safetensors")
    return path


def fields_in(slot):
    return slot / FIELDS


@pytest.fixture
def uninterrupted(prepare):
    result = train(prepare("llama"))
    assert result.best_epoch > 0
    return result


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def cut_in_the_header(path):
    path.write_bytes(path.read_bytes()[:100])


def empty(path):
    path.write_bytes(b"")


DAMAGES = [flip, cut, cut_in_the_header, empty]


@pytest.mark.parametrize(
    ("steps", "minutes", "expected"),
    [
        (1, 1e9, [0, 1, 2, 3, 4, 5, 6]),
        (100, 1e-9, [0, 1, 2, 3, 4, 5, 6]),
        (2, 1e9, [0, 2, 3, 4, 6]),
        (100, 1e9, [0, 3, 6]),  # the initial validation and each epoch's end
    ],
)
def test_a_checkpoint_after_steps_minutes_and_epochs(prepare, tmp_path, uninterrupted, steps, minutes, expected):
    settings = dataclasses.replace(SETTINGS, checkpoint_steps=steps, checkpoint_minutes=minutes)
    written = []
    result = train(
        prepare("llama"),
        settings,
        work=tmp_path,
        on_checkpoint=lambda: written.append(steps_kept(tmp_path)[0]),
    )
    assert written == expected
    assert_same(result, uninterrupted)


def test_minutes_count_from_the_last_checkpoint(prepare, tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    update = Trainer.update

    def slow(self):
        clock[0] += 45.0
        update(self)

    monkeypatch.setattr(Trainer, "update", slow)
    written = []
    settings = dataclasses.replace(SETTINGS, batch_sequences=1, epochs=1, checkpoint_steps=100, checkpoint_minutes=1.5)
    train(
        prepare("llama"),
        settings,
        work=tmp_path,
        on_checkpoint=lambda: written.append(steps_kept(tmp_path)[0]),
    )
    assert written == [0, 2, 4, 6]


def test_the_last_two_are_kept(prepare, tmp_path):
    case = prepare("llama")
    train_until(case, 5, tmp_path)
    assert steps_kept(tmp_path) == [5, 4]
    train(case, work=tmp_path)
    assert steps_kept(tmp_path) == [6, 5]


def test_the_initial_validation_is_not_repeated(prepare, tmp_path, monkeypatch, uninterrupted):
    case = prepare("llama")
    settings = dataclasses.replace(SETTINGS, checkpoint_steps=100)
    train_until(case, 1, tmp_path, settings)
    assert steps_kept(tmp_path) == [0]
    validated = []
    validate = Trainer._validate
    monkeypatch.setattr(Trainer, "_validate", lambda self: (validated.append(1), validate(self))[1])
    assert_same(train(case, settings, work=tmp_path), uninterrupted)
    assert len(validated) == 2  # one an epoch


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("part", [tensors_in, fields_in])
def test_a_damaged_newest_falls_back_on_the_one_before(prepare, tmp_path, caplog, uninterrupted, damage, part):
    case = prepare("llama")
    train_until(case, 5, tmp_path)
    newest = slots(tmp_path)[0]
    damage(part(newest))
    started = []
    with caplog.at_level(logging.WARNING):
        resumed = train(case, work=tmp_path, progress=lambda step, *_: started.append(step))
    assert started == [5, 6]
    assert str(part(newest)) in caplog.text
    assert "the checkpoint before, step 4" in caplog.text
    assert_same(resumed, uninterrupted)


def test_a_damaged_newest_does_not_take_the_place_of_the_one_before(prepare, tmp_path):
    case = prepare("llama")
    train_until(case, 4, tmp_path)
    flip(tensors_in(slots(tmp_path)[0]))
    train_until(case, 4, tmp_path)
    assert steps_kept(tmp_path) == [4, 3]


@pytest.mark.parametrize("damage", DAMAGES)
def test_without_a_whole_checkpoint_training_starts_from_zero(prepare, tmp_path, caplog, uninterrupted, damage):
    case = prepare("llama")
    train_until(case, 5, tmp_path)
    for slot, part in zip(slots(tmp_path), (tensors_in, fields_in), strict=True):
        damage(part(slot))
    started = []
    with caplog.at_level(logging.WARNING):
        resumed = train(case, work=tmp_path, progress=lambda step, *_: started.append(step))
    assert started == [1, 2, 3, 4, 5, 6]
    assert "training starts from zero" in caplog.text
    assert_same(resumed, uninterrupted)


@pytest.mark.parametrize("missing", [None, tensors_in, fields_in])
def test_a_missing_newest_is_no_loss_beyond_its_steps(prepare, tmp_path, uninterrupted, missing):
    """Whole, as after a kill before it was renamed, or one of its files."""
    case = prepare("llama")
    train_until(case, 5, tmp_path)
    newest = slots(tmp_path)[0]
    if missing is None:
        newest.rename(tmp_path / UNFINISHED)
    else:
        missing(newest).unlink()
    started = []
    assert_same(train(case, work=tmp_path, progress=lambda step, *_: started.append(step)), uninterrupted)
    assert started == [5, 6]


def test_files_of_processes_that_are_no_more_are_not_read(prepare, tmp_path, uninterrupted):
    """A copy of the folder elsewhere keeps them, in a slot that fewer processes have written since."""
    case = prepare("llama")
    train_until(case, 5, tmp_path)
    newest, before = (tensors_in(slot) for slot in slots(tmp_path))
    for name in ("a.safetensors", "shard-00002-model-00001-of-00001.safetensors", "z.safetensors"):
        (newest.parent / name).write_bytes(before.read_bytes())
    assert_same(train(case, work=tmp_path), uninterrupted)


@pytest.mark.parametrize("what", ["seed", "tokens", "vectors"])
def test_the_checkpoint_of_another_training_is_not_continued(prepare, tmp_path, caplog, what):
    case, other = prepare("llama"), prepare("llama")
    train_until(case, 4, tmp_path)
    settings = dataclasses.replace(SETTINGS, seed=1) if what == "seed" else SETTINGS
    if what == "tokens":
        other.tokens = other.tokens.flip(0)
    if what == "vectors":
        other.removed = {name: count - 1 for name, count in other.removed.items()}
    started = []
    with caplog.at_level(logging.WARNING):
        found = train(other, settings, work=tmp_path, progress=lambda step, *_: started.append(step))
    assert started == [1, 2, 3, 4, 5, 6]
    assert "another training" in caplog.text
    assert_same(found, train(other, settings))


def test_settings_that_change_nothing_do_not_end_a_training(prepare, tmp_path, caplog):
    case = prepare("llama")
    train_until(case, 4, tmp_path)
    settings = dataclasses.replace(SETTINGS, micro_batch=1, checkpoint_steps=3, checkpoint_minutes=1.0)
    started = []
    train(case, settings, work=tmp_path, progress=lambda step, *_: started.append(step))
    assert started == [5, 6]
    assert not [record for record in caplog.records if record.name.startswith("lsp_core")]


def test_tensors_are_named_by_unit_and_nothing_is_pickled(prepare, tmp_path):
    case = prepare("llama")
    train_until(case, 1, tmp_path)
    for slot in tmp_path.iterdir():
        assert {path.suffix for path in slot.iterdir()} == {".safetensors", ".json"}
    with safe_open(tensors_in(slots(tmp_path)[0]), framework="pt") as file:
        moments = ("step", "exp_avg", "exp_avg_sq")
        kinds = [("v.", [""]), ("best.", [""]), ("adam.", [f".{moment}" for moment in moments])]
        expected = {f"{kind}{unit.name}{end}" for unit in case.units for kind, ends in kinds for end in ends}
        assert set(file.keys()) == expected
