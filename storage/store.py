"""The content-addressed store of artifacts, on any fsspec file system.

    payload/<digest>/<files>       named by what they hold
    manifest/<kind>/<key>.json     written last; what has no manifest does not exist
    work/<key>/                    work that a second run continues
    run/<id>.json                  what each run needed
    results/<key>                  Prefect's records

Publishing is atomic for readers: the payload's files first, then the manifest.
"""

import logging
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from storage.digest import digest_bytes, digest_file, digest_folder
from storage.faults import Patience, StoreError, first_line
from storage.files import Files, LeadsElsewhere, move_aside, renamed, sync_folder
from storage.manifest import ArtifactRef, FileFacts, Lineage, Manifest
from storage.places import cache_folder
from storage.work import WorkFolder

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")  # what a kind or a key may be


class ArtifactMissing(StoreError):  # noqa: N818  (a state of the store)
    """A reference to an artifact whose files are not, or no longer, in the store."""


class Store:
    """The store at ``uri``: a local folder, or an fsspec URI such as ``s3://bucket/prefix``.

    ``verify``: what is found is digested, once, not only measured. ``options`` go to the file system. ``place``: what
    ``tasks.places.open_store`` opens it by, if not its URI.
    Errors: ``StoreError`` if it is to be ``writable`` and cannot be written to and read.
    """

    def __init__(
        self,
        uri: str,
        *,
        verify: bool = False,
        writable: bool = True,
        options: Mapping[str, Any] | None = None,
        patience: Patience | None = None,
        place: str | None = None,
    ) -> None:
        self.files = Files(uri, options, patience or Patience(), writable=writable)
        self.uri = self.files.uri
        self.place = place or self.uri
        self.verify = verify
        self._writable = writable
        self._verified: set[str] = set()  # digests of payloads

    def find(self, kind: str, key: str) -> ArtifactRef | None:
        """Returns the artifact, or None where there is none or it is damaged, which is said in the log.

        Whole means: the manifest reads, and every payload file is there with its size, under ``verify`` its digest.
        """
        try:
            manifest = Manifest.from_json(self.files.read(_manifest_name(kind, key)), kind, key)
        except FileNotFoundError:
            return None
        except StoreError:
            raise
        except ValueError as error:
            log.warning("%s %s: its manifest is damaged (%s); it is computed again", kind, key[:12], first_line(error))
            return None
        problem = self.problem(manifest, verify=self.verify)
        if problem is not None:
            log.warning("%s %s is damaged (%s); it is computed again", kind, key[:12], problem)
            return None
        return self._ref(manifest)

    def problem(self, manifest: Manifest, *, verify: bool) -> str | None:
        """Returns what is wrong with the payload of an artifact, or None; ``verify``: reads every byte of it."""
        problem = self._size_problem(manifest.digest, manifest.files)
        if problem is None and verify and manifest.digest not in self._verified:
            problem = self._digest_problem(manifest)
            if problem is None:
                self._verified.add(manifest.digest)
        return problem

    def publish(self, kind: str, key: str, folder: Path, lineage: Lineage) -> ArtifactRef:
        """Makes the files of ``folder`` the artifact of ``key`` and returns it; a local store moves the folder.

        Two publishers of one key both succeed and leave one artifact. Errors: ``StoreError``.
        """
        return self.publish_digested(kind, key, folder, digest_output(folder), lineage)

    def publish_digested(
        self, kind: str, key: str, folder: Path, digested: tuple[str, dict[str, FileFacts]], lineage: Lineage
    ) -> ArtifactRef:
        """Publishes as ``publish`` does what ``digest_output`` has digested."""
        digest, files = digested
        _open_up(folder, files)
        manifest = Manifest(
            kind=kind,
            key=key,
            digest=digest,
            num_bytes=sum(facts.size for facts in files.values()),
            files=files,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            lineage=lineage,
        )
        with self.files.staged(_manifest_name(kind, key), manifest.to_json()):
            if self.files.is_local:
                self._move_payload(manifest, folder)
            elif self.problem(manifest, verify=True) is not None:
                for name in files:
                    self.files.upload(folder / name, f"payload/{digest}/{name}")
        return self._ref(manifest)

    def local(self, ref: ArtifactRef) -> Path:
        """Returns a folder of this machine with the artifact's files; not to be written to.

        Errors: ``ArtifactMissing`` if it is not in the store, whole.
        """
        manifest = self.manifest(ref.kind, ref.key)
        if self.files.is_local:
            if self.problem(manifest, verify=False) is not None:
                raise self._missing(ref.kind, ref.key)
            return self.files.path(f"payload/{manifest.digest}")
        target = self._cache_folder() / "payload" / manifest.digest
        if target.is_dir() and _local_problem(target, manifest.files, verify=self.verify) is not None:
            log.warning("the local copy of %s %s is damaged; it is fetched again", ref.kind, ref.key[:12])
            move_aside(target)
        if not target.is_dir():
            self._fetch(manifest, target)
        return target

    def payload_uri(self, ref: ArtifactRef) -> str:
        """Returns where the artifact's files lie, as an fsspec URI."""
        return self.files.uri_of(f"payload/{ref.digest}")

    def manifest(self, kind: str, key: str) -> Manifest:
        """Returns the manifest of an artifact. Errors: ``ArtifactMissing``."""
        try:
            return Manifest.from_json(self.files.read(_manifest_name(kind, key)), kind, key)
        except StoreError:
            raise
        except (FileNotFoundError, ValueError):
            raise self._missing(kind, key) from None

    def manifests(self) -> Iterator[Manifest]:
        """Yields the manifest of every artifact; what is no manifest is said in the log and left out."""
        for kind, key in self.places():
            try:
                yield Manifest.from_json(self.files.read(_manifest_name(kind, key)), kind, key)
            except FileNotFoundError:  # deleted meanwhile
                continue
            except StoreError:
                raise
            except ValueError as error:
                log.warning("%s %s: its manifest is damaged (%s)", kind, key[:12], first_line(error))

    def places(self) -> Iterator[tuple[str, str]]:
        """Yields kind and key of every manifest, readable or not."""
        for kind in filter(NAME.fullmatch, self.files.names("manifest")):
            for name in self.files.names(f"manifest/{kind}"):
                key = name.removesuffix(".json")
                if key != name and NAME.fullmatch(key):
                    yield kind, key

    def withdraw(self, kind: str, key: str) -> None:
        """Deletes a manifest, so that the artifact is computed again by the next run that needs it."""
        self.files.remove(_manifest_name(kind, key))

    def work(self, key: str) -> WorkFolder:
        """Returns the resumable work under ``key``."""
        name = f"work/{key}"
        return WorkFolder(
            self.files, name, self.files.path(name) if self.files.is_local else self._cache_folder() / name
        )

    def _missing(self, kind: str, key: str) -> ArtifactMissing:
        return ArtifactMissing(f"{kind} {key[:12]} is not in store {self.uri!r} any more: run again")

    def _ref(self, manifest: Manifest) -> ArtifactRef:
        return ArtifactRef(
            kind=manifest.kind,
            key=manifest.key,
            uri=self.files.uri_of(f"payload/{manifest.digest}"),
            digest=manifest.digest,
            num_bytes=manifest.num_bytes,
        )

    def _size_problem(self, digest: str, files: Mapping[str, FileFacts]) -> str | None:
        folder = f"payload/{digest}"
        try:
            sizes = self.files.sizes(folder)
            if self.files.is_local:
                for name in files:
                    self.files.path(f"{folder}/{name}")
        except LeadsElsewhere as error:
            return str(error)
        for name, facts in files.items():
            if name not in sizes:
                return f"{name} is missing"
            if sizes[name] != facts.size:
                return f"{name} has {sizes[name]} bytes instead of {facts.size}"
        if not self.files.is_local:
            return None
        if len(sizes) > len(files):  # whoever opens the folder would take them for part of it
            return f"{min(set(sizes) - set(files))} does not belong to it"
        return None if self.files.path(folder).is_dir() else "its files are missing"

    def _digest_problem(self, manifest: Manifest) -> str | None:
        if self.files.is_local:
            return _local_problem(self.files.path(f"payload/{manifest.digest}"), manifest.files, verify=True)
        for name, facts in manifest.files.items():
            partial = self._cache_folder() / "verify" / uuid.uuid4().hex
            try:
                self.files.download(f"payload/{manifest.digest}/{name}", partial)
                if digest_file(partial) != facts.sha256:
                    return f"{name} has another content"
            except FileNotFoundError:  # deleted meanwhile
                return f"{name} is missing"
            finally:
                partial.unlink(missing_ok=True)
        return None

    def _fetch(self, manifest: Manifest, target: Path) -> None:
        partial = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")
        partial.mkdir(parents=True)
        try:
            for name in manifest.files:
                self.files.download(f"payload/{manifest.digest}/{name}", partial / name)
            problem = _local_problem(partial, manifest.files, verify=True)
            if problem is not None:
                log.warning("%s %s is damaged in the store: %s", manifest.kind, manifest.key[:12], problem)
                if self._writable:
                    self.withdraw(manifest.kind, manifest.key)
                raise self._missing(manifest.kind, manifest.key)
            renamed(partial, target)  # unless another process was faster
        except FileNotFoundError:
            raise self._missing(manifest.kind, manifest.key) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _move_payload(self, manifest: Manifest, folder: Path) -> None:
        for name in manifest.files:
            with (folder / name).open("rb") as file:
                os.fsync(file.fileno())
            os.utime(folder / name)  # what was written just now is safe from gc
        target = self.files.entry(f"payload/{manifest.digest}")
        target.parent.mkdir(parents=True, exist_ok=True)
        while not renamed(folder, target):
            if self.problem(manifest, verify=True) is None:  # published before, or by another process meanwhile
                for name in manifest.files:
                    os.utime(target / name)
                shutil.rmtree(folder)
                break
            log.warning("payload %s is damaged and replaced", manifest.digest[:12])
            self.files.remove(f"payload/{manifest.digest}")
        sync_folder(target.parent)

    def _cache_folder(self) -> Path:
        return cache_folder() / digest_bytes(self.uri.encode())[:16]


def _open_up(folder: Path, names: Iterable[str]) -> None:
    """Makes files as readable as their folder: some writers keep a file to its owner."""
    mode = folder.stat().st_mode & 0o666
    for path in (folder / name for name in names):
        if path.stat().st_mode & 0o777 != mode:
            with suppress(PermissionError):  # a file system without modes
                path.chmod(mode)


def _manifest_name(kind: str, key: str) -> str:
    return f"manifest/{kind}/{key}.json"


def digest_output(folder: Path) -> tuple[str, dict[str, FileFacts]]:
    """Returns the digest of what is to be published, and its files by name.

    Errors: ``StoreError`` for what is neither a file nor a folder.
    """
    _refuse_links(folder)
    digest, found = digest_folder(folder)
    return digest, {name: FileFacts(sha256=sha256, size=size) for name, (sha256, size) in found.items()}


def _refuse_links(folder: Path) -> None:
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            mode = os.lstat(Path(parent, name)).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise StoreError(f"{Path(parent, name)} is neither a file nor a folder: it cannot be kept in the store")


def _local_problem(folder: Path, files: Mapping[str, FileFacts], *, verify: bool) -> str | None:
    for name, facts in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != facts.size:
            return f"{name} is missing or has another size"
        if verify and digest_file(path) != facts.sha256:
            return f"{name} has another content"
    return None
