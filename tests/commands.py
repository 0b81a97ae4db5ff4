"""What processes were started as, whatever becomes of them meanwhile."""

import psutil


def command_of(process: psutil.Process) -> list[str]:
    """Returns the command line of a process, nothing of one that is ending."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
