"""Resumable work under one key: a folder of this machine, on a store elsewhere kept there as well.

On a local store the folder lies in the store. Otherwise whichever copy of a file was written later is gone on from:
another machine may have come further, or the store may have been out of reach. Files are copied in the order in which
they were written, each appearing whole.
"""

import logging
import os
import shutil
import uuid
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path, PurePosixPath

from storage.faults import Patience, StoreError, first_line, full, is_full
from storage.files import Files

log = logging.getLogger(__name__)

FINISHED = "finished-"  # and a digest: a folder that waits to be published, from this machine
OUTPUT = "output"  # made anew
TEMPORARY = (".tmp", ".partial")  # the second is zarr's
ONCE = Patience(attempts=1)  # the next call of ``keep`` is the next try


class WorkFolder:
    """The work folder called ``name`` in a store, at ``path`` on this machine; neither need exist."""

    def __init__(self, files: Files, name: str, path: Path) -> None:
        self._files = files
        self._name = name
        self.path = path
        self._kept: dict[str, tuple[int, int]] = {}  # size and mtime of what the store has

    def fetch(self) -> None:
        """Makes the folder, with what the store has of it. Errors: ``StoreError``."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if is_full(error):
                raise full(str(self.path), "making it") from error
            raise
        for path in list(self.path.rglob("*")):
            if path.is_symlink():  # nothing of ours: whoever writes there would write elsewhere
                log.warning("%s is a link and removed", path)
                path.unlink()
        if self._files.is_local:
            return
        for name, (_, written) in self._files.infos(self._name).items():
            if _is_resumable(name):
                self._fetch_one(name, written)

    def _fetch_one(self, name: str, written: float) -> None:
        here = self.path / name
        if here.exists() and here.stat().st_mtime > written:
            return
        partial = here.with_name(f"{here.name}.{uuid.uuid4().hex}.tmp")  # another part may fetch it too
        self._files.download(f"{self._name}/{name}", partial)
        if here.exists() and here.stat().st_mtime > written:  # meanwhile, by another part on this machine
            partial.unlink()
            return
        os.utime(partial, (written, written))
        partial.replace(here)
        self._kept[name] = _state(here)

    def keep(self, *below: str) -> None:
        """Copies what changed, in the folders and files ``below`` alone if any are named, to the store.

        Who shares the folder with others names its own: a file of theirs may be newer by the time it has been copied.
        A store that does not answer is said in the log, and the work goes on.
        """
        if self._files.is_local:
            return
        states = self._states(below or ("",))
        changed = [name for name, state in states.items() if self._kept.get(name) != state]
        changed.sort(key=lambda name: (states[name][1], name))
        try:
            for name in changed:
                self._files.upload(self.path / name, f"{self._name}/{name}", ONCE)
                self._kept[name] = states[name]
        except StoreError as error:
            reason = first_line(error.__cause__ or error)
            log.warning("%s: %s is kept on this machine alone for now (%s)", self._files.uri, self._name, reason)

    def is_finished(self) -> bool:
        """Returns whether it holds what waits to be published, from this machine."""
        return any(self.path.glob(f"{FINISHED}*"))

    def clear(self) -> None:
        """Deletes the work, here and in the store."""
        shutil.rmtree(self.path, ignore_errors=True)
        if not self._files.is_local:
            self._files.remove(self._name)

    def _states(self, below: Iterable[str]) -> dict[str, tuple[int, int]]:
        states = {}
        roots = [self.path / place for place in below]
        for path in chain.from_iterable([root] if root.is_file() else root.rglob("*") for root in roots):
            name = path.relative_to(self.path).as_posix()
            if _is_resumable(name):
                with suppress(FileNotFoundError):  # a temporary name, of a writer beside this one
                    if path.is_file():
                        states[name] = _state(path)
        return states


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _is_resumable(name: str) -> bool:
    path = PurePosixPath(name)
    return (
        path.parts[0] != OUTPUT
        and not path.parts[0].startswith(FINISHED)
        and path.suffix not in TEMPORARY
        and ".." not in path.parts
        and not path.is_absolute()
    )
