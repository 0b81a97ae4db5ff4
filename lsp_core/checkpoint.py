"""The resumable state of projector training: V, Adam's moments, the schedule, the best V. Safetensors, no pickle."""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lsp_core.projector import Projector

FILE = "training.safetensors"
log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TrainingState:
    """Where training stands after ``step`` optimizer steps; ``loss_sum`` adds up the current epoch's losses."""

    step: int
    best_epoch: int
    best: dict[str, Tensor]
    history: list[dict[str, float]]
    loss_sum: float = 0.0


def save_state(
    work: Path,
    state: TrainingState,
    projectors: Mapping[str, Projector],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    """Writes the state to ``work`` under a temporary name, then renames it over the last one."""
    tensors = {f"v.{name}": projector.v.detach() for name, projector in projectors.items()}
    tensors |= {f"best.{name}": v for name, v in state.best.items()}
    for index, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"adam.{index}.{moment}": value for moment, value in moments.items()}
    fields = {
        "step": state.step,
        "best_epoch": state.best_epoch,
        "history": state.history,
        "loss_sum": state.loss_sum,
        "schedule": {key: value for key, value in schedule.state_dict().items() if key != "lr_lambdas"},
    }
    work.mkdir(parents=True, exist_ok=True)
    temporary = work / (FILE + ".tmp")
    save_file({name: t.contiguous() for name, t in tensors.items()}, temporary, metadata={"state": json.dumps(fields)})
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(work / FILE)


def load_state(
    work: Path,
    projectors: Mapping[str, Projector],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> TrainingState | None:
    """Restores V, Adam and the schedule from ``work`` and returns the rest; None if it is not there or damaged."""
    path = work / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            fields = json.loads(file.metadata()["state"])
        tensors = load_file(path)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        log.warning("%s is damaged (%s): training starts again", path, error)
        return None
    with torch.no_grad():
        for name, projector in projectors.items():
            projector.v.copy_(tensors[f"v.{name}"])
    adam: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("adam."):
            _, index, moment = name.split(".")
            adam.setdefault(int(index), {})[moment] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": adam})
    schedule.load_state_dict({**schedule.state_dict(), **fields["schedule"]})
    for group, rate in zip(optimizer.param_groups, fields["schedule"]["_last_lr"], strict=True):
        group["lr"] = rate
    return TrainingState(
        step=fields["step"],
        best_epoch=fields["best_epoch"],
        best={name: tensors[f"best.{name}"] for name in projectors},
        history=fields["history"],
        loss_sum=fields["loss_sum"],
    )
