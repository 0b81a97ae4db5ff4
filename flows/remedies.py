"""What a failure says in one line: what went wrong, and what to do."""

from huggingface_hub.errors import HTTPError
from pydantic import ValidationError
from torch import OutOfMemoryError

from flows.server import REPORTED
from storage.faults import StoreError, first_line
from tasks.running import StageTimeout

KEPT = "what is finished is kept, the same run goes on from there"
MEMORY = f"lower micro_batch or calibration.sequence_length, or set offload: true; {KEPT}"
LONGEST = 2000  # characters


def error_line(error: BaseException) -> str:
    """Returns one line that says what went wrong and what to do, without credentials.

    Errors of ours say it themselves; to those of others a remedy is added.
    """
    if isinstance(error, ValidationError):
        said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
    else:
        said = " ".join(str(error).split()) or type(error).__name__
    remedy = _remedy(error)
    shown = first_line(ValueError(said))[:LONGEST]  # without the credentials that a URL may carry
    return f"{shown}: {remedy}" if remedy else shown


def _remedy(error: BaseException) -> str:
    """Returns what to do about an error whose message does not say it."""
    if isinstance(error, (OutOfMemoryError, MemoryError)):
        return MEMORY
    if isinstance(error, (StoreError, StageTimeout)):
        return ""
    if isinstance(error, HTTPError):
        return f"run again once the hub answers; HF_HUB_OFFLINE=1 takes what is here; {KEPT}"
    if isinstance(error, (ConnectionError, TimeoutError)):
        return f"run again once it answers; {KEPT}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"see that it is there and may be read and written; {KEPT}"
    if isinstance(error, REPORTED):
        return ""
    return f"an unforeseen {type(error).__name__}, its traceback is in the log; {KEPT}"
