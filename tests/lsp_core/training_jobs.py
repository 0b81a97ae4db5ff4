"""Small trainings, run by several processes that torchrun starts, or by this one.

``python -m torch.distributed.run ... -m tests.lsp_core.training_jobs FOLDER``: the jobs in FOLDER/jobs.json, one after
the other, each by a group of as many processes as it asks for; every process writes what it saw of each to
FOLDER/NAME.PROCESSES.RANK.json, the leader the vectors.
"""

import copy
import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch.distributed import PrefixStore
from torch.distributed.rendezvous import rendezvous

from lsp_core.checkpoint import FIELDS, SLOTS, read_fields
from lsp_core.distributed import Group
from lsp_core.sharding import local_bytes
from lsp_core.teacher import cache_teacher
from lsp_core.training import Trainer, train_projectors
from lsp_core.training_settings import TrainingSettings
from lsp_core.units import find_blocks
from tests.lsp_core.conftest import _prepared

ROOT = Path(__file__).parents[2]


class Killed(Exception):  # noqa: N818
    """Stands in for the end of the process."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training.

    ``teacher``: its outputs are given, and ``broken``: of one sequence a NaN; ``units``: how many of them; ``last``:
    the last epoch's vectors are the best; ``separate``: a folder of checkpoints for each process; ``copied``: the
    folder that ``work`` is made a copy of, and ``damaged``: in which one file is then not what it was; ``full``: no
    room for the leader's part of a checkpoint; ``until``: the step at which all processes end.
    """

    name: str
    settings: dict[str, Any]
    processes: int = 2
    family: str = "llama"
    dtype: str = "float64"
    units: int | None = None
    validation: int = 3
    teacher: bool = False
    broken: bool = False
    sharding: str = "replicated"
    replicate: bool = False
    work: str | None = None
    copied: str | None = None
    damaged: bool = False
    full: bool = False
    separate: bool = False
    last: bool = True
    until: int | None = None


@dataclass(kw_only=True)
class Seen:
    """What one process saw of a job; ``read``: the units whose bases it read."""

    history: list[dict[str, float]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    error: str = ""
    diverged: str = ""
    checkpoints: int = 0
    read: list[str] = field(default_factory=list)
    block_bytes: int = 0
    vectors: dict[str, torch.Tensor] = field(default_factory=dict)


class Bases(dict[str, torch.Tensor]):
    """Notes what is read."""

    def __init__(self, bases: dict[str, torch.Tensor]) -> None:
        super().__init__(bases)
        self.read: list[str] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read.append(name)
        return super().__getitem__(name)


def run(job: Job, group: Group | None = None) -> Seen:
    """Runs ``job`` in this process, as one of ``group``."""
    case = copy.deepcopy(_prepared(job.family))
    model = case.model.to(getattr(torch, job.dtype))
    seen, bases = Seen(), Bases(case.bases)
    units = case.units[: job.units]
    teacher = cache_teacher(model, case.tokens, micro_batch=6) if job.teacher or job.broken else None
    if job.broken and teacher is not None:
        teacher.entropy[0] = torch.nan
    work = None if job.work is None else Path(job.work) / (str(group.rank) if group and job.separate else "")
    if job.copied is not None and work is not None and (group is None or group.leader):
        shutil.copytree(job.copied, work)
        if job.damaged:
            damage(work)

    def progress(step: int, *_: Any) -> None:
        seen.steps.append(step)
        if step == job.until:
            raise Killed

    def on_checkpoint() -> None:
        seen.checkpoints += 1

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    validate = Trainer._validate
    writing = patch("lsp_core.checkpoint.write_fields", full) if job.full else nullcontext()

    def better_every_epoch(trainer: Trainer) -> dict[str, float]:
        return {"validation": validate(trainer)["validation"] / 2**trainer.schedule.last_epoch}

    try:
        with writing, patch.object(Trainer, "_validate", better_every_epoch if job.last else validate):
            result = train_projectors(
                model,
                units,
                bases,
                {unit.name: case.removed[unit.name] for unit in units},
                case.tokens,
                case.tokens[: job.validation],
                TrainingSettings(**job.settings),
                teacher=teacher,
                work=work,
                progress=progress,
                on_checkpoint=on_checkpoint,
                group=group,
                sharding=job.sharding,
                replicate_orthonormalization=job.replicate,
            )
        seen.history, seen.vectors = result.history, result.vectors
        seen.diverged = result.diverged or ""
    except (Killed, ValueError, OSError) as error:
        seen.error = f"{type(error).__name__}: {error}"
    seen.read = bases.read
    seen.block_bytes = sum(local_bytes(block) for block in find_blocks(model))
    return seen


def damage(folder: Path) -> None:
    """Flips a bit of what the second process wrote of the newest checkpoint."""
    newest = max((folder / slot for slot in SLOTS), key=lambda slot: read_fields(slot / FIELDS)["step"])
    (shard,) = newest.glob("shard-00002-*")
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)


def launch(jobs: list[Job], folder: Path) -> dict[int, dict[str, list[Seen]]]:
    """Runs ``jobs``, by processes of torchrun; returns what each of these saw, by their number and job."""
    folder.mkdir()
    (folder / "jobs.json").write_text(json.dumps([asdict(job) for job in jobs]))
    processes = max(job.processes for job in jobs)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", "tests.lsp_core.training_jobs", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[int, dict[str, list[Seen]]] = {}
    for job in jobs:
        for rank in range(job.processes):
            path = folder / f"{job.name}.{job.processes}.{rank}"
            seen = Seen(**json.loads(path.with_name(f"{path.name}.json").read_text()))
            vectors = path.with_name(f"{path.name}.safetensors")
            seen.vectors = load_file(vectors) if vectors.exists() else {}
            found.setdefault(job.processes, {}).setdefault(job.name, []).append(seen)
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    store, rank, _ = next(rendezvous("env://"))
    jobs = [Job(**values) for values in json.loads((folder / "jobs.json").read_text())]
    for number, (processes, together) in enumerate(itertools.groupby(jobs, key=lambda job: job.processes)):
        if rank >= processes:
            continue
        os.environ["WORLD_SIZE"] = str(processes)
        group = Group.from_environment("cpu", store=PrefixStore(str(number), store))
        for job in together:
            seen = run(job, group)
            name = f"{job.name}.{processes}.{rank}"
            if seen.vectors:
                save_file({key: v.contiguous() for key, v in seen.vectors.items()}, folder / f"{name}.safetensors")
            (folder / f"{name}.json").write_text(json.dumps(vars(seen) | {"vectors": {}}))
        group.close()
    store.add("ended", 1)
    while rank == 0 and store.add("ended", 0) < max(job.processes for job in jobs):  # who holds the store leaves last
        time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
