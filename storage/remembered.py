"""A memory of file digests, so that a large model is not hashed at each run.

A file is taken for unchanged if path, device, inode, size, mtime and ctime are those it was hashed with. A write moves
the ctime, which no program can set; one through a memory map may do so late, and ``verify`` is the remedy.
"""

import logging
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from storage.digest import canonical_json, digest_bytes, digest_file
from storage.places import cache_folder

log = logging.getLogger(__name__)

FILE = "digests.sqlite"
SETTLED_NS = 2_000_000_000  # no file system that is in use has coarser times
LOCK_SECONDS = 10.0  # another process holds the database for milliseconds
DAMAGE = {sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}  # SQLITE_ERROR: another table layout
TABLE = 'CREATE TABLE IF NOT EXISTS files (path BLOB PRIMARY KEY, facts TEXT, digest TEXT, "check" TEXT) WITHOUT ROWID'
RECALL = 'SELECT digest, "check" FROM files WHERE path = ? AND facts = ?'
REMEMBER = "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)"


class DigestMemory:
    """The memory in ``folder``, the cache folder by default; many threads and processes may use it at once.

    One that cannot be used costs speed alone, which is said once in the log; one that is damaged is replaced.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._database = (cache_folder() if folder is None else folder) / FILE
        self._given_up: set[str] = set()  # statements: a memory that cannot be written to may still be read

    def digest(self, path: Path, *, verify: bool = False) -> str:
        """Returns the sha256 of a file's content, remembered or read; ``verify`` reads it whatever is remembered.

        Errors: ``OSError`` for a file that cannot be read.
        """
        path = path.resolve()
        started = time.time_ns()
        facts = _facts(path.stat())
        remembered = None if verify else self._recall(path, facts)
        if remembered is not None:
            return remembered
        digest = digest_file(path)
        after = path.stat()
        settled = max(after.st_mtime_ns, after.st_ctime_ns) <= started - SETTLED_NS
        if settled and _facts(after) == facts:  # else a change might leave no trace in these facts
            self._remember(path, facts, digest)
        return digest

    def _recall(self, path: Path, facts: str) -> str | None:
        for digest, check in self._execute(RECALL, (os.fsencode(path), facts)):
            if check == _check(path, facts, digest):
                return str(digest)
        return None

    def _remember(self, path: Path, facts: str, digest: str) -> None:
        row = (os.fsencode(path), facts, digest, _check(path, facts, digest))
        self._execute(REMEMBER, row)

    def _execute(self, statement: str, values: tuple[bytes | str, ...]) -> list[tuple[str, str]]:
        """Returns the rows of one statement, or none where the memory cannot be used."""
        if statement in self._given_up:
            return []
        try:
            try:
                return self._run(statement, values)
            except sqlite3.Error as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF not in DAMAGE:
                    raise
                log.warning("the memory of file digests is damaged and replaced: %s (%s)", self._database, error)
                self._delete()
                return self._run(statement, values)
        except (sqlite3.Error, OSError) as error:
            if not self._given_up:
                log.warning("file digests cannot be remembered in %s (%s): files are hashed", self._database, error)
            self._given_up.add(statement)
            return []

    def _run(self, statement: str, values: tuple[bytes | str, ...]) -> list[tuple[str, str]]:
        self._database.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(self._database, timeout=LOCK_SECONDS, isolation_level=None)) as connection:
            connection.text_factory = lambda text: text.decode(errors="replace")  # damaged text fails its check
            connection.execute("PRAGMA synchronous = OFF")  # what a power cut damages is noticed like other damage
            connection.execute(TABLE)
            return connection.execute(statement, values).fetchall()

    def _delete(self) -> None:
        for name in (FILE + "-journal", FILE):  # a journal left behind would be applied to the next database
            self._database.with_name(name).unlink(missing_ok=True)


def _facts(status: os.stat_result) -> str:
    numbers = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return " ".join(map(str, numbers))  # as text: an inode may exceed SQLite's integers


def _check(path: Path, facts: str, digest: str) -> str:
    """Returns what tells a row that is as it was written from one in which a bit has flipped."""
    return digest_bytes(canonical_json([os.fsencode(path).hex(), facts, digest]).encode())
