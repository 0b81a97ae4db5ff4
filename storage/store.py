"""The content-addressed store of artifacts, on any fsspec file system.

    payload/<digest>/<files>       named by what they hold
    manifest/<kind>/<key>.json     written last; what has no manifest does not exist
    work/<key>/                    work that a second run continues, on this machine

Publishing is atomic for readers: payload first, then the manifest under a temporary name, synced and renamed.
"""

import errno
import json
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from pydantic import BaseModel, ConfigDict

from storage.digest import canonical_json, digest_bytes, digest_folder
from storage.places import cache_folder

log = logging.getLogger(__name__)

PACKAGES = ("torch", "transformers", "safetensors", "zarr", "numpy")


class StoreError(ValueError):
    """A store that cannot be read or written; the message says what, where, and what to do."""


class ArtifactMissing(StoreError):  # noqa: N818  (a state of the store)
    """A reference to an artifact whose files are not, or no longer, in the store."""


class ArtifactRef(BaseModel):
    """What tasks pass instead of tensors: ``key`` says what made it, ``digest`` what it holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    key: str
    uri: str
    digest: str
    num_bytes: int


class Store:
    """The store at ``uri``: a local folder, or an fsspec URI such as ``s3://bucket/prefix``.

    Errors: ``StoreError`` if it cannot be written to and read.
    """

    def __init__(self, uri: str) -> None:
        try:
            self._fs, self._root = fsspec.core.url_to_fs(uri)
        except (ValueError, ImportError) as error:
            raise StoreError(f"store {uri!r} is no folder or URI that fsspec knows: {error}") from None
        self._is_local = isinstance(self._fs, LocalFileSystem)
        self.uri: str = self._root if self._is_local else uri  # absolute: the working folder may change
        self._check_usable()

    def _check_usable(self) -> None:
        probe = self._path(f"probe-{uuid.uuid4().hex}")
        try:
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(probe, b"")
            self._fs.cat_file(probe)
            self._fs.rm_file(probe)
        except OSError as error:
            reason = error.strerror or str(error)
            problem = f"store {self.uri!r} cannot be written to and read ({reason})"
            raise StoreError(f"{problem}: fix its permissions or name another") from None

    def find(self, kind: str, key: str) -> ArtifactRef | None:
        """Returns the artifact, or None where there is none or it is damaged, which is said in the log.

        Whole means: the manifest reads, and every payload file is there with its size.
        """
        path = self._manifest_path(kind, key)
        if not self._fs.exists(path):
            return None
        try:
            manifest = _checked_manifest(self._fs.cat_file(path), kind, key)
        except (ValueError, FileNotFoundError) as error:
            log.warning("%s %s: its manifest is damaged (%s); it is computed again", kind, key[:12], error)
            return None
        problem = self._payload_problem(manifest["digest"], manifest["files"])
        if problem is not None:
            log.warning("%s %s is damaged (%s); it is computed again", kind, key[:12], problem)
            return None
        return self._ref(manifest)

    def publish(
        self,
        kind: str,
        key: str,
        folder: Path,
        *,
        inputs: Mapping[str, str],
        settings: Mapping[str, Any],
        version: int,
        seconds: float,
    ) -> ArtifactRef:
        """Makes the files of ``folder`` the artifact of ``key`` and returns it; a local store moves the folder.

        Two publishers of one key both succeed and leave one artifact. Errors: ``OSError`` as the file system raises it.
        """
        digest, files = digest_folder(folder)
        listed = {name: {"sha256": sha256, "size": size} for name, (sha256, size) in files.items()}
        if self._payload_problem(digest, listed) is not None:
            self._put_payload(digest, folder, listed)
        manifest: dict[str, Any] = {
            "kind": kind,
            "key": key,
            "digest": digest,
            "num_bytes": sum(size for _, size in files.values()),
            "files": listed,
            "version": version,
            "inputs": dict(inputs),
            "settings": dict(settings),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 3),
            "packages": _package_versions(),
        }
        manifest["manifest_digest"] = _manifest_digest(manifest)
        self._write_last(self._manifest_path(kind, key), json.dumps(manifest, indent=1, sort_keys=True).encode())
        return self._ref(manifest)

    def local(self, ref: ArtifactRef) -> Path:
        """Returns a folder of this machine with the artifact's files; not to be written to.

        Errors: ``ArtifactMissing`` if it is not in the store, whole.
        """
        payload = self._path("payload", ref.digest)
        files = self.manifest(ref)["files"]
        if self._is_local:
            if self._payload_problem(ref.digest, files) is not None:
                raise self._missing(ref)
            return Path(payload)
        target = self._cache_folder() / "payload" / ref.digest
        if target.is_dir() and not _has_sizes(target, files):
            log.warning("the local copy of %s %s is damaged; it is fetched again", ref.kind, ref.key[:12])
            _move_aside(target)
        if not target.is_dir():
            partial = target.with_name(f"{target.name}.{uuid.uuid4().hex}")
            try:
                self._fs.get(payload + "/", f"{partial}/", recursive=True)
            except FileNotFoundError:
                raise self._missing(ref) from None
            if not _has_sizes(partial, files):
                shutil.rmtree(partial)
                raise self._missing(ref)
            if not _renamed(partial, target):
                shutil.rmtree(partial)
        return target

    def payload_uri(self, ref: ArtifactRef) -> str:
        """Returns where the artifact's files lie, as an fsspec URI."""
        uri: str = self._fs.unstrip_protocol(self._path("payload", ref.digest))
        return uri

    def manifest(self, ref: ArtifactRef) -> dict[str, Any]:
        """Returns the manifest of an artifact. Errors: ``ArtifactMissing``."""
        try:
            return _checked_manifest(self._fs.cat_file(self._manifest_path(ref.kind, ref.key)), ref.kind, ref.key)
        except (FileNotFoundError, ValueError):
            raise self._missing(ref) from None

    def work_folder(self, key: str) -> Path:
        """Returns the folder of this machine for resumable work under ``key``; it need not exist."""
        return (Path(self._root) if self._is_local else self._cache_folder()) / "work" / key

    def clear_work(self, key: str) -> None:
        """Deletes the resumable work under ``key``."""
        shutil.rmtree(self.work_folder(key), ignore_errors=True)

    def _missing(self, ref: ArtifactRef) -> ArtifactMissing:
        return ArtifactMissing(f"{ref.kind} {ref.key[:12]} is not in store {self.uri!r} any more: run again")

    def _path(self, *parts: str) -> str:
        return "/".join((self._root.rstrip("/"), *parts))

    def _manifest_path(self, kind: str, key: str) -> str:
        return self._path("manifest", kind, f"{key}.json")

    def _ref(self, manifest: Mapping[str, Any]) -> ArtifactRef:
        fields = {name: manifest[name] for name in ("kind", "key", "digest", "num_bytes")}
        return ArtifactRef(uri=self._fs.unstrip_protocol(self._path("payload", manifest["digest"])), **fields)

    def _payload_problem(self, digest: str, files: Mapping[str, Mapping[str, Any]]) -> str | None:
        """Returns what is wrong with a payload, judged by its files' sizes, or None."""
        for name, facts in files.items():
            try:
                size = self._fs.info(self._path("payload", digest, name))["size"]
            except FileNotFoundError:
                return f"{name} is missing"
            if size != facts["size"]:
                return f"{name} has {size} bytes instead of {facts['size']}"
        return None if self._fs.isdir(self._path("payload", digest)) else "its files are missing"

    def _put_payload(self, digest: str, folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
        target = self._path("payload", digest)
        if not self._is_local:
            self._fs.put(f"{folder}/", target + "/", recursive=True)
            return
        partial = Path(f"{target}.{uuid.uuid4().hex}")
        partial.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(folder, partial)
        for name in files:
            with (partial / name).open("rb") as file:
                os.fsync(file.fileno())
        while not _renamed(partial, Path(target)):
            if self._payload_problem(digest, files) is None:  # published by another process meanwhile
                shutil.rmtree(partial)
                return
            log.warning("payload %s is damaged and replaced", digest[:12])
            _move_aside(Path(target))

    def _write_last(self, path: str, data: bytes) -> None:
        if not self._is_local:
            self._fs.pipe_file(path, data)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}")
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)

    def _cache_folder(self) -> Path:
        return cache_folder() / digest_bytes(self.uri.encode())[:16]


def _renamed(source: Path, target: Path) -> bool:
    """Renames ``source`` to ``target`` and returns True, or returns False where there is a ``target`` already."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _move_aside(folder: Path) -> None:
    """Deletes ``folder`` in such a way that nobody sees it half deleted; another process may do the same."""
    with tempfile.TemporaryDirectory(prefix="replaced-", dir=folder.parent) as aside, suppress(FileNotFoundError):
        folder.rename(Path(aside) / folder.name)


def _has_sizes(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> bool:
    return all((folder / name).is_file() and (folder / name).stat().st_size == files[name]["size"] for name in files)


def _checked_manifest(data: bytes, kind: str, key: str) -> dict[str, Any]:
    manifest = json.loads(data)
    if not isinstance(manifest, dict) or manifest.get("manifest_digest") != _manifest_digest(manifest):
        raise ValueError("its content does not match its digest")
    if (manifest["kind"], manifest["key"]) != (kind, key):
        raise ValueError(f"it is that of {manifest['kind']} {manifest['key'][:12]}")
    return manifest


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    covered = {name: value for name, value in manifest.items() if name != "manifest_digest"}
    return digest_bytes(canonical_json(covered).encode())


def _package_versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
