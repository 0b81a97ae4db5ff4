"""Running torch elastic in a process of its own: what it prints is passed on, and nothing of it survives the caller."""

import json
import logging
import os
import queue
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

from tasks.relay import understood

log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[1]
JOIN_SECONDS = 600  # until all nodes of a training have met, at its start and after a restart
SHUTDOWN_SECONDS = 10  # that torchrun gives its processes to end before it kills them
GRACE_SECONDS = 30.0  # that torchrun itself is given
LOOK_SECONDS = 0.5  # between two looks at a silent process
LAST_LINES = 200
FRAME = "frame #"  # of a stack of torch's C++ code, which comes with every failed try to connect
WORKER = "tasks.train_worker"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun's variable: where it writes the failure that came first


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """How the nodes of one training meet: under ``id`` at ``endpoint``, or, of one node, on this machine."""

    id: str
    endpoint: str | None
    num_nodes: int
    max_restarts: int

    @property
    def host(self) -> str:
        assert self.endpoint is not None
        return self.endpoint.rpartition(":")[0]

    @property
    def port(self) -> int:
        assert self.endpoint is not None
        return int(self.endpoint.rpartition(":")[2])


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How torchrun ended: its exit ``status``, its ``last`` lines and, if it says so, the failure that came first."""

    status: int
    last: list[str]
    failure: str | None


def run_elastic(
    meeting: Meeting,
    num_processes: int,
    arguments: list[str],
    folder: Path,
    *,
    hosts: bool,
    on_progress: Callable[[int, int, dict[str, float]], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Ended:
    """Starts torchrun with ``num_processes`` workers on this node, waits for it, and returns how it ended.

    ``arguments`` of the worker; ``folder``: for its logs; ``hosts``: whether this node has the meeting point. ``stop``
    is asked now and then: whether to end it early. However this function is left, everything it started has ended.
    """
    error_file = folder / "failure.json"
    error_file.unlink(missing_ok=True)
    announcement = {**vars(meeting)} if hosts and meeting.num_nodes > 1 else None
    command = [sys.executable, "-m", "tasks.agent", json.dumps(announcement)]
    command += _torchrun(meeting, num_processes, folder, hosts=hosts)
    command += ["-m", WORKER, "--supervised", *arguments]
    process = subprocess.Popen(
        command,
        env=_environment(num_processes) | {ERROR_FILE: str(error_file)},
        stdin=subprocess.PIPE,  # see tasks.lifeline
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is for the caller
    )
    last: deque[str] = deque(maxlen=LAST_LINES)
    lines: queue.Queue[str] = queue.Queue()
    reader = Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()

    def take(wait: float) -> bool:
        try:
            line = lines.get(timeout=wait) if wait else lines.get_nowait()
        except queue.Empty:
            return False
        _pass_on(line.rstrip("\n"), last, on_progress)
        return True

    try:
        while process.poll() is None and not stop():
            take(LOOK_SECONDS)
    finally:
        _end(process, reader)
    while take(0):
        pass
    return Ended(status=process.returncode, last=list(last), failure=_failure(error_file))


def announced(endpoint: str, seconds: float) -> Meeting | None:
    """Returns the training that can be joined at ``endpoint``, waiting for it so many ``seconds``; None without one."""
    from torch.distributed import TCPStore

    from tasks.agent import ANNOUNCED

    sought = Meeting(id="", endpoint=endpoint, num_nodes=0, max_restarts=0)
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        try:
            socket.create_connection((sought.host, sought.port), timeout=5).close()
            store = TCPStore(sought.host, sought.port, is_master=False, timeout=timedelta(seconds=20))
            return Meeting(**{**json.loads(store.get(ANNOUNCED)), "endpoint": endpoint})
        except (OSError, RuntimeError, ValueError, TypeError):  # nobody, or nothing of ours, is there yet
            time.sleep(LOOK_SECONDS)
    return None


def _torchrun(meeting: Meeting, num_processes: int, folder: Path, *, hosts: bool) -> list[str]:
    options = ["--nnodes", str(meeting.num_nodes), "--nproc-per-node", str(num_processes)]
    options += ["--max-restarts", str(meeting.max_restarts), "--log-dir", str(folder / "logs")]
    options += ["--shutdown-timeout", str(SHUTDOWN_SECONDS)]
    if meeting.num_nodes == 1:
        return [*options, "--standalone", "--local-addr", "localhost"]
    assert meeting.endpoint is not None
    settings = {"is_host": int(hosts), "join_timeout": JOIN_SECONDS, "read_timeout": JOIN_SECONDS}
    return [
        *options,
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", meeting.endpoint, "--rdzv-id", meeting.id),
        *("--rdzv-conf", ",".join(f"{name}={value}" for name, value in settings.items())),
        *("--local-addr", meeting.host if hosts else _own_address(meeting)),
    ]


def _own_address(meeting: Meeting) -> str:
    """Returns the address of this machine on the network that the meeting point is reached by."""
    with socket.socket(socket.getaddrinfo(meeting.host, meeting.port)[0][0], socket.SOCK_DGRAM) as probe:
        probe.connect((meeting.host, meeting.port))  # sends nothing
        address: str = probe.getsockname()[0]
        return address


def _environment(num_processes: int) -> dict[str, str]:
    environment = dict(os.environ)
    threads = max(1, len(os.sched_getaffinity(0)) // num_processes) if hasattr(os, "sched_getaffinity") else 1
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    # Of each attempt a store of its own: in one that attempts share, a process may read what a dead one left.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def _read(process: "subprocess.Popen[str]", lines: "queue.Queue[str]") -> None:
    assert process.stdout is not None
    with process.stdout as output:
        for line in output:
            lines.put(line)


def _pass_on(line: str, last: "deque[str]", on_progress: Callable[[int, int, dict[str, float]], None] | None) -> None:
    told: dict[str, Any] | None = understood(line)
    if told is None:
        if line.strip() and not line.startswith(FRAME):
            last.append(line)
            log.warning("%s", line)
    elif "message" in told:
        log.log(told["level"], "%s", told["message"])
    elif on_progress is not None:
        on_progress(told["done"], told["total"], told["values"])


def _end(process: "subprocess.Popen[str]", reader: Thread) -> None:
    """Ends torchrun, which ends its workers; then lets go of the lifeline, upon which none is left."""
    try:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                log.warning("torchrun, process %d, does not end: it is killed", process.pid)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        assert process.stdin is not None
        process.stdin.close()
        reader.join(GRACE_SECONDS)  # its output ends with the last process that writes to it
        if reader.is_alive():
            log.warning("a process that torchrun, process %d, had started does not end", process.pid)


def _failure(path: Path) -> str | None:
    """Returns the message, in one line, that torch elastic wrote of the failure that came first."""
    try:
        found = json.loads(path.read_text())["message"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    message = found.get("message", "") if isinstance(found, dict) else str(found)
    return next(iter(message.strip().splitlines()), None)
