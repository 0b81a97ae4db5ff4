"""Progress of a stage: a bar on a terminal, a log line every so often without one, and a Prefect progress artifact."""

import logging
import re
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self
from uuid import UUID

from tqdm import tqdm

from storage.faults import first_line

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 15.0
SECONDS_BETWEEN_ARTIFACT_UPDATES = 5.0


class Progress:
    """Shows how far a piece of work has come: call it with what is done, the total, and what to show beside them.

    ``check`` is called first, and may raise to end the work.
    """

    def __init__(self, label: str, *, terminal: bool | None = None, check: Callable[[], None] | None = None) -> None:
        self.label = label
        self._check = check
        self._terminal = sys.stderr.isatty() if terminal is None else terminal
        self._bar: tqdm | None = None  # type: ignore[type-arg]
        self._artifact: UUID | None = None
        self._first: tuple[int, float] | None = None  # what was done at the first call, and when that was
        self._line_at = self._artifact_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, done: int, total: int, values: Mapping[str, float] | None = None) -> None:
        if self._check is not None:
            self._check()
        now = time.monotonic()
        self._first = self._first or (done, now)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in (values or {}).items())
        if self._terminal:
            self._draw(done, total, shown)
        elif now - self._line_at >= SECONDS_BETWEEN_LINES:
            self._line_at = now
            log.info(
                "%s: %d of %d%s%s",
                self.label,
                done,
                total,
                self._left(done, total, now),
                f" ({shown})" if shown else "",
            )
        due = now - self._artifact_at >= SECONDS_BETWEEN_ARTIFACT_UPDATES or (
            done == total and self._artifact is not None
        )
        if due:
            self._artifact_at = now
            try:
                self._publish(100.0 * done / total)
            except Exception as error:  # a display must not end hours of work
                log.warning("%s: its progress cannot be shown in Prefect (%s)", self.label, first_line(error))

    def _left(self, done: int, total: int, now: float) -> str:
        """Returns what is left at the pace since the first call, before which there may be a start, or older work."""
        if self._first is None or done <= self._first[0]:
            return ""
        begun, since = self._first
        return f", about {(now - since) / (done - begun) * (total - done):.0f} s left"

    def _draw(self, done: int, total: int, shown: str) -> None:
        if self._bar is None:
            self._bar = tqdm(total=total, initial=0, desc=self.label, leave=False, dynamic_ncols=True)
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update(done - self._bar.n)

    def _publish(self, percent: float) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact  # seconds to import
        from prefect.context import TaskRunContext

        if TaskRunContext.get() is None:
            return
        if self._artifact is None:
            key = "progress-" + re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")
            self._artifact = create_progress_artifact(percent, key=key, description=self.label)
        else:
            update_progress_artifact(self._artifact, percent)
