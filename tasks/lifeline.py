"""Ending a process with the one that started it, however that ends.

The starter holds the only writing end of a pipe that is the standard input of the process and of whatever that starts.
The kernel closes it with its holder, be it by SIGKILL, and reading then gives the end of the file. Unlike Linux's
``PR_SET_PDEATHSIG`` this works on every POSIX system, reaches the processes of processes, does not depend on which
thread started them, and nothing is missed that happened before the watch began.
"""

import os
import signal
from threading import Thread


def end_with_parent(number: signal.Signals) -> None:
    """Sends ``number`` to this process as soon as its standard input is closed."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), number)

    Thread(target=watch, daemon=True).start()
