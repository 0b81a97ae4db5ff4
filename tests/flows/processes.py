"""Programs of this checkout in processes of their own, which tests watch and kill, and what these leave in a store."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread

import numpy as np
import prefect
import yaml
from filelock import FileLock

from flows.config import CompressConfig
from lsp_core.checkpoint import FIELDS, SLOTS, read_fields
from lsp_core.durable import DamagedFileError
from storage.digest import digest_folder
from storage.grid import MEASURED, SKIPPED, KLGrid
from storage.store import Store
from storage.upkeep import verify

ROOT = Path(__file__).parents[2]
SECONDS = 240.0  # until a run must have come as far as it is waited for
BEGINS = re.compile(r"\d\d:\d\d:\d\d (.+): computing \(")
ENDS = re.compile(r"\d\d:\d\d:\d\d (.+): (?:cached|\d+\.\d s)$")


@dataclass(frozen=True, kw_only=True)
class Computed:
    """When a run began to compute a stage and when it was done with it, if ever, by ``time.monotonic``."""

    began: float
    ended: float | None

    @property
    def seconds(self) -> float:
        """Returns how long the stage took. Errors: ``AssertionError`` if it was not finished."""
        assert self.ended is not None
        return self.ended - self.began


class Run:
    """``python ARGUMENTS`` in the checkout, in a process and a process group of its own.

    Its output is read as it comes, every line with the time at which it came.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.ended: float | None = None
        self._lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # ignored below a background job
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def text(self) -> str:
        """Returns what it has printed."""
        return "".join(line for _, line in self._lines)

    def wait(self) -> int:
        """Returns its exit status, once it has ended."""
        status = self.process.wait(timeout=SECONDS)
        self._reader.join()
        self.ended = self.ended or time.monotonic()
        return status

    def until(self, condition: Callable[[], bool], pause: float = 0.001) -> None:
        """Returns as soon as ``condition`` holds, which is asked every ``pause`` seconds.

        Errors: ``AssertionError`` if the process ends first, or the time is up.
        """
        limit = time.monotonic() + SECONDS
        while True:
            ended = self.process.poll() is not None  # asked first: the condition may come with the end
            if ended:
                self._reader.join()
            if condition():
                return
            assert not ended, self.text()
            assert time.monotonic() < limit, self.text()
            time.sleep(pause)

    def kill(self) -> None:
        """Ends the whole group at once."""
        self.ended = time.monotonic()
        os.killpg(self.process.pid, signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def interrupt(self) -> None:
        """Does what Ctrl-C on a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def computed(self) -> dict[str, Computed]:
        """Returns the stages that this run has begun to compute, by label."""
        ended = {match[1]: at for at, line in list(self._lines) if (match := ENDS.match(line))}
        began = {match[1]: at for at, line in list(self._lines) if (match := BEGINS.match(line))}
        return {label: Computed(began=at, ended=ended.get(label)) for label, at in began.items()}

    def done(self) -> set[str]:
        """Returns the labels of the stages that this run has computed or taken from the store."""
        return {match[1] for _, line in list(self._lines) if (match := ENDS.match(line))}

    def seconds(self) -> float:
        """Returns the time that this run, which has ended, spent computing stages."""
        assert self.ended is not None
        return sum((stage.ended or self.ended) - stage.began for stage in self.computed().values())

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self._lines.append((time.monotonic(), line))


@contextmanager
def starting(folder: Path) -> Iterator[Callable[[CompressConfig], Run]]:
    """Yields a function that starts ``python -m flows compress`` on this process's Prefect server.

    Configurations are written to ``folder``. No run outlives the ``with`` block.
    """
    runs: list[Run] = []
    server = {"PREFECT_API_URL": str(prefect.settings.PREFECT_API_URL.value())}

    def start(config: CompressConfig) -> Run:
        path = folder / f"{len(runs)}.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        runs.append(Run(["-m", "flows", "compress", str(path)], server))
        return runs[-1]

    try:
        yield start
    finally:
        for run in runs:
            if run.process.poll() is None:
                run.kill()


def measured_rows(store: Path) -> list[int]:
    """Returns the rows that an unfinished ``measure`` has behind it."""
    return sorted(int(path.parent.name) for path in store.glob("work/*/grid/status/c/*/0"))


def trained_steps(store: Path) -> int:
    """Returns the optimizer steps in the newest checkpoint of an unfinished ``train``, 0 where there is none."""
    return max(map(saved_steps, store.glob("work/*")), default=0)


def saved_steps(work: Path) -> int:
    """Returns the optimizer steps in the newest checkpoint of the work of one stage, 0 where there is none."""
    steps = [0]
    for slot in (*SLOTS, SLOTS[0]):  # which may have been in the making, and whole before the other is replaced
        with suppress(DamagedFileError):  # the stage ended meanwhile, or the slot is written anew
            steps.append(int(read_fields(work / "checkpoint" / slot / FIELDS)["step"]))
    return max(steps)


def digests(store: Path) -> dict[str, str]:
    """Returns what the store holds: the digest of every artifact by stage and key."""
    names = store.glob("manifest/*/*.json")
    return {path.relative_to(store / "manifest").as_posix(): json.loads(path.read_text())["digest"] for path in names}


def payload(store: Path, kind: str) -> Path:
    """Returns the folder of the only artifact of a stage."""
    (digest,) = {digest for name, digest in digests(store).items() if name.startswith(f"{kind}/")}
    return store / "payload" / digest


def assert_same(folder: Path, reference: Path) -> None:
    """Every artifact, the grid and the final checkpoint of ``folder`` equal those of ``reference``."""
    assert digests(folder / "store") == digests(reference / "store")
    grid, whole = (KLGrid.open(str(payload(place / "store", "measure"))).read() for place in (folder, reference))
    assert grid.identical(whole)
    assert set(np.unique(grid["status"])) <= {MEASURED, SKIPPED}
    checkpoints = [digest_folder(place / "output" / "checkpoints" / "0.3-kl") for place in (folder, reference)]
    assert checkpoints[0] == checkpoints[1]


def assert_one_copy(store: Path) -> None:
    """There is one whole payload of each digest, nothing unfinished, and no lock that anybody holds."""
    kept = digests(store)
    assert {path.name for path in (store / "payload").iterdir()} == set(kept.values())
    assert verify(Store(str(store))) == (len(kept), [])
    assert [path for path in (store / "work").iterdir() if path.is_dir()] == []
    for path in store.rglob("*.lock"):
        with FileLock(path).acquire(blocking=False):
            pass
    assert list(store.rglob("*.tmp")) == []
