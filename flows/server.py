"""Prefect, imported with our defaults and with its temporary server started."""

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

ENGINE = ("prefect.flow_runs", "prefect.task_runs")  # loggers of what happens in runs
REPORTED = (ValueError, OSError)  # an input that is wrong, a place that cannot be read or written, a hub out of reach
PREFECT_DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",  # its first start migrates a database
}


def import_prefect() -> None:
    """Imports Prefect with our defaults for what the environment leaves open, and with a quieter log."""
    for name, value in PREFECT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    import prefect  # noqa: F401
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    start_server()
    for handler in logging.getLogger().handlers:
        handler.addFilter(worth_a_line)


def start_server() -> None:
    """Starts Prefect's temporary server, where the user's profile names none, out of the reach of Ctrl-C.

    The server must outlive the run, to be told how that ended.
    """
    from prefect.client.orchestration import get_client

    with uninterrupted():
        get_client(sync_client=True)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Puts the processes that are started in the block, or by threads that are, out of the reach of Ctrl-C.

    A terminal interrupts every process of its group; this one hears of it after the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def worth_a_line(record: logging.LogRecord) -> bool:
    """Drops Prefect's lines that our own repeat: the end of each run, and a failure, which ``main`` reports."""
    said = (
        "Finished in state",
        "Crash detected",
        "error: ",
        "where it happened:",
        "Task run failed with",
        "Task run exceeded",
    )
    return record.name not in ENGINE or not record.getMessage().startswith(said)
