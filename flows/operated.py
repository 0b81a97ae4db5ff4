"""What every flow has around its work, whoever runs it: our log lines reach Prefect, a failure says what to do.

A worker imports the flow and knows nothing of our command line: what is set up here is set up there too.
"""

import logging
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar, cast

from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging import get_run_logger
from prefect.logging.handlers import APILogHandler
from prefect.states import Failed
from transformers.utils.logging import disable_progress_bar

from flows.remedies import error_line
from flows.server import ENGINE, REPORTED
from storage.digest import digest_file
from tasks.running import StageTimeout
from tasks.versions import RECORD

P = ParamSpec("P")
R = TypeVar("R")
VERSION = digest_file(RECORD)[:12]  # of the flows: which version of every stage they run
OURS = ("flows", "tasks", "storage", "lsp_core")  # loggers


class RunLogHandler(APILogHandler):
    """Shows a record in Prefect beside the run that it was logged in, and drops it where there is none."""

    def emit(self, record: logging.LogRecord) -> None:
        if FlowRunContext.get() is not None or TaskRunContext.get() is not None:
            super().emit(record)


def operated(function: Callable[P, R]) -> Callable[P, R]:
    """Makes ``function`` fit to be a flow: its log is in Prefect, its failure a state and a line that name the remedy.

    The state is ``Failed``, or ``TimedOut`` after a stage that took too long. The caller of the flow gets the error.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        show_log()
        try:
            return function(*args, **kwargs)
        except Exception as error:
            return cast(R, _failed(error))  # Prefect takes a state that a flow returns as its own

    return run


def show_log() -> None:
    """Sends our log to Prefect and keeps tracebacks of a user's mistake out of it; a second call does nothing."""
    disable_progress_bar()
    for name in OURS:
        logger = logging.getLogger(name)
        if not any(isinstance(handler, RunLogHandler) for handler in logger.handlers):
            logger.addHandler(RunLogHandler())
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
    for name in ENGINE:
        logging.getLogger(name).addFilter(in_one_line)


def in_one_line(record: logging.LogRecord) -> bool:
    """Takes the traceback off a record of a user's mistake, whose message says it all."""
    if record.exc_info and isinstance(record.exc_info[1], REPORTED):
        record.exc_info = None
    return True


def _failed(error: Exception) -> object:
    line, log = f"error: {error_line(error)}", get_run_logger()
    log.error(line)
    if not isinstance(error, REPORTED):
        log.error("where it happened:", exc_info=error)
    return Failed(message=line, name="TimedOut" if isinstance(error, StageTimeout) else "Failed", data=error)
