"""A remembered digest is that of the file as it is now, and a memory that cannot be used costs speed alone."""

import logging
import multiprocessing
import os
import resource
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from storage import remembered
from storage.digest import digest_bytes, digest_file
from storage.places import cache_folder
from storage.remembered import FILE, DigestMemory

DATA = bytes(range(256)) * 40
CHANGED = b"\1" + DATA[1:]
SETTLED_NS = remembered.SETTLED_NS


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a file old after 50 ms, several ticks of the clock that files are stamped with."""
    monkeypatch.setattr(remembered, "SETTLED_NS", 50_000_000)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Returns the files that have been read, in order."""
    read: list[Path] = []

    def watched(path: Path) -> str:
        read.append(path)
        return digest_file(path)

    monkeypatch.setattr(remembered, "digest_file", watched)
    return read


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Returns a file that is old enough to be remembered."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(DATA)
    settle(path)
    return path


def settle(path: Path, nanoseconds: int | None = None) -> None:
    """Waits until a file's ctime, which cannot be set, is old enough."""
    age = time.time_ns() - path.stat().st_ctime_ns
    time.sleep(max(0, (nanoseconds or remembered.SETTLED_NS) - age) / 1e9 + 0.001)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_remembered_file_is_not_read_again_in_this_process_or_the_next(
    file: Path, tmp_path: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = DigestMemory(tmp_path / "memory")
    assert memory.digest(file) == digest_bytes(DATA)
    assert hashed == [file]
    (tmp_path / "link").symlink_to(file)
    monkeypatch.chdir(tmp_path)
    for same in (memory, DigestMemory(tmp_path / "memory")):
        for path in (file, Path(file.name), tmp_path / "link", tmp_path / "memory" / ".." / file.name):
            assert same.digest(path) == digest_bytes(DATA)
    assert hashed == [file]


def test_a_file_that_has_changed_in_any_way_is_read_again(file: Path, tmp_path: Path, hashed: list[Path]) -> None:
    memory = DigestMemory(tmp_path / "memory")
    memory.digest(file)
    before = file.stat()

    with file.open("r+b") as same_inode:
        same_inode.write(CHANGED[:1])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    assert memory.digest(file) == digest_bytes(CHANGED)

    replacement = tmp_path / "replacement"
    replacement.write_bytes(DATA[::-1])
    os.utime(replacement, ns=(before.st_atime_ns, before.st_mtime_ns))
    replacement.replace(file)
    assert file.stat().st_ino != before.st_ino
    assert memory.digest(file) == digest_bytes(DATA[::-1])

    file.write_bytes(DATA + b"more")
    assert memory.digest(file) == digest_bytes(DATA + b"more")
    assert len(hashed) == 4


@pytest.mark.parametrize("field", ["st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns"])
def test_each_fact_counts(field: str, file: Path) -> None:
    status = file.stat()
    values = {name: getattr(status, name) for name in dir(status) if name.startswith("st_")}
    same: Any = SimpleNamespace(**values)
    other: Any = SimpleNamespace(**values | {field: values[field] + 1})
    assert remembered._facts(same) == remembered._facts(status) != remembered._facts(other)


def test_verify_reads_the_file_and_corrects_the_memory(file: Path, tmp_path: Path, hashed: list[Path]) -> None:
    memory = DigestMemory(tmp_path / "memory")
    memory._remember(file, remembered._facts(file.stat()), digest_bytes(CHANGED))  # as if the disk had changed a bit
    assert memory.digest(file) == digest_bytes(CHANGED)
    assert hashed == []
    assert memory.digest(file, verify=True) == digest_bytes(DATA)
    assert memory.digest(file) == digest_bytes(DATA)
    assert hashed == [file]


def test_a_file_is_not_remembered_until_it_has_been_left_alone_for_two_seconds(
    tmp_path: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, "SETTLED_NS", SETTLED_NS)
    memory, file = DigestMemory(tmp_path / "memory"), tmp_path / "file"
    file.write_bytes(DATA)
    os.utime(file, ns=(0, 0))  # old by its mtime alone
    for _ in range(2):
        memory.digest(file)
    assert len(hashed) == 2
    settle(file, 2_000_000_000)
    for _ in range(2):
        memory.digest(file)
    assert len(hashed) == 3


def test_a_file_whose_mtime_lies_ahead_is_not_remembered(file: Path, tmp_path: Path, hashed: list[Path]) -> None:
    os.utime(file, (time.time() + 3600,) * 2)
    settle(file)
    for _ in range(2):
        assert DigestMemory(tmp_path / "memory").digest(file) == digest_bytes(DATA)
    assert hashed == [file] * 2


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_and_change(path: Path) -> str:
        digest = digest_file(path)
        path.write_bytes(CHANGED)
        return digest

    memory = DigestMemory(tmp_path / "memory")
    with monkeypatch.context() as patch:
        patch.setattr(remembered, "digest_file", read_and_change)
        assert memory.digest(file) == digest_bytes(DATA)
    settle(file)
    assert memory.digest(file) == digest_bytes(CHANGED)


def test_what_cannot_be_read_is_an_error_with_its_name(tmp_path: Path) -> None:
    memory = DigestMemory(tmp_path / "memory")
    with pytest.raises(FileNotFoundError, match="absent"):
        memory.digest(tmp_path / "absent")
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        memory.digest(tmp_path)


def test_a_name_that_is_no_text_is_remembered(tmp_path: Path, hashed: list[Path]) -> None:
    file = tmp_path / os.fsdecode(b"f\xff'?.bin")
    file.write_bytes(DATA)
    settle(file)
    for _ in range(2):
        assert DigestMemory(tmp_path / "memory").digest(file) == digest_bytes(DATA)
    assert hashed == [file]


def test_the_memory_lies_in_the_cache_folder(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed: list[Path]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    DigestMemory().digest(file)
    assert [path.name for path in cache_folder().iterdir()] == [FILE]
    DigestMemory(cache_folder()).digest(file)
    assert hashed == [file]


def _digest_all(folder: Path, files: list[Path], barrier: Any, results: Any) -> None:
    barrier.wait()
    memory = DigestMemory(folder)
    results.put([memory.digest(path) for path in files for _ in range(2)])


def test_several_processes_at_once_agree_and_remember(
    tmp_path: Path, hashed: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    files = [tmp_path / str(number) for number in range(30)]
    for number, path in enumerate(files):
        path.write_bytes(DATA + bytes([number]))
    settle(files[-1], SETTLED_NS)  # the processes know nothing of this one's patches
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    processes = [
        context.Process(target=_digest_all, args=(tmp_path / "memory", files, barrier, results)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    expected = [digest_bytes(DATA + bytes([number])) for number in range(30) for _ in range(2)]
    assert [results.get(timeout=60) for _ in processes] == [expected] * 3
    for process in processes:
        process.join()
        assert process.exitcode == 0
    memory = DigestMemory(tmp_path / "memory")
    assert [memory.digest(path) for path in files] == expected[::2]
    assert hashed == []
    assert warnings(caplog) == []


def test_threads_share_one_memory(file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory, barrier = DigestMemory(tmp_path / "memory"), threading.Barrier(8)

    def digest(_: int) -> set[str]:
        barrier.wait()
        return {memory.digest(file) for _ in range(20)}

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(digest, range(8))) == [{digest_bytes(DATA)}] * 8
    assert warnings(caplog) == []


def test_a_memory_that_another_process_holds_is_done_without(
    file: Path,
    tmp_path: Path,
    hashed: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(remembered, "LOCK_SECONDS", 0.05)
    DigestMemory(tmp_path).digest(file)
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        memory = DigestMemory(tmp_path)
        for _ in range(3):
            assert memory.digest(file) == digest_bytes(DATA)
    assert hashed == [file] * 4
    (said,) = warnings(caplog)
    assert "database is locked" in said
    assert DigestMemory(tmp_path).digest(file) == digest_bytes(DATA)
    assert hashed == [file] * 4  # what was remembered before is there still


def _overwrite(database: Path) -> None:
    database.write_bytes(b"not a database, whatever its name says" * 100)


def _cut_short(database: Path) -> None:
    database.write_bytes(database.read_bytes()[:1000])


def _garble(database: Path) -> None:
    data = database.read_bytes()
    database.write_bytes(data[:100] + bytes(256 - byte & 255 for byte in data[100:]))


def _another_layout(database: Path) -> None:
    database.unlink()
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE files (name TEXT, sha256 TEXT)")


@pytest.mark.parametrize("damage", [_overwrite, _cut_short, _garble, _another_layout])
def test_a_damaged_memory_is_replaced(
    damage: Any, file: Path, tmp_path: Path, hashed: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    DigestMemory(tmp_path).digest(file)
    damage(tmp_path / FILE)
    memory = DigestMemory(tmp_path)
    assert memory.digest(file) == digest_bytes(DATA)
    (said,) = warnings(caplog)
    assert "damaged" in said
    assert FILE in said
    assert DigestMemory(tmp_path).digest(file) == digest_bytes(DATA)
    assert hashed == [file] * 2


@pytest.mark.parametrize("column", ["digest", '"check"'])
def test_a_changed_row_is_not_believed(column: str, file: Path, tmp_path: Path, hashed: list[Path]) -> None:
    DigestMemory(tmp_path).digest(file)
    with closing(sqlite3.connect(tmp_path / FILE)) as connection, connection:
        zeros = f"UPDATE files SET {column} = hex(zeroblob(32))"
        assert connection.execute(zeros).rowcount == 1
    assert DigestMemory(tmp_path).digest(file) == digest_bytes(DATA)
    assert hashed == [file] * 2


def test_no_flipped_byte_and_no_lost_end_gives_a_wrong_digest(file: Path, tmp_path: Path) -> None:
    DigestMemory(tmp_path).digest(file)
    database = tmp_path / FILE
    whole = database.read_bytes()
    used = [place for place, byte in enumerate(whole) if byte]
    for place in used[::5]:
        database.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        assert DigestMemory(tmp_path).digest(file) == digest_bytes(DATA)
        database.write_bytes(whole[:place])
        assert DigestMemory(tmp_path).digest(file) == digest_bytes(DATA)


def test_an_empty_database_file_is_a_memory_of_nothing(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).touch()
    assert DigestMemory(tmp_path).digest(file) == digest_bytes(DATA)
    assert warnings(caplog) == []


def test_a_folder_that_cannot_be_made_is_said_once(
    file: Path, hashed: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    memory = DigestMemory(file / "below a file")
    for _ in range(3):
        assert memory.digest(file) == digest_bytes(DATA)
    assert hashed == [file] * 3
    (said,) = warnings(caplog)
    assert "below a file" in said


def _digest_on_a_full_disk(folder: Path, file: Path, results: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no file can grow, as on a full disk
    said: list[logging.LogRecord] = []
    remembered.log.addFilter(lambda record: said.append(record) is not None)
    memory = DigestMemory(folder)
    results.send(([memory.digest(file) for _ in range(3)], [record.getMessage() for record in said]))


@pytest.mark.parametrize("filled", [True, False])
def test_a_full_disk_costs_speed_alone(filled: bool, file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(CHANGED)
    if filled:
        DigestMemory(tmp_path / "memory").digest(file)
    settle(other, SETTLED_NS)
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_digest_on_a_full_disk, args=(tmp_path / "memory", other, writer))
    process.start()
    assert reader.poll(60)
    digests, said = reader.recv()
    process.join()
    assert digests == [digest_bytes(CHANGED)] * 3
    assert len(said) == 1
    assert "cannot be remembered" in said[0]
    assert DigestMemory(tmp_path / "memory").digest(file) == digest_bytes(DATA)


def test_a_memory_that_cannot_be_written_to_is_still_read(
    file: Path, tmp_path: Path, hashed: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    other.write_bytes(CHANGED)
    settle(other)
    DigestMemory(tmp_path).digest(file)
    data = bytearray((tmp_path / FILE).read_bytes())
    data[18] = 3  # a version of the format that SQLite reads and does not write
    (tmp_path / FILE).write_bytes(data)
    memory = DigestMemory(tmp_path)
    for _ in range(2):
        assert memory.digest(other) == digest_bytes(CHANGED)
        assert memory.digest(file) == digest_bytes(DATA)
    assert hashed == [file, other, other]
    (said,) = warnings(caplog)
    assert "cannot be remembered" in said
