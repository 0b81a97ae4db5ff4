"""A worker for torchrun that imports next to nothing: ``python -m tests.tasks.elastic_worker --supervised DO``.

``sleep``: until it is ended; ``stubborn``: likewise, and deaf to SIGTERM; ``fail``: with an error; ``finish``: at once;
``bereave``: the one with an error, then the other by SIGKILL, though torchrun hears of that first.
"""

import atexit
import os
import signal
import sys
import time
from pathlib import Path

from tasks.lifeline import end_with_parent
from tasks.relay import relay_progress


def main(do: str) -> None:
    end_with_parent(signal.SIGKILL)
    if do == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    relay_progress(1, 2, {})
    if do == "fail":
        fail()
    if do == "bereave":
        bereave()
    while do in ("sleep", "stubborn"):
        time.sleep(0.1)


def bereave() -> None:
    if os.environ["RANK"] == "1":
        atexit.register(time.sleep, 60)
        fail()
    others = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1] / "1" / "error.json"
    while not others.exists():
        time.sleep(0.1)
    time.sleep(1.1)  # torchrun tells times in whole seconds
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    from torch.distributed.elastic.multiprocessing.errors import record  # a second to import

    @record
    def failing() -> None:
        raise RuntimeError("no such luck")

    failing()


if __name__ == "__main__":
    main(sys.argv[2])
