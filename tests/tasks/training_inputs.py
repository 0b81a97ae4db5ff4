"""What the train stage reads, of the tiny model, in a store; and a work folder that counts its steps."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from lsp_core.discovery import discover_units
from lsp_core.gram import gather_grams
from storage.grid import save_tokens
from storage.manifest import ArtifactRef, Lineage
from storage.store import Store
from storage.tensors import save_tensors
from tasks.artifacts import write_json, write_units
from tasks.caching import Launch, Runtime, Work
from tasks.models import ModelSource, load_model
from tasks.progress import Progress
from tests.commands import command_of

SETTINGS = {
    "objective": "task",
    "learning_rate": 1e-2,
    "epochs": 4,
    "batch_sequences": 8,
    "dropout": 0.2,
    "checkpoint_steps": 1,
    "patience": 9,
}
STEPS = 24  # 4 epochs of 48 / 8 sequences
ROOT = Path(__file__).parents[2]
ON_STEP = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Watched(Work):
    """Calls ``on_step`` with each step that it is told of."""

    on_step: ON_STEP
    steps: list[int] = field(default_factory=list)

    def progress(self) -> Any:
        return Watch(self)


class Watch(Progress):
    def __init__(self, work: Watched) -> None:
        super().__init__(work.label, terminal=False)
        self._work = work

    def __call__(self, done: int, total: int, values: Any = None) -> None:
        assert total == STEPS
        self._work.steps.append(done)
        self._work.on_step(done)


def arguments(store: Store, model: ModelSource, folder: Path) -> dict[str, Any]:
    """Returns what the stage is called with, published in ``store``."""
    loaded = load_model(model)
    ids = np.random.default_rng(0).integers(0, 256, (48, 24))
    units = discover_units(loaded, kv_routing="auto")
    grams = gather_grams(loaded, units, torch.from_numpy(ids), micro_batch=8)

    def write_bases(place: Path) -> None:
        write_units(place, units)
        save_tensors(place, {name: torch.linalg.eigh(gram)[1].flip(-1) for name, gram in grams.items()})

    removed = {"removed": {unit.name: unit.dimension // 2 for unit in units}}
    fills: dict[str, Callable[[Path], Any]] = {
        "tokens": lambda place: save_tokens(place, ids),
        "validation": lambda place: save_tokens(place, ids[:6]),
        "bases": write_bases,
        "allocation": lambda place: write_json(place / "allocation.json", removed),
    }
    return {"model": model} | {name: publish(store, name, folder / name, fill) for name, fill in fills.items()}


def publish(store: Store, kind: str, folder: Path, fill: Callable[[Path], Any]) -> ArtifactRef:
    folder.mkdir(parents=True)
    fill(folder)
    lineage = Lineage(stage=kind, version=1, inputs={}, settings={}, packages={}, device="cpu", run=None, seconds=0.0)
    return store.publish(kind, "0", folder, lineage)


def work_in(folder: Path, store: Store, launch: Launch, on_step: ON_STEP = lambda step: None) -> Watched:
    """Returns a new work folder, or the one of before with its scratch folder, and an empty output folder."""
    scratch, output = folder / "scratch", folder / f"output-{len(list(folder.glob('output-*')))}"
    for path in (scratch, output):
        path.mkdir(parents=True, exist_ok=True)
    runtime = Runtime(micro_batch=2, launch=launch)
    return Watched(store=store, label="train", output=output, scratch=scratch, runtime=runtime, on_step=on_step)


def alone(work: Watched) -> Watched:
    """Returns ``work`` for the stage's own process."""
    return replace(work, runtime=work.runtime.model_copy(update={"launch": Launch()}))


def below(process: psutil.Process | None = None) -> list[psutil.Process]:
    """Returns the processes that this or another one has started, and those that they have."""
    return (process or psutil.Process()).children(recursive=True)


def workers(process: psutil.Process | None = None) -> list[psutil.Process]:
    """Returns those of them that train."""
    return [found for found in below(process) if "tasks.train_worker" in command_of(found)[3:4]]


def gone(processes: list[psutil.Process]) -> bool:
    """Returns whether all of ``processes`` end soon: the kernel closes what one has open before it is gone."""
    _, alive = psutil.wait_procs(processes, timeout=10)
    return not [process for process in alive if not _is_taken_down(process)]


def _is_taken_down(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)
