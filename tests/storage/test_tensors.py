"""Tensors come back bit for bit, in any dtype and any number of shards, and equal tensors make equal bytes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from storage.digest import digest_folder
from storage.tensors import INDEX, iter_tensors, load_tensors, save_tensors, write_index

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected)]
    assert torch.equal(*flat)


def sample(count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return {f"block.{i}": torch.randn(3, 5 + i, dtype=torch.float64, generator=generator) for i in range(count)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 7), (0, 4)], ids=str)
def test_every_dtype_and_shape_comes_back(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(9).to(dtype)
    save_tensors(tmp_path, {"t": tensor})
    (found,) = load_tensors(tmp_path).values()
    assert_same_bits(found, tensor)


def test_special_values_keep_their_bits(tmp_path: Path) -> None:
    tensor = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40], dtype=torch.bfloat16)
    save_tensors(tmp_path, {"t": tensor})
    assert_same_bits(load_tensors(tmp_path)["t"], tensor)


def test_views_and_parameters_are_saved_by_value(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    tensors = {"t": base.T, "rows": base[1:3], "every": base[:, ::2], "p": torch.nn.Parameter(torch.ones(2))}
    save_tensors(tmp_path, {name: tensor for name, tensor in tensors.items() if name != "rows"})
    save_tensors(tmp_path / "rows", {"rows": tensors["rows"]})
    found = load_tensors(tmp_path) | load_tensors(tmp_path / "rows")
    for name, tensor in tensors.items():
        assert_same_bits(found[name], tensor.detach())
    assert not found["p"].requires_grad


@pytest.mark.parametrize("shard_bytes", [1, 130, 300, 1 << 30])
def test_shards_hold_whole_tensors_and_no_more_than_asked(shard_bytes: int, tmp_path: Path) -> None:
    tensors = sample(7)  # 120 to 264 bytes each
    save_tensors(tmp_path, tensors, shard_bytes=shard_bytes)
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) == {1: 7, 130: 7, 300: 6, 1 << 30: 1}[shard_bytes]
    found = load_tensors(tmp_path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same_bits(found[name], tensor)


def test_pairs_are_taken_one_by_one(tmp_path: Path) -> None:
    written_before: list[int] = []

    def pairs() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in sample(4).items():
            written_before.append(len(list(tmp_path.glob("*.safetensors"))))
            yield name, tensor

    save_tensors(tmp_path, pairs(), shard_bytes=1)
    assert written_before == [0, 0, 1, 2]
    assert list(load_tensors(tmp_path)) == list(sample(4))


@pytest.mark.parametrize("shard_bytes", [300, 1 << 30])
def test_equal_tensors_make_equal_bytes(shard_bytes: int, tmp_path: Path) -> None:
    for name in ("first", "second"):
        save_tensors(tmp_path / name, sample(9), shard_bytes=shard_bytes)
    assert digest_folder(tmp_path / "first") == digest_folder(tmp_path / "second")
    one_bit = sample(9)
    one_bit["block.8"][0, 0] += 1e-12
    save_tensors(tmp_path / "third", one_bit, shard_bytes=shard_bytes)
    assert digest_folder(tmp_path / "first")[0] != digest_folder(tmp_path / "third")[0]


def test_some_names_are_read_alone(tmp_path: Path) -> None:
    tensors = sample(5)
    save_tensors(tmp_path, tensors, shard_bytes=1)
    assert list(load_tensors(tmp_path, ["block.3", "block.1"])) == ["block.1", "block.3"]
    assert [name for name, _ in iter_tensors(tmp_path, {"block.4"})] == ["block.4"]
    with pytest.raises(KeyError, match="absent, other"):
        load_tensors(tmp_path, ["block.1", "other", "absent"])


def test_no_tensors_are_no_tensors(tmp_path: Path) -> None:
    save_tensors(tmp_path, {})
    assert load_tensors(tmp_path) == {}


def test_a_folder_without_tensors_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        load_tensors(tmp_path)


def test_shards_that_hold_nothing_asked_for_are_not_opened(tmp_path: Path) -> None:
    save_tensors(tmp_path, sample(5), shard_bytes=1)
    sorted(tmp_path.glob("*.safetensors"))[0].unlink()  # block.0
    assert list(load_tensors(tmp_path, ["block.3", "block.1"])) == ["block.1", "block.3"]


@pytest.mark.parametrize("shard_bytes", [1, 1 << 30])
def test_a_name_that_comes_twice_is_refused(shard_bytes: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"two tensors are called 'a\.b'"):
        save_tensors(tmp_path, [("a.b", torch.zeros(2)), ("a.b", torch.ones(2))], shard_bytes=shard_bytes)


def test_files_written_one_by_one_read_by_their_index(tmp_path: Path) -> None:
    tensors = sample(3)
    files = {name: f"{number}.safetensors" for number, name in enumerate(tensors)}
    for name, file in files.items():
        save_file({name: tensors[name]}, tmp_path / file)
    backwards = dict(reversed(files.items()))
    write_index(tmp_path, backwards)
    found = load_tensors(tmp_path)
    assert list(found) == list(backwards)
    for name, tensor in tensors.items():
        assert_same_bits(found[name], tensor)
        assert_same_bits(load_tensors(tmp_path, [name])[name], tensor)


@pytest.mark.parametrize(
    "file", ["../secret", "/{folder}/secret", "..", ".", "", "in/secret", "in\\secret", "a\0b", 3, None]
)
def test_an_index_that_leads_out_of_its_folder_is_refused(file: object, tmp_path: Path) -> None:
    """The file is there in every case where a path can lead to it: only the name is wrong."""
    folder = tmp_path / "folder"
    save_tensors(folder, {"good": torch.ones(2), "bad.name": torch.zeros(2)})
    (folder / "in").mkdir()
    for place in (tmp_path, folder / "in"):
        save_file({"bad.name": torch.zeros(2)}, place / "secret")
    if isinstance(file, str):
        file = file.format(folder=tmp_path)
    (folder / INDEX).write_text(json.dumps({"good": "tensors-00000.safetensors", "bad.name": file}))
    with pytest.raises(ValueError, match=r"tensors\.json: tensor 'bad\.name' is in .*no file of this folder"):
        load_tensors(folder, ["good"])


def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    save_tensors(folder, {"a.b": torch.ones(2)})
    outside = (folder / "tensors-00000.safetensors").rename(tmp_path / "outside")
    (folder / "tensors-00000.safetensors").symlink_to(outside)
    with pytest.raises(ValueError, match=r"tensor 'a\.b' is in 'tensors-00000\.safetensors'"):
        load_tensors(folder)
    (tmp_path / "alias").symlink_to(folder)
    outside.rename(folder / "real")
    (folder / "tensors-00000.safetensors").unlink()
    (folder / "tensors-00000.safetensors").symlink_to("real")
    assert load_tensors(tmp_path / "alias")["a.b"].tolist() == [1, 1]  # what stays inside is harmless
