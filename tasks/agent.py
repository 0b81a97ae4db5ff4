"""torch elastic's launcher, ended with its parent: ``python -m tasks.agent ANNOUNCEMENT ARGUMENTS OF TORCHRUN``.

``ANNOUNCEMENT``: JSON with the ``endpoint`` to host, and what joining nodes are to read there; ``null`` hosts nothing.
"""

import json
import signal
import sys
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from tasks.lifeline import end_with_parent

ANNOUNCED = "lsp/training"


def host(announcement: dict[str, object]) -> TCPStore:
    """Returns the store at the endpoint, with the announcement in it; the launcher of this process shares it."""
    name, _, port = str(announcement["endpoint"]).rpartition(":")
    store = TCPStore(name, int(port), is_master=True, multi_tenant=True, timeout=timedelta(seconds=60))
    store.set(ANNOUNCED, json.dumps(announcement))
    return store


if __name__ == "__main__":
    end_with_parent(signal.SIGTERM)  # upon which torchrun ends its workers, and then itself
    announced = json.loads(sys.argv[1])
    hosted = host(announced) if announced else None
    try:
        main(sys.argv[2:])
    except ChildFailedError as error:  # torchrun's own stack says nothing about it
        sys.exit(str(error))
