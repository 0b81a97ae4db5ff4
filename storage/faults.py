"""Which failures of a store may pass by themselves, how often to try again, and what to say when they do not pass."""

import errno
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_exponential_jitter

log = logging.getLogger(__name__)

T = TypeVar("T")
FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_SAID = (*(f"os error {n})" for n in FULL), *(f"[Errno {n}]" for n in FULL), "StorageFull", "QuotaExceeded")
LASTING_ERRNO = (*FULL, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTEMPTY, errno.EEXIST, errno.ELOOP)
LASTING = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
PASSING_REMOTE = {
    "HTTPClientError",
    "ConnectionError",
    "IncompleteReadError",
    "ClientConnectionError",
    "ClientPayloadError",
    "HttpError",
}
REMOTE_PACKAGES = ("botocore", "aiohttp", "gcsfs")


class StoreError(ValueError):
    """A store that cannot be read or written; the message says what, where, and what to do."""


class StoreUnavailable(StoreError):  # noqa: N818  (a state of the store)
    """A store that did not answer, however often it was asked."""


class StoreFull(StoreError):  # noqa: N818  (a state of the store)
    """A store without room for what is to be kept."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How often a failing operation is tried, and the seconds before the second try; each later wait is doubled."""

    attempts: int = 5
    first_wait: float = 1.0
    longest_wait: float = 20.0


def may_pass(error: BaseException) -> bool:
    """Returns whether the same operation may succeed a little later."""
    if isinstance(error, OSError):
        return not isinstance(error, LASTING) and error.errno not in LASTING_ERRNO and not is_full(error)
    return any(
        kind.__name__ in PASSING_REMOTE and kind.__module__.split(".")[0] in REMOTE_PACKAGES
        for kind in type(error).__mro__
    )


def is_full(error: BaseException) -> bool:
    """Returns whether ``error`` says that there is no room left, also where a library has wrapped it."""
    if isinstance(error, OSError) and error.errno in FULL:
        return True
    return not isinstance(error, StoreError) and any(said in str(error) for said in FULL_SAID)


def persist(operation: Callable[[], T], what: str, store: str, patience: Patience, *, disk: str | None = None) -> T:
    """Returns what ``operation`` returns, tried again while its failure may pass.

    ``disk``: the place that has no room where the error says so, if it is not the store. Errors: ``StoreUnavailable``
    after the last try, ``StoreFull``; any other error of ``operation`` as it is.
    """

    def say(state: RetryCallState) -> None:
        assert state.outcome is not None
        assert state.next_action is not None
        reason = first_line(state.outcome.exception())
        log.warning("%s: %s failed (%s); again in %.1f s", store, what, reason, state.next_action.sleep)

    attempts = Retrying(
        stop=stop_after_attempt(patience.attempts),
        wait=wait_exponential_jitter(
            multiplier=patience.first_wait, max=patience.longest_wait, jitter=patience.first_wait
        ),
        retry=retry_if_exception(may_pass),
        before_sleep=say,
        reraise=True,
    )
    try:
        return attempts(operation)
    except Exception as error:
        if is_full(error):
            raise full(disk or store, what) from error
        if may_pass(error):
            raise StoreUnavailable(
                f"store {store!r}: {what} failed {patience.attempts} times ({first_line(error)}): what is finished is "
                "kept; run the same command again once the store answers"
            ) from error
        raise


def full(place: str, what: str) -> StoreFull:
    """Returns the error for a store, or a folder of this machine, that has no room for ``what``."""
    return StoreFull(
        f"{place!r} is full: {what} found no room: free some (`python -m flows store gc` tells what of a store can "
        "go), or name another store; XDG_CACHE_HOME moves what this machine keeps of a remote one; what is finished is "
        "kept"
    )


def first_line(error: BaseException | None) -> str:
    """Returns the first line of an error's message, without credentials that a URL in it may carry."""
    text = str(error).strip() or type(error).__name__
    return re.sub(r"//\S*@", "//***@", text.splitlines()[0])  # AWS's secrets may hold slashes
