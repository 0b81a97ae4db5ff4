"""The resumable state of projector training: V, Adam's moments, the schedule, the best V. Safetensors and JSON.

Two slots take turns, so that the newest two checkpoints are kept. In each every process of the group writes a file with
the tensors of its own units, through torch's distributed checkpoints; a JSON file with the fields and the sha256 of
those files comes last, and without it the slot is empty. Tensors are named by their unit, so another number of
processes can continue. Neither the state of a random generator nor the place in the data is among what is kept: masks
and order are functions of the seed and the step, and nothing else is drawn.
"""

import hashlib
import json
import logging
import os
import secrets
import shutil
import socket
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from lsp_core.distributed import Group
from lsp_core.durable import DamagedFileError, sync_folder

SLOTS = ("first", "second")  # of a fixed name each: a store that the folder is copied to keeps no others
UNFINISHED = "unfinished"
FIELDS = "training.json"
log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TrainingState:
    """Where training stands after ``step`` optimizer steps; ``loss_sum`` adds up the current epoch's losses.

    ``best``: V of this process's own units.
    """

    step: int
    best_epoch: int
    best: dict[str, Tensor]
    history: list[dict[str, float]]
    loss_sum: float = 0.0


@dataclass(kw_only=True)
class Checkpoints:
    """The newest two checkpoints of one training in ``folder``, which all processes of ``group`` see.

    ``vectors``: V of the units that this process owns, in the order of ``optimizer``; those in ``saved`` it writes.
    ``run``: plain JSON that tells this training from another; a checkpoint of another one is not continued.
    """

    folder: Path
    group: Group
    vectors: Mapping[str, nn.Parameter]
    saved: Collection[str]
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    run: Mapping[str, Any]
    newest: str | None = field(default=None, init=False)

    def save(self, state: TrainingState) -> None:
        """Writes the state in place of the older checkpoint. Errors: those of any process, in all of them."""
        unfinished = self.folder / UNFINISHED
        with self.group.together():
            if self.group.leader:
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir(parents=True, exist_ok=True)
        with _checkpointing(self.group):
            writer = HuggingFaceStorageWriter(str(unfinished), save_distributed=True)
            save_tensors(self._tensors(state), storage_writer=writer, no_dist=self.group.size == 1)
        own = {path.name: _digest(path) for path in unfinished.glob(f"shard-{self.group.rank + 1:05d}-*")}
        files = {name: digest for part in self.group.gathered(own) for name, digest in part.items()}
        self.newest = SLOTS[1] if self.newest == SLOTS[0] else SLOTS[0]
        fields = {
            "step": state.step,
            "best_epoch": state.best_epoch,
            "history": state.history,
            "loss_sum": state.loss_sum,
            "schedule": {key: value for key, value in self.schedule.state_dict().items() if key != "lr_lambdas"},
            "run": dict(self.run),
            "files": files,
        }
        with self.group.together():
            if self.group.leader:
                write_fields(unfinished / FIELDS, fields)
                _remove(self.folder / self.newest)
                unfinished.rename(self.folder / self.newest)
                sync_folder(self.folder)

    def _tensors(self, state: TrainingState) -> dict[str, Tensor]:
        moments = self.optimizer.state_dict()["state"]
        tensors: dict[str, Tensor] = {}
        for index, (name, v) in enumerate(self.vectors.items()):
            if name in self.saved:
                tensors |= {f"v.{name}": v.detach(), f"best.{name}": state.best[name]}
                tensors |= {f"adam.{name}.{moment}": value for moment, value in moments.get(index, {}).items()}
        return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}

    def load(self) -> TrainingState | None:
        """Restores V, Adam and the schedule from the newest whole checkpoint and returns the rest; None without one.

        A damaged one is deleted, lest it take the place of the one before.
        Errors: ``ValueError`` if a process does not see the leader's folder.
        """
        self._check_shared()
        with self.group.together():
            candidates, refused = self._candidates() if self.group.leader else ([], False)
        while found := self.group.from_leader(candidates.pop(0) if candidates else None):
            slot, fields = found
            problems = [each for each in self.group.gathered(self._problem(slot, fields)) if each is not None]
            if not problems:
                if refused:
                    log.warning("training continues at the checkpoint before, step %d", fields["step"])
                self.newest = slot
                return self._restore(slot, fields)
            if self.group.leader:
                self._refuse(slot, problems[0])
                refused = True
        if refused:
            log.warning("no whole checkpoint is left in %s: training starts from zero", self.folder)
        return None

    def _candidates(self) -> tuple[list[tuple[str, dict[str, Any]]], bool]:
        """Returns the slots of this training with their fields, the newest first, and whether others were deleted."""
        found: list[tuple[str, dict[str, Any]]] = []
        refused = False
        for slot in SLOTS:
            if not (self.folder / slot).exists():
                continue
            try:
                fields = read_fields(self.folder / slot / FIELDS)
                if fields["run"] != self.run:
                    raise DamagedFileError(f"{self.folder / slot} is the checkpoint of another training")
                _prune(self.folder / slot, {FIELDS, *fields["files"]})
                found.append((slot, fields))
            except DamagedFileError as error:
                self._refuse(slot, str(error))
                refused = True
        return sorted(found, key=lambda pair: -pair[1]["step"]), refused

    def _problem(self, slot: str, fields: Mapping[str, Any]) -> str | None:
        """Returns what is wrong with this process's share of a slot's files."""
        for name in sorted(fields["files"])[self.group.rank :: self.group.size]:
            path = self.folder / slot / name
            try:
                if _digest(path) != fields["files"][name]:
                    return f"{path}: its content does not match its digest"
            except FileNotFoundError:
                return f"{path} is missing"
        return None

    def _refuse(self, slot: str, reason: str) -> None:
        log.warning("%s; it is deleted", reason)
        _remove(self.folder / slot)

    def _check_shared(self) -> None:
        """Every process looks for a file that the leader writes for this moment."""
        name = self.group.from_leader(f"seen-{secrets.token_hex(8)}.tmp")
        if self.group.size == 1:
            return
        with self.group.together():
            if self.group.leader:
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / name).touch()
        place = None if (self.folder / name).exists() else f"process {self.group.rank} on {socket.gethostname()}"
        blind = [found for found in self.group.gathered(place) if found is not None]
        if self.group.leader:
            (self.folder / name).unlink()
        if blind:
            raise ValueError(
                f"{', '.join(blind)} does not see the checkpoints that process 0 keeps in {self.folder}: "
                "put the store on a file system that all nodes share"
            )

    def _restore(self, slot: str, fields: Mapping[str, Any]) -> TrainingState:
        reader = HuggingFaceStorageReader(str(self.folder / slot))
        found = reader.read_metadata().state_dict_metadata
        tensors: dict[str, Tensor] = {}
        for key, metadata in found.items():
            assert isinstance(metadata, TensorStorageMetadata)
            if _unit_of(key) in self.vectors:
                tensors[key] = torch.empty(metadata.size, dtype=metadata.properties.dtype)
        with _checkpointing(self.group):
            load_tensors(tensors, storage_reader=reader, no_dist=self.group.size == 1)
        adam: dict[int, dict[str, Tensor]] = {}
        for index, (name, v) in enumerate(self.vectors.items()):
            with torch.no_grad():
                v.copy_(tensors[f"v.{name}"])
            prefix = f"adam.{name}."
            moments = {key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)}
            if moments:
                adam[index] = moments
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": adam})
        self.schedule.load_state_dict({**self.schedule.state_dict(), **fields["schedule"]})
        for group, rate in zip(self.optimizer.param_groups, fields["schedule"]["_last_lr"], strict=True):
            group["lr"] = rate
        return TrainingState(
            step=fields["step"],
            best_epoch=fields["best_epoch"],
            best={name: tensors[f"best.{name}"] for name in self.vectors},
            history=fields["history"],
            loss_sum=fields["loss_sum"],
        )


@contextmanager
def _checkpointing(group: Group) -> Iterator[None]:
    """Raises what went wrong as it is, and takes a single process for what is meant."""
    try:
        with warnings.catch_warnings():
            if group.size == 1:
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from None


def _unit_of(key: str) -> str:
    kind, name = key.split(".", 1)
    return name.rpartition(".")[0] if kind == "adam" else name


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_fields(path: Path, fields: Mapping[str, Any]) -> None:
    """Writes ``fields`` as JSON, with a sha256 of themselves."""
    text = json.dumps(fields, sort_keys=True)
    with path.open("w", encoding="utf-8") as file:
        json.dump({"fields": fields, "sha256": hashlib.sha256(text.encode()).hexdigest()}, file)
        file.flush()
        os.fsync(file.fileno())


def read_fields(path: Path) -> dict[str, Any]:
    """Returns what ``write_fields`` wrote. Errors: ``DamagedFileError`` if it is not there or not whole."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        fields: dict[str, Any] = found["fields"]
        if hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest() != found["sha256"]:
            raise ValueError("its content does not match its digest")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(f"{path} is no whole checkpoint: {type(error).__name__}: {error}") from error
    return fields


def _remove(folder: Path) -> None:
    """Deletes a checkpoint, its fields first: without them the rest is none."""
    (folder / FIELDS).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _prune(folder: Path, names: Collection[str]) -> None:
    """Deletes what is not called one of ``names``: a store's copy keeps the files of processes that are no more."""
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()
