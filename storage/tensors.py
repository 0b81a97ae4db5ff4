"""Named tensors in a folder of safetensors files, in shards where they are many."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX = "tensors.json"  # {tensor name: file name}
SHARD_BYTES = 2 << 30


def save_tensors(
    folder: Path, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes the tensors below ``folder``; equal tensors in equal order give equal bytes.

    Pairs are taken one by one, so that no more than ``shard_bytes`` and one tensor are held at once. Errors:
    ``ValueError`` for a name that comes twice.
    """
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    index: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    held, number = 0, 0

    def flush() -> None:
        nonlocal held, number, shard
        name = f"tensors-{number:05d}.safetensors"
        save_file(shard, folder / name)
        index.update(dict.fromkeys(shard, name))
        held, number, shard = 0, number + 1, {}

    folder.mkdir(parents=True, exist_ok=True)
    for name, tensor in pairs:
        if name in shard or name in index:
            raise ValueError(f"two tensors are called {name!r}")
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > shard_bytes:
            flush()
        shard[name] = tensor.detach().cpu().contiguous()
        held += size
    flush()
    write_index(folder, index)


def write_index(folder: Path, files: Mapping[str, str]) -> None:
    """Makes safetensors files in ``folder`` readable by name: ``files`` maps each tensor's name to its file's."""
    (folder / INDEX).write_text(json.dumps(dict(files), indent=1) + "\n", encoding="utf-8")


def load_tensors(folder: Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Returns the tensors of ``folder``, or those called ``names``.

    Errors: as ``iter_tensors``.
    """
    return dict(iter_tensors(folder, names))


def iter_tensors(folder: Path, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yields name and tensor one by one, in the order they were written.

    Errors: ``ValueError`` for an index that names a file outside ``folder``; ``KeyError`` for a name that is not there.
    """
    index: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    for name, file in index.items():
        _refuse_unless(_is_plain(file), folder, name, file)
    missing = set(names or ()) - set(index)
    if missing:
        raise KeyError(f"{folder} holds no tensor {', '.join(sorted(missing))}")
    wanted = {name: file for name, file in index.items() if names is None or name in names}
    inside = folder.resolve()
    for name, file in wanted.items():
        _refuse_unless((folder / file).resolve().is_relative_to(inside), folder, name, file)
    for file in dict.fromkeys(wanted.values()):
        with safe_open(folder / file, framework="pt") as shard:
            for name, place in wanted.items():
                if place == file:
                    yield name, shard.get_tensor(name)


def _is_plain(file: object) -> bool:
    return isinstance(file, str) and file not in ("", ".", "..") and not set(file) & set("/\\\0")


def _refuse_unless(inside: bool, folder: Path, name: str, file: object) -> None:
    if not inside:
        problem = f"tensor {name!r} is in {file!r}, which is no file of this folder"
        raise ValueError(f"{folder / INDEX}: {problem}: the folder is not as it was written, do not use it")
