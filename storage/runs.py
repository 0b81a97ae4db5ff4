"""What each run needed of the store, so that ``gc`` knows what may go."""

import logging
from datetime import UTC, datetime

from storage.faults import StoreError
from storage.manifest import Name, Record
from storage.store import Store

log = logging.getLogger(__name__)


class Needed(Record):
    """An artifact that a run used or made, or was making when it ended."""

    kind: Name
    key: Name


class RunRecord(Record):
    """One run: ``needs`` in the order in which its stages were asked for; ``started`` in UTC."""

    id: Name
    name: str
    started: str
    needs: tuple[Needed, ...] = ()


def new_run(identity: str, name: str) -> RunRecord:
    """Returns the record of a run that starts now."""
    return RunRecord(id=identity, name=name, started=datetime.now(UTC).isoformat(timespec="microseconds"))


def write_run(store: Store, run: RunRecord) -> None:
    """Puts a run on record."""
    store.files.write(f"run/{run.id}.json", run.model_dump_json(indent=1).encode() + b"\n")


def read_runs(store: Store) -> list[RunRecord]:
    """Returns every run on record, the newest first; what is no record is said in the log and left out."""
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
        except ValueError as error:
            log.warning("run/%s is damaged: %s", name, str(error).splitlines()[0])
    return sorted(runs, key=lambda run: run.started, reverse=True)
