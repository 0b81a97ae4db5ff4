"""A process that runs torch elastic with ``elastic_worker`` as the train stage does: ``FOLDER DO`` of two workers.

SIGTERM raises in it, as it does in a Prefect flow; its exit status is then 3, for Ctrl-C 4.
"""

import signal
import sys
from pathlib import Path
from types import FrameType

from tasks import elastic
from tasks.elastic import Meeting, run_elastic


class Terminated(BaseException):
    pass


def terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def main(folder: Path, do: str) -> int:
    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored below a background job
    elastic.WORKER = "tests.tasks.elastic_worker"
    meeting = Meeting(id="test", endpoint=None, num_nodes=1, max_restarts=0)
    try:
        run_elastic(meeting, 2, [do], folder, hosts=True, on_progress=lambda *_: (folder / "began").touch())
    except Terminated:
        return 3
    except KeyboardInterrupt:
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
