"""Files below the root of a store, on any fsspec file system: every operation persistent, every name checked."""

import asyncio
import errno
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from storage.faults import Patience, StoreError, first_line, persist
from storage.manifest import check_relative
from storage.places import check_uri

T = TypeVar("T")

# Left to themselves, s3fs and botocore both try again: for 15 minutes and more where a server accepts and is silent.
S3_LIMITS = {"connect_timeout": 5, "read_timeout": 10, "retries": {"total_max_attempts": 1}}
S3_TRIES = 2  # of one request: a part of an upload that was cut does not cost the whole file
# aiohttp bounds the wait for an answer, but not that for a server to take the body of a request.
UPLOAD_SECONDS = 20.0
SLOWEST_UPLOAD = 1 << 18  # bytes a second, added to it


class LeadsElsewhere(ValueError):  # noqa: N818  (a state of the store)
    """A name in the store that is a link out of its place."""


class Files:
    """The files below ``uri``: a local folder, or an fsspec URI such as ``s3://bucket/prefix``.

    ``options`` go to the file system. Names are relative, with slashes. Errors: ``StoreError`` if the place is to be
    ``writable`` and cannot be written to and read; from every operation ``StoreError``, or ``LeadsElsewhere`` where a
    link on a local store leads out of it.
    """

    def __init__(self, uri: str, options: Mapping[str, Any] | None, patience: Patience, *, writable: bool) -> None:
        check_uri(uri)
        self._patience = patience
        fresh = {"use_listings_cache": False} if "://" in uri else {}  # other processes write here too
        try:
            self.fs, root = fsspec.core.url_to_fs(uri, **{**fresh, **limits(uri), **(options or {})})
        except (ValueError, ImportError) as error:
            raise StoreError(f"store {uri!r} is no folder or URI that fsspec knows: {error}") from None
        self._root: str = root.rstrip("/")
        if _is_s3(uri):
            self.fs.retries = S3_TRIES
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.uri: str = self._root if self.is_local else uri.rstrip("/")  # absolute: the working folder may change
        if writable:
            self._check_usable()

    def _check_usable(self) -> None:
        probe = f"probe-{uuid.uuid4().hex}"

        def use() -> None:
            try:
                self._pipe(probe, b"probe")
            except FileNotFoundError:  # asked first, s3fs would wait three times as long for a server that hangs
                self.fs.makedirs(self._root, exist_ok=True)
                self._pipe(probe, b"probe")
            self.fs.cat_file(self._at(probe))
            self.fs.rm_file(self._at(probe))

        try:
            persist(use, "writing and reading a probe", self.uri, self._patience)
        except StoreError:
            raise
        except Exception as error:  # whatever a file system raises for a place that it cannot use
            reason = getattr(error, "strerror", None) or first_line(error)
            problem = f"store {self.uri!r} cannot be written to and read ({reason})"
            remedy = "fix its permissions" if self.is_local else "fix the credentials or its permissions"
            raise StoreError(f"{problem}: {remedy}, or name another") from None
        finally:
            if self.is_local and Path(self._at(probe)).is_file():  # of a disk that was full
                Path(self._at(probe)).unlink()

    def path(self, name: str) -> Path:
        """Returns where a file or folder of a local store lies.

        Errors: ``LeadsElsewhere`` where a link leads out of the store.
        """
        assert self.is_local
        path = Path(self._at(name))
        root = Path(os.path.realpath(self._root))
        real = Path(os.path.realpath(path))
        if real != root / name:
            raise LeadsElsewhere(f"store {self.uri!r}: {name} is a link that leads elsewhere ({real}): remove it")
        return path

    def entry(self, name: str) -> Path:
        """Returns where a name of a local store is, be it a link: to be replaced or deleted, not to be followed.

        Errors: ``LeadsElsewhere`` where a link above it leads out of the store.
        """
        folder, _, last = check_relative(name).rpartition("/")
        return (self.path(folder) if folder else Path(self._root)) / last

    def uri_of(self, name: str) -> str:
        """Returns the fsspec URI of a file or folder."""
        uri: str = self.fs.unstrip_protocol(self._at(name))
        return uri

    def read(self, name: str) -> bytes:
        """Returns a file's content. Errors: ``FileNotFoundError``."""
        where = str(self.path(name)) if self.is_local else self._at(name)
        data: bytes = self._persist(lambda: self.fs.cat_file(where), f"reading {name}")
        return data

    def write(self, name: str, data: bytes) -> None:
        """Writes a file such that nobody ever reads a part of it."""
        with self.staged(name, data):
            pass

    @contextmanager
    def staged(self, name: str, data: bytes) -> Iterator[None]:
        """Makes a file appear, whole, when the block ends without an error.

        On a local store the room for it is taken before the block: what is left is a rename.
        """
        if not self.is_local:
            yield
            self._persist(lambda: self._pipe(name, data), f"writing {name}")
            return
        target = self.entry(name)
        temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")

        def fill() -> None:
            target.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

        try:
            self._persist(fill, f"writing {name}")
            yield
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(target.parent)

    def infos(self, name: str) -> dict[str, tuple[int, float]]:
        """Returns size in bytes and time of writing, in seconds since 1970, of every file below ``name``.

        By the name relative to it, which is empty for a file itself; links are not followed. A time that the file
        system does not tell is now.
        """
        if self.is_local:
            return self._persist(lambda: _local_infos(self.path(name)), f"listing {name}")
        found = self._persist(lambda: self.fs.find(self._at(name), detail=True), f"listing {name}")
        start = self._at(name)
        return {
            path[len(start) + 1 :]: (info["size"], _written(info))
            for path, info in found.items()
            if path == start or path.startswith(start + "/")
        }

    def sizes(self, name: str) -> dict[str, int]:
        """Returns the sizes that ``infos`` gives."""
        return {path: size for path, (size, _) in self.infos(name).items()}

    def names(self, folder: str) -> list[str]:
        """Returns the names of what lies right in ``folder``, empty for the root, sorted; none if it is absent."""

        def listed() -> list[str]:
            if self.is_local:
                path = self.path(folder)
                return os.listdir(path) if path.is_dir() else []  # noqa: PTH208  (names, not paths)
            try:
                return [path.rstrip("/").rsplit("/", 1)[-1] for path in self.fs.ls(self._at(folder), detail=False)]
            except FileNotFoundError:
                return []

        names = self._persist(listed, f"listing {folder}")
        return sorted(name for name in names if name not in ("", ".", ".."))  # objects may have any name

    def remove(self, name: str) -> None:
        """Deletes a file or a folder with all that is in it; nothing if it is absent."""
        assert name, "the store itself is never deleted"
        if self.is_local:
            entry = self.entry(name)
            if entry.is_dir() and not entry.is_symlink():
                move_aside(entry)
            else:
                entry.unlink(missing_ok=True)
        else:
            with suppress(FileNotFoundError):
                self._persist(lambda: self.fs.rm(self._at(name), recursive=True), f"deleting {name}")

    def upload(self, file: Path, name: str, patience: Patience | None = None) -> None:
        """Copies a file of this machine into a store elsewhere."""
        size = file.stat().st_size
        self._persist(lambda: self._send(size, "put_file", str(file), self._at(name)), f"uploading {name}", patience)

    def download(self, name: str, file: Path) -> None:
        """Copies a file of a store elsewhere to this machine. Errors: ``FileNotFoundError``."""

        def fetch() -> None:
            file.parent.mkdir(parents=True, exist_ok=True)
            self.fs.get_file(self._at(name), str(file))

        self._persist(fetch, f"downloading {name}", disk=str(file.parent))

    def _pipe(self, name: str, data: bytes) -> None:
        self._send(len(data), "pipe_file", self._at(name), data)

    def _send(self, size: int, method: str, *arguments: Any) -> None:
        """Calls a method that uploads ``size`` bytes. Errors: ``TimeoutError`` where it would take for ever."""
        if not self.fs.async_impl:
            getattr(self.fs, method)(*arguments)
            return
        seconds = UPLOAD_SECONDS + size / SLOWEST_UPLOAD
        sending = asyncio.wait_for(getattr(self.fs, f"_{method}")(*arguments), seconds)
        future = asyncio.run_coroutine_threadsafe(sending, self.fs.loop)
        try:
            future.result()
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"not taken within {seconds:.0f} s") from error
        except BaseException:
            future.cancel()
            raise

    def _at(self, name: str) -> str:
        return f"{self._root}/{check_relative(name)}" if name else self._root

    def _persist(
        self, operation: Callable[[], T], what: str, patience: Patience | None = None, disk: str | None = None
    ) -> T:
        try:
            return persist(operation, what, self.uri, patience or self._patience, disk=disk)
        except (FileNotFoundError, ValueError):  # a StoreError is one
            raise
        except Exception as error:  # whatever a file system raises where it is refused
            problem = f"store {self.uri!r}: {what} failed ({first_line(error)})"
            raise StoreError(f"{problem}: fix its permissions or the credentials, or name another") from error


def limits(uri: str) -> dict[str, Any]:
    """Returns the options that bound how long the file system of ``uri`` waits for an answer."""
    return {"config_kwargs": deepcopy(S3_LIMITS)} if _is_s3(uri) else {}  # botocore writes to it


def sync_folder(folder: Path) -> None:
    """Makes the names in a local folder outlive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Writes a file of this machine such that nobody ever reads a part of it."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def renamed(source: Path, target: Path) -> bool:
    """Renames ``source`` to ``target`` and returns True, or returns False where there is a ``target`` already."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        return False
    return True


def move_aside(folder: Path) -> None:
    """Deletes ``folder`` in such a way that nobody sees it half deleted; another process may do the same."""
    with tempfile.TemporaryDirectory(prefix="replaced-", dir=folder.parent) as aside, suppress(FileNotFoundError):
        folder.rename(Path(aside) / folder.name)


def _is_s3(uri: str) -> bool:
    return uri.startswith(("s3://", "s3a://"))


def _local_infos(path: Path) -> dict[str, tuple[int, float]]:
    def stop(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # deleted meanwhile, or never there
            raise error

    if path.is_file():
        files = [path]
    else:
        files = [Path(parent, name) for parent, _, names in os.walk(path, onerror=stop) for name in names]
    found = {}
    for file in files:
        with suppress(FileNotFoundError):
            facts = file.lstat()
            found["" if file == path else file.relative_to(path).as_posix()] = (facts.st_size, facts.st_mtime)
    return found


def _written(info: Mapping[str, Any]) -> float:
    for field in ("mtime", "LastModified", "created"):
        when = info.get(field)
        if when is not None:
            return float(when.timestamp() if hasattr(when, "timestamp") else when)
    return time.time()
