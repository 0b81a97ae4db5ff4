"""Whatever is killed or damaged: a file reads back bit for bit, or not at all."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lsp_core import durable
from lsp_core.durable import DamagedFileError, digest_tensors, name_again, read_checked, write_durably

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn]
ROOT = Path(__file__).parents[2]


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected)]
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(*flat)


def test_every_dtype_shape_and_field_comes_back(tmp_path):
    tensors = {
        f"{dtype}.{index}": torch.randn(shape).mul(9).to(dtype)
        for dtype in DTYPES
        for index, shape in enumerate([(), (3,), (0, 2), (2, 5)])
    }
    tensors |= {"special": torch.tensor([float("nan"), -0.0, 1e-320], dtype=torch.float64), "view": torch.eye(6)[::2].T}
    fields = {"step": 3, "loss": 0.1 + 0.2, "rates": [1e-308, -0.0], "history": [{"ä": None}], "empty": {}}
    write_durably(tmp_path / "new" / "file", tensors, fields)
    saved = read_checked(tmp_path / "new" / "file")
    assert saved.fields == fields
    assert saved.tensors.keys() == tensors.keys()
    assert all(same(saved.tensors[name], tensor) for name, tensor in tensors.items())


def test_equal_contents_give_equal_bytes(tmp_path):
    tensors = {"b": torch.ones(3), "a": torch.zeros(2)}
    fields = {"y": 1, "x": [{"d": 2.5, "c": None}]}
    write_durably(tmp_path / "first", tensors, fields)
    write_durably(tmp_path / "second", dict(reversed(tensors.items())), fields)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    # what is made of the fields after a kill is to have the same bytes too: their order is theirs
    assert json.dumps(read_checked(tmp_path / "first").fields) == json.dumps(fields)


def test_the_digest_sees_names_dtypes_shapes_bytes_and_fields():
    base = {"a": torch.zeros(4), "b": torch.zeros(2)}
    others = [
        {"a": base["a"], "c": base["b"]},
        {"a": base["a"].view(torch.int32), "b": base["b"]},
        {"a": base["a"].view(2, 2), "b": base["b"]},
        {"a": torch.zeros(2), "b": torch.zeros(4)},
        {"a": -base["a"], "b": base["b"]},  # -0.0
    ]
    digests = {digest_tensors(tensors) for tensors in [base, *others]} | {digest_tensors(base, {"x": 1})}
    assert len(digests) == 7
    assert digest_tensors(dict(reversed(base.items())), {"x": 1, "y": 2}) == digest_tensors(base, {"y": 2, "x": 1})


def test_every_flipped_bit_and_every_cut_is_found(tmp_path):
    """All bytes of a small file, one bit each, a different one in turn."""
    path = tmp_path / "file"
    write_durably(path, {"a": torch.randn(5), "b": torch.arange(3)}, {"step": 12, "loss": 0.25})
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(DamagedFileError, match=str(path)):
            read_checked(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedFileError, match=str(path)):
            read_checked(path)
    path.write_bytes(whole)
    assert read_checked(path).fields == {"step": 12, "loss": 0.25}


def test_a_file_of_another_program_is_damaged(tmp_path):
    path = tmp_path / "file"
    for metadata in (None, {"state": "[1]"}, {"state": "3"}, {"state": "{}"}, {"other": "{}"}, {"state": "{"}):
        durable.save_file({"a": torch.ones(2)}, path, metadata=metadata)
        with pytest.raises(DamagedFileError, match=str(path)):
            read_checked(path)
    with pytest.raises(FileNotFoundError):
        read_checked(tmp_path / "absent")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_durably(path, {"a": torch.ones(2)}, {"step": 1})

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(durable.os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_durably(path, {"a": torch.zeros(2)}, {"step": 2}, previous=tmp_path / "previous")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert read_checked(path).fields == {"step": 1}


def test_a_second_name_is_no_second_copy(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("new")
    target.write_text("old")
    name_again(source, target)
    assert target.read_text() == "new"
    assert source.samefile(target)


@pytest.mark.parametrize("code", durable.NO_HARD_LINKS)
def test_without_hard_links_a_file_is_moved(tmp_path, monkeypatch, code):
    def refused(self: Path, target: Path) -> None:
        raise OSError(code, "no hard links here")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("new")
    target.write_text("old")
    name_again(source, target)
    assert target.read_text() == "new"
    assert not source.exists()


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
import torch
from lsp_core.durable import write_durably

def write(folder, step):
    write_durably(folder / "newest", {"a": torch.full((4,), float(step))}, {"step": step}, previous=folder / "previous")

def die_at(event):  # the last moment before the operating system is asked for the event-th change
    seen = 0
    def hook(name, _):
        nonlocal seen
        if name in ("open", "os.rename", "os.link", "os.remove"):
            seen += 1
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

for event in range(1, 100):
    folder = Path(sys.argv[1], str(event))
    child = os.fork()
    if child == 0:
        write(folder, 1)
        write(folder, 2)
        die_at(event)
        write(folder, 3)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        sys.exit(0 if status == 0 else "the writer failed")
    assert os.WTERMSIG(status) == signal.SIGKILL
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_killed_at_every_change_of_the_file_system_the_newest_is_whole(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", KILLED_WRITER, str(tmp_path)], env=environment, check=True)
    folders = sorted(tmp_path.iterdir(), key=lambda folder: int(folder.name))
    *killed, finished = (
        {path.name: read_checked(path).fields["step"] for path in f.iterdir() if path.suffix != ".tmp"} for f in folders
    )
    assert finished == {"newest": 3, "previous": 2}
    assert len(killed) >= 4  # sync, unlink, link, rename
    assert all(names["newest"] in (2, 3) for names in killed)
    assert {"newest": 2, "previous": 1} in killed
    assert {"newest": 2} in killed
