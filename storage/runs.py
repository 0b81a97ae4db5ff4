"""What each run needed of the store, so that ``gc`` knows what may go."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from storage.faults import StoreError
from storage.manifest import Name, Record
from storage.store import Store

UNFINISHED_KEPT = timedelta(days=7)  # for so long a run that did not end may want to continue


class Needed(Record):
    """An artifact that a run used or made, or was making when it ended."""

    kind: Name
    key: Name


class RunRecord(Record):
    """One run: ``needs`` in the order in which its stages were asked for; ``started`` in UTC.

    One that is not ``finished`` is under way, failed or was killed: it may want to continue.
    """

    id: Name
    name: str
    started: str
    finished: bool = False
    needs: tuple[Needed, ...] = ()


def new_run(identity: str, name: str) -> RunRecord:
    """Returns the record of a run that starts now."""
    return RunRecord(id=identity, name=name, started=datetime.now(UTC).isoformat(timespec="microseconds"))


def write_run(store: Store, run: RunRecord) -> None:
    """Puts a run on record."""
    store.files.write(f"run/{run.id}.json", run.model_dump_json(indent=1).encode() + b"\n")


def kept_runs(runs: Sequence[RunRecord], last: int) -> list[RunRecord]:
    """Returns the newest ``last`` of the finished runs, and those unfinished that began in the last days."""
    finished = [run for run in runs if run.finished][:last]
    since = (datetime.now(UTC) - UNFINISHED_KEPT).isoformat(timespec="microseconds")
    return finished + [run for run in runs if not run.finished and run.started >= since]


def read_runs(store: Store) -> list[RunRecord]:
    """Returns every run on record, the newest first. Errors: ``StoreError`` for what is no record."""
    runs = []
    for name in store.files.names("run"):
        if not name.endswith(".json"):
            continue
        try:
            runs.append(RunRecord.model_validate_json(store.files.read(f"run/{name}")))
        except FileNotFoundError:  # deleted meanwhile
            continue
        except StoreError:
            raise
        except ValueError:
            raise StoreError(
                f"run/{name} in store {store.uri!r} is damaged, so that what that run needs is not known: delete it"
            ) from None
    return sorted(runs, key=lambda run: run.started, reverse=True)
