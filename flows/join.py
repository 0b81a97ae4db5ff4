"""Taking part in trainings on several nodes: what runs on the nodes that do not run the flow."""

import logging
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tasks.elastic import Meeting, announced, run_elastic

log = logging.getLogger(__name__)
ENDED, LEFT_ALONE = 0, 1  # exit statuses


def join(endpoint: str, *, num_processes: int, wait_minutes: float, trainings: int | None) -> int:
    """Takes part in the trainings that meet at ``endpoint``, one after the other, and returns an exit status.

    It ends after so many ``trainings``, or when none has begun for ``wait_minutes``. Errors: ``ValueError`` if there
    was none at all.
    """
    done: list[str] = []
    failed = 0
    while trainings is None or len(done) < trainings:
        meeting = _next(endpoint, 60 * wait_minutes, done)
        if meeting is None:
            break
        log.info("training %s: joins with %d processes", meeting.id, num_processes)
        done.append(meeting.id)
        failed += not _take_part(meeting, num_processes)
    if not done:
        raise ValueError(
            f"{endpoint}: no training waited there for {wait_minutes:g} minutes: start one with training.num_nodes and "
            f"training.rendezvous_endpoint={endpoint}, and see that this machine reaches it"
        )
    return LEFT_ALONE if failed else ENDED


def _next(endpoint: str, seconds: float, done: list[str]) -> Meeting | None:
    """Returns the next training, other than those that this node has been part of."""
    limit = time.monotonic() + seconds
    while (left := limit - time.monotonic()) > 0:
        meeting = announced(endpoint, left)
        if meeting is None or meeting.id not in done:
            return meeting
        time.sleep(1)
    return None


def _take_part(meeting: Meeting, num_processes: int) -> bool:
    with TemporaryDirectory(prefix="lsp-training-") as folder:
        ended = run_elastic(meeting, num_processes, [], Path(folder), hosts=False)
    if ended.status == 0:
        log.info("training %s: has ended; the node that runs the flow says how", meeting.id)
    else:
        log.warning("training %s: this node's part failed: %s", meeting.id, ended.failure or "see the lines above")
    return ended.status == 0
