"""One of the processes that train together: ``python -m tasks.train_worker``, started by torchrun.

Those on the stage's node are given the specification as a file, the others get it from one of these, as JSON. The first
process of the stage's node leads: it writes the result, and tells errors to the stage.
"""

import argparse
import logging
import os
import signal
import socket
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.rendezvous import rendezvous
from transformers.utils.logging import disable_progress_bar

from lsp_core.distributed import Group
from storage.files import write_whole
from tasks.caching import Work
from tasks.launch import TOLD, Told, TrainingSpec
from tasks.lifeline import end_with_parent
from tasks.places import open_store
from tasks.relay import Relay, relay_progress
from tasks.train import Training, load_training

MEET_SECONDS = 300  # between the first and the last process that comes
AGREE_SECONDS = 10.0
SEE_SECONDS = 15.0  # until a file of another machine is seen in a shared folder
EXPECTED = tuple(TOLD.values())
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Peers:
    """What the processes tell each other beside the training, by a store that one of them holds.

    ``rank`` and ``size`` as torchrun gives them; the store is that of rank 0.
    """

    store: Store
    rank: int
    size: int

    @classmethod
    def met(cls) -> "Peers":
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=MEET_SECONDS)))
        return cls(store=store, rank=rank, size=size)

    def share(self, given: Path | None) -> tuple[TrainingSpec, int]:
        """Returns the specification that is ``given`` to some, and the rank of the first of these."""
        if given is not None:
            first = self.store.compare_set("lsp/first", "", str(self.rank))
            if int(first) == self.rank:
                self.store.set("lsp/spec", given.read_text(encoding="utf-8"))
        content = self.store.get("lsp/spec")
        return TrainingSpec.model_validate_json(content), int(self.store.get("lsp/first"))

    def all_end(self) -> bool:
        """Returns whether all come here within ``AGREE_SECONDS``; who holds the store leaves last."""
        if not self._all("lsp/come"):
            return False
        if self.rank == 0:
            return self._all("lsp/gone")
        self.store.add("lsp/gone", 1)
        return True

    def _all(self, counter: str) -> bool:
        limit = time.monotonic() + AGREE_SECONDS
        count = self.store.add(counter, 1)
        while count < self.size and time.monotonic() < limit:
            time.sleep(0.05)
            count = self.store.add(counter, 0)
        return count >= self.size


@record
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tasks.train_worker", description=__doc__)
    parser.add_argument("spec", nargs="?", type=Path, help="The stage's specification; none: that of another process.")
    parser.add_argument("--supervised", action="store_true", help="Standard input ends with whoever started torchrun.")
    options = parser.parse_args()
    if options.supervised:
        end_with_parent(signal.SIGKILL)
    disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")  # of one part of torch about another
    peers = Peers.met()
    spec, first = peers.share(options.spec)
    group = Group.from_environment(spec.runtime.device, store=peers.store, leader=first)
    handler = Relay() if options.supervised else logging.StreamHandler()
    level = logging.INFO if group.leader else logging.WARNING
    logging.basicConfig(level=level, handlers=[handler], format="%(message)s")
    try:
        train(spec, group, here=options.spec is not None)
    except EXPECTED as error:
        if group.leader:
            write_whole(spec.told, Told.of(error).model_dump_json())
        if not peers.all_end():
            raise
    else:
        peers.all_end()
    group.close()


def train(spec: TrainingSpec, group: Group, *, here: bool) -> None:
    """Does what the stage does; ``here``: on its node. Errors: ``EXPECTED``, most of them in every process."""
    failed: Exception | None = None
    loaded: tuple[Work, Training] | None = None
    try:
        loaded = load(spec, group, here=here)
    except EXPECTED as error:
        failed = portable(error, here=here)
    group.raise_together(failed)
    assert loaded is not None
    work, training = loaded
    progress = Shown(spec.label) if group.leader else None
    result = training.run(spec.scratch, progress, work.keep, group, spec.runtime.launch.sharding)
    failed = None
    try:
        if group.leader:
            training.write(spec.output, spec.label, result)
    except EXPECTED as error:
        failed = portable(error, here=here)
    group.raise_together(failed)


def load(spec: TrainingSpec, group: Group, *, here: bool) -> tuple[Work, Training]:
    """Returns the work folder and everything that the training reads."""
    if not here:
        _check_shared(spec)
    store = open_store(spec.place, verify=spec.verify, writable=group.leader)
    kept = store.work(spec.key) if group.leader and spec.key is not None else None
    work = Work(
        store=store, label=spec.label, output=spec.output, scratch=spec.scratch, runtime=spec.runtime, kept=kept
    )
    sharded = spec.runtime.launch.sharding == "sharded"  # the parts go to the device one by one
    device = "cpu" if sharded else str(group.device)
    return work, load_training(work, device, spec.model, spec.inputs, spec.settings)


def _check_shared(spec: TrainingSpec) -> None:
    """Errors: ``ValueError`` if this node does not see the folder of the checkpoints."""
    limit = time.monotonic() + SEE_SECONDS
    while not spec.marker.exists():
        if time.monotonic() > limit:
            raise ValueError(
                f"it does not see {spec.scratch}, where the checkpoints are kept: let the store lie in a folder that "
                "all nodes share under the same path, or, for a store elsewhere, XDG_CACHE_HOME"
            )
        time.sleep(0.5)


def portable(error: Exception, *, here: bool) -> Exception:
    """Returns the error as another process can raise it; one of another node with its name."""
    told = Told.of(error)
    if not here:
        told = told.model_copy(update={"message": f"node {socket.gethostname()}: {told.message}"})
    return told.error()


class Shown:
    """Tells the stage how far the training has come; at its beginning, in the log, from where it goes on."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._begun = False

    def __call__(self, step: int, total: int, values: Mapping[str, float]) -> None:
        restarts, most = (int(os.environ[f"TORCHELASTIC_{name}"]) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
        if not self._begun and (step > 1 or restarts):
            again = f"started again (restart {restarts} of {most} at most), " if restarts else ""
            log.info("%s: %scontinues at step %d of %d", self._label, again, step - 1, total)
        self._begun = True
        relay_progress(step, total, values)


if __name__ == "__main__":
    main()
