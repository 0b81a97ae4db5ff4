"""The teacher's statistic continues where it was, and the files it is kept in change no bit of it."""

import logging

import pytest
import torch

from lsp_core.teacher import FIELDS, cache_teacher


class Killed(Exception):  # noqa: N818
    """Stands in for the end of the process."""


def assert_same_bits(found, expected):
    assert all(torch.equal(getattr(found, name), getattr(expected, name)) for name in FIELDS)


@pytest.mark.parametrize(
    ("micro_batch", "sequences", "files"), [(1, 2, [0, 2, 4]), (2, 3, [0, 2, 4]), (4, 1, [0, 4]), (1, 100, [0])]
)
def test_files_are_cut_between_micro_batches(prepare, tmp_path, micro_batch, sequences, files):
    case, kept = prepare("llama"), []
    found = cache_teacher(
        case.model,
        case.tokens,
        micro_batch=micro_batch,
        work=tmp_path,
        checkpoint_sequences=sequences,
        on_checkpoint=lambda: kept.append(len(list(tmp_path.iterdir()))),
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"teacher-{start:08d}.safetensors" for start in files]
    assert kept == list(range(1, len(files) + 1))
    assert_same_bits(found, cache_teacher(case.model, case.tokens, micro_batch=micro_batch))


@pytest.mark.parametrize("damage", [None, "flip", "empty", "foreign"])
def test_what_is_kept_whole_is_not_computed_again(prepare, tmp_path, caplog, damage):
    case = prepare("llama")
    done = []

    def progress(count, _):
        done.append(count)
        if len(done) == 5:
            raise Killed

    def run():
        options = {"micro_batch": 1, "work": tmp_path, "checkpoint_sequences": 2, "progress": progress}
        return cache_teacher(case.model, case.tokens, **options)

    with pytest.raises(Killed):
        run()
    assert done == [1, 2, 3, 4, 5]
    first, second = sorted(tmp_path.iterdir())
    if damage == "flip":
        first.write_bytes(first.read_bytes()[:-1] + b"?")
    elif damage == "empty":
        first.write_bytes(b"")
    elif damage == "foreign":
        first.write_bytes(second.read_bytes())
    done[:] = [0] * 5
    with caplog.at_level(logging.WARNING):
        found = run()
    assert done[5:] == ([5, 6] if damage is None else [1, 2, 5, 6])
    assert (str(first) in caplog.text) == (damage is not None)
    assert_same_bits(found, cache_teacher(case.model, case.tokens, micro_batch=1))
