"""The resumable state of projector training: V, Adam's moments, the schedule, the best V. Safetensors, no pickle.

The newest two checkpoints are kept. Neither the state of a random generator nor the place in the data is among what
they hold: masks and order are functions of the seed and the step, and nothing else is drawn.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lsp_core.durable import DamagedFileError, Saved, read_checked, write_durably
from lsp_core.projector import Projector

FILE = "training.safetensors"
PREVIOUS = "training.previous.safetensors"
log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TrainingState:
    """Where training stands after ``step`` optimizer steps; ``loss_sum`` adds up the current epoch's losses."""

    step: int
    best_epoch: int
    best: dict[str, Tensor]
    history: list[dict[str, float]]
    loss_sum: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The newest two checkpoints of one training in ``folder``.

    ``run``: plain JSON that tells this training from another; a checkpoint of another one is not continued.
    """

    folder: Path
    projectors: Mapping[str, Projector]
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    run: Mapping[str, Any]

    def save(self, state: TrainingState) -> None:
        """Writes the state as the newest checkpoint; the one before stays under its second name."""
        tensors = {f"v.{name}": projector.v.detach() for name, projector in self.projectors.items()}
        tensors |= {f"best.{name}": v for name, v in state.best.items()}
        for index, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"adam.{index}.{moment}": value for moment, value in moments.items()}
        fields = {
            "step": state.step,
            "best_epoch": state.best_epoch,
            "history": state.history,
            "loss_sum": state.loss_sum,
            "schedule": {key: value for key, value in self.schedule.state_dict().items() if key != "lr_lambdas"},
            "run": dict(self.run),
        }
        write_durably(self.folder / FILE, tensors, fields, previous=self.folder / PREVIOUS)

    def load(self) -> TrainingState | None:
        """Restores V, Adam and the schedule from the newest whole checkpoint and returns the rest; None without one.

        A damaged one is deleted, lest it take the place of the one before.
        """
        refused = False
        for path in (self.folder / FILE, self.folder / PREVIOUS):
            try:
                saved = read_checked(path)
                self._check(path, saved)
            except FileNotFoundError:
                continue
            except DamagedFileError as error:
                log.warning("%s; it is deleted", error)
                path.unlink()
                refused = True
                continue
            if refused:
                log.warning("training continues at the checkpoint before, step %d", saved.fields["step"])
            return self._restore(saved)
        if refused:
            log.warning("no whole checkpoint is left in %s: training starts from zero", self.folder)
        return None

    def _check(self, path: Path, saved: Saved) -> None:
        shapes = {f"{kind}.{n}": p.v.shape for n, p in self.projectors.items() for kind in ("v", "best")}
        found = {name: tensor.shape for name, tensor in saved.tensors.items() if not name.startswith("adam.")}
        if saved.fields.get("run") != self.run or found != shapes:
            raise DamagedFileError(f"{path} is the checkpoint of another training")

    def _restore(self, saved: Saved) -> TrainingState:
        tensors, fields = saved.tensors, saved.fields
        with torch.no_grad():
            for name, projector in self.projectors.items():
                projector.v.copy_(tensors[f"v.{name}"])
        adam: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("adam."):
                _, index, moment = name.split(".")
                adam.setdefault(int(index), {})[moment] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": adam})
        self.schedule.load_state_dict({**self.schedule.state_dict(), **fields["schedule"]})
        for group, rate in zip(self.optimizer.param_groups, fields["schedule"]["_last_lr"], strict=True):
            group["lr"] = rate
        return TrainingState(
            step=fields["step"],
            best_epoch=fields["best_epoch"],
            best={name: tensors[f"best.{name}"] for name in self.projectors},
            history=fields["history"],
            loss_sum=fields["loss_sum"],
        )
