"""torch elastic's launcher, ended with its parent: ``python -m tasks.agent ANNOUNCEMENT ARGUMENTS OF TORCHRUN``.

``ANNOUNCEMENT``: JSON with the ``endpoint`` to host, and what joining nodes are to read there; ``null`` hosts nothing.
"""

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from tasks.elastic import ERROR_FILE, SHUTDOWN_SECONDS
from tasks.lifeline import end_with_parent

ANNOUNCED = "lsp/training"


def host(announcement: dict[str, object]) -> TCPStore:
    """Returns the store at the endpoint, with the announcement in it; the launcher of this process shares it."""
    name, _, port = str(announcement["endpoint"]).rpartition(":")
    store = TCPStore(name, int(port), is_master=True, multi_tenant=True, timeout=timedelta(seconds=60))
    store.set(ANNOUNCED, json.dumps(announcement))
    return store


def killed(error: ChildFailedError) -> str | None:
    """Returns what is said of a process that a signal ended, unless torchrun may have sent it; None without one.

    torchrun names the failure of the earliest time, in whole seconds: that may be of one which lost the connection.
    """
    first = min(failure.timestamp for failure in error.failures.values())
    for failure in error.failures.values():
        early = failure.timestamp - first < SHUTDOWN_SECONDS / 2
        silent = not Path(failure.error_file).is_file()
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM and early and silent:
            return str(failure.message)
    return None


if __name__ == "__main__":
    end_with_parent(signal.SIGTERM)  # upon which torchrun ends its workers, and then itself
    announced = json.loads(sys.argv[1])
    hosted = host(announced) if announced else None
    try:
        main(sys.argv[2:])
    except ChildFailedError as error:  # torchrun's own stack says nothing about it
        if (said := killed(error)) is not None:
            Path(os.environ[ERROR_FILE]).write_text(json.dumps({"message": said}), encoding="utf-8")
        sys.exit(str(error))
