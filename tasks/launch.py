"""Training on several processes: the stage writes what they need to know to a file and starts torch elastic on it.

The stage's own process shows the progress and publishes. Whatever ends it, cancellation, Ctrl-C or SIGKILL, ends the
processes too; the checkpoints are in the stage's scratch folder, where the next run continues.
"""

import logging
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from lsp_core.gram import NonFiniteError
from storage.faults import StoreError, StoreFull, StoreUnavailable
from storage.manifest import ArtifactRef
from storage.store import ArtifactMissing
from tasks.caching import Launch, Runtime, Work
from tasks.elastic import JOIN_SECONDS, Ended, Meeting, run_elastic
from tasks.models import ModelSource

log = logging.getLogger(__name__)

# What every process meets alike, and would meet again; told by name to the stage, which raises it.
TOLD: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ValueError, NonFiniteError, StoreError, StoreFull, StoreUnavailable, ArtifactMissing, OSError)
}
TOLD_SECONDS = 15.0  # that torchrun is given to end by itself after one process has told an error


class ProcessesFailed(ValueError):  # noqa: N818  (a state of the training)
    """The processes of a training died more often than they may be restarted; what they did is kept."""


class Told(BaseModel):
    """An error as it is told: its ``kind`` in ``TOLD``, and of an ``OSError`` its number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    message: str
    number: int | None = None

    @classmethod
    def of(cls, error: Exception) -> "Told":
        kind = next(base.__name__ for base in type(error).__mro__ if base.__name__ in TOLD)
        number = error.errno if isinstance(error, OSError) else None
        message = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and number else str(error)
        return cls(kind=kind, message=message, number=number)

    def error(self) -> Exception:
        kind = TOLD[self.kind]
        return kind(self.message) if self.number is None else OSError(self.number, self.message)


class TrainingSpec(BaseModel):
    """What the processes of one training need to know.

    ``key``: of the stage; ``marker``: a file that every node must see; ``told``: where the leader writes an error.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    place: str
    verify: bool
    key: str | None
    label: str
    runtime: Runtime
    output: Path
    scratch: Path
    marker: Path
    told: Path
    model: ModelSource
    inputs: dict[str, ArtifactRef]
    settings: dict[str, Any]


def in_processes_of_their_own(launch: Launch) -> bool:
    """Whether a training takes more than the stage's own process."""
    return launch.num_processes * launch.num_nodes > 1


def check_launch(launch: Launch, device: str) -> None:
    """Errors: ``ValueError`` for processes that would have no device of their own."""
    kind = torch.device(device)
    if not in_processes_of_their_own(launch) or kind.type == "cpu":
        return
    if kind.type != "cuda" or kind.index is not None:
        raise ValueError(
            f"device={device!r} is one device for {launch.num_processes} processes of a training: use cuda or cpu, or "
            "leave training.num_processes and num_nodes at 1"
        )
    if launch.num_processes > torch.cuda.device_count():
        raise ValueError(
            f"training.num_processes={launch.num_processes} exceeds the {torch.cuda.device_count()} GPUs of this "
            "machine: lower it, each process takes one"
        )


def launch_training(
    work: Work, model: ModelSource, inputs: Mapping[str, ArtifactRef], settings: Mapping[str, Any]
) -> None:
    """Trains on the processes that ``work.runtime.launch`` asks for, which write to ``work.output``.

    Errors: whatever of ``TOLD`` a process told; ``ProcessesFailed`` if they died too often.
    """
    launch = work.runtime.launch
    check_launch(launch, work.runtime.device)
    meeting = Meeting(
        id=f"{work.scratch.name[:16]}-{uuid.uuid4().hex[:8]}",
        endpoint=launch.rendezvous_endpoint,
        num_nodes=launch.num_nodes,
        max_restarts=launch.max_restarts,
    )
    with TemporaryDirectory(prefix="lsp-training-") as name, _marker(work.scratch) as marker:
        folder = Path(name)
        spec = TrainingSpec(
            place=work.store.place,
            verify=work.store.verify,
            key=None if work.kept is None else work.kept.path.name,
            label=work.label,
            runtime=work.runtime,
            output=work.output,
            scratch=work.scratch,
            marker=marker,
            told=folder / "told.json",
            model=model,
            inputs=dict(inputs),
            settings=dict(settings),
        )
        (folder / "spec.json").write_text(spec.model_dump_json(), encoding="utf-8")
        _say(work.label, meeting, launch.num_processes)
        with work.progress() as progress:
            ended = run_elastic(
                meeting,
                launch.num_processes,
                [str(folder / "spec.json")],
                folder,
                hosts=True,
                on_progress=progress,
                stop=_stop(spec.told, work.check),
            )
        if spec.told.exists():
            raise Told.model_validate_json(spec.told.read_text(encoding="utf-8")).error()
        if ended.status != 0:
            raise ProcessesFailed(explain(work.label, meeting, ended))


def _say(label: str, meeting: Meeting, num_processes: int) -> None:
    log.info("%s: on %d processes of this machine", label, num_processes)
    if meeting.num_nodes > 1:
        if not _is_here(meeting.host):
            log.warning(
                "%s: training.rendezvous_endpoint=%s is no address of this machine, where the nodes are to meet: "
                "unless it is forwarded here, name one that the other nodes know this machine by",
                label,
                meeting.endpoint,
            )
        log.info(
            "%s: waiting up to %.0f minutes for %d more of %d nodes; on each of them run: python -m flows join %s "
            "--num-processes %d",
            label,
            JOIN_SECONDS / 60,
            meeting.num_nodes - 1,
            meeting.num_nodes,
            meeting.endpoint,
            num_processes,
        )


def _is_here(host: str) -> bool:
    """Whether ``host`` is an address of this machine."""
    try:
        for family, *_, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, socket.SOCK_STREAM) as probe, suppress(OSError):
                probe.bind(address)
                return True
    except OSError:  # nobody knows it
        pass
    return False


@contextmanager
def _marker(scratch: Path) -> Iterator[Path]:
    """Makes a file by which another machine tells whether it sees the same folder."""
    marker = scratch / f"training-{uuid.uuid4().hex}.tmp"
    marker.touch()
    try:
        yield marker
    finally:
        marker.unlink(missing_ok=True)


def _stop(path: Path, check: Callable[[], None] | None) -> Callable[[], bool]:
    """Returns whether an error was told and the processes go on all the same: not all of them met it.

    What it returns raises what ``check`` does.
    """
    since: list[float] = []

    def stop() -> bool:
        if check is not None:
            check()
        if not since and path.exists():
            since.append(time.monotonic())
        return bool(since) and time.monotonic() - since[0] > TOLD_SECONDS

    return stop


def explain(label: str, meeting: Meeting, ended: Ended) -> str:
    """Returns in one line how the processes ended, and what to do."""
    failure = ended.failure or ""
    if failure.startswith("RendezvousTimeoutError"):
        return (
            f"{label}: {meeting.num_nodes} nodes did not meet at {meeting.endpoint} within {JOIN_SECONDS / 60:.0f} "
            f"minutes: run `python -m flows join {meeting.endpoint}` on each of the others, and see that this machine "
            "can be reached there"
        )
    if failure.startswith(("RendezvousConnectionError", "DistNetworkError")) or any(
        "EADDRINUSE" in line for line in ended.last
    ):
        return (
            f"{label}: the nodes cannot meet at {meeting.endpoint} ({failure}): name this machine as the other nodes "
            "know it, and a free port, in training.rendezvous_endpoint"
        )
    if ended.status < 0:
        how = f"torchrun was ended by {signal.Signals(-ended.status).name}"
    else:
        how = f"a process failed {meeting.max_restarts + 1} times, in the end by: {failure or _killed(ended.last)}"
    memory = "lower micro_batch or use more memory" if "SIGKILL" in how or "emory" in how else "see the lines above"
    return (
        f"{label}: {how}: {memory}; the checkpoints are kept, and the same command continues from the last of them, on "
        "any number of processes"
    )


def _killed(last: list[str]) -> str:
    """Returns torchrun's own word of a process that left none, such as one that was killed."""
    said = [line.partition(":")[2].strip() for line in last if line.strip().startswith("traceback :")]
    return said[-1] if said else (last[-1] if last else "no word")
