"""Stages that are killed again and again, by SIGKILL, continue where they were and end in the same bytes.

Each attempt is a process of its own. Inputs are plain folders here; what the store does is tested elsewhere.
"""

import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lsp_core.checkpoint import FIELDS, read_fields
from lsp_core.durable import read_checked
from storage.digest import digest_folder
from storage.grid import save_tokens
from storage.store import ArtifactRef, Store
from storage.tensors import load_tensors
from tasks.artifacts import read_json, read_units, write_json
from tasks.bases import bases
from tasks.caching import Runtime, Stage, Work
from tasks.gather import gather
from tasks.models import ModelSource
from tasks.train import teacher, train

STAGES: dict[str, Stage] = {"gather": gather, "bases": bases, "teacher": teacher, "train": train}
SEQUENCES = 48
CHANGES = ("open", "os.rename", "os.link", "os.remove")  # audit events of what changes files


@dataclass(frozen=True, kw_only=True)
class Mortal(Work):
    """Dies at the ``last``-th save point."""

    last: int | None = None
    saves: list[None] = field(default_factory=list)

    def folder(self, ref: ArtifactRef) -> Path:
        return Path(ref.uri)

    def keep(self, below: str = "") -> None:
        self.saves.append(None)
        if len(self.saves) == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


def attempt(
    name: str, folder: Path, arguments: dict[str, Any], last: int | None, change: int, tell: Connection
) -> None:
    """Runs a stage in this process, as its task does: output anew, scratch as it was left.

    Tells when it starts, and at its end the seconds it took and how often it changed files.
    """
    torch.set_num_threads(1)
    logging.basicConfig(filename=folder / "log")
    shutil.rmtree(folder / "output", ignore_errors=True)
    for part in ("output", "scratch"):
        (folder / part).mkdir(exist_ok=True)
    runtime = Runtime(micro_batch=1)
    work = Mortal(
        store=Store(str(folder / "store")),
        label=name,
        output=folder / "output",
        scratch=folder / "scratch",
        runtime=runtime,
        last=last,
    )
    changes = count_changes(folder, change)
    tell.send("started")
    started = time.monotonic()
    STAGES[name].function(work, **arguments)
    tell.send((time.monotonic() - started, len(changes)))


def count_changes(folder: Path, last: int) -> list[None]:
    """Returns a list that grows with every change of a file below ``folder``; the ``last``-th kills this process."""
    seen: list[None] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES and str(arguments[0]).startswith((f"{folder}/output", f"{folder}/scratch")):
            seen.append(None)
            if len(seen) == last:  # the change is still to come
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return seen


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Processes that begin with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs one stage in ``folder``, killing it or not."""

    processes: ForkServerContext
    name: str
    arguments: dict[str, Any]
    folder: Path

    def run(self, *, last: int | None = None, change: int = 0, after: float | None = None) -> tuple[float, int] | None:
        """Returns the seconds the stage took and its changes of files; None where it was killed. Anything else fails.

        It is killed at its ``last``-th save, at its ``change``-th change of a file, or ``after`` so many seconds.
        """
        self.folder.mkdir(exist_ok=True)
        here, there = self.processes.Pipe()
        process = self.processes.Process(
            target=attempt, args=(self.name, self.folder, self.arguments, last, change, there)
        )
        process.start()
        there.close()
        assert here.recv() == "started"
        if after is not None:
            process.join(after)
            process.kill()
        process.join(120)
        code = process.exitcode
        assert code in (0, -signal.SIGKILL), (self.folder / "log").read_text()
        return here.recv() if code == 0 else None

    def digest(self) -> str:
        return digest_folder(self.folder / "output")[0]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A stage, its arguments, and what it publishes uninterrupted, after ``seconds`` and ``changes`` of files."""

    processes: ForkServerContext
    name: str
    arguments: dict[str, Any]
    reference: Path
    seconds: float
    changes: int

    def runner(self, folder: Path) -> Runner:
        return Runner(processes=self.processes, name=self.name, arguments=self.arguments, folder=folder)

    @property
    def expected(self) -> str:
        return digest_folder(self.reference)[0]


def reference_to(folder: Path) -> ArtifactRef:
    return ArtifactRef(kind="plain", key="0", uri=str(folder), digest=digest_folder(folder)[0], num_bytes=0)


@pytest.fixture(scope="module")
def cases(
    source: ModelSource, tmp_path_factory: pytest.TempPathFactory, processes: ForkServerContext
) -> dict[str, Case]:
    """Each stage run once without a kill, on what the stage before it published."""
    root = tmp_path_factory.mktemp("resume")
    ids = np.random.default_rng(0).integers(0, 256, (SEQUENCES, 24))
    for name, part in (("tokens", ids), ("validation", ids[:3])):
        save_tokens(root / name, part)
    tokens, validation = reference_to(root / "tokens"), reference_to(root / "validation")
    found: dict[str, Case] = {}

    def case(name: str, **arguments: Any) -> ArtifactRef:
        arguments = {"model": source} | arguments
        runner = Runner(processes=processes, name=name, arguments=arguments, folder=root / name)
        facts = runner.run()
        assert facts is not None
        output = root / name / "output"
        found[name] = Case(
            processes=processes,
            name=name,
            arguments=arguments,
            reference=output,
            seconds=facts[0],
            changes=facts[1],
        )
        return reference_to(output)

    discovery = {"kv_routing": "auto", "tie": True, "exclude": []}
    grams = case("gather", tokens=tokens, precision="float64", checkpoint_sequences=8, **discovery)
    ordered = case("bases", grams=grams, init="whitened")
    (root / "allocation").mkdir()
    removed = {unit.name: unit.dimension // 2 for unit in read_units(Path(ordered.uri))}
    write_json(root / "allocation" / "allocation.json", {"removed": removed})
    dense = case("teacher", tokens=tokens, checkpoint_sequences=8)
    case(
        "train",
        bases=ordered,
        allocation=reference_to(root / "allocation"),
        tokens=tokens,
        validation=validation,
        objective="kl",
        learning_rate=1e-2,
        dense_outputs=dense,
        epochs=3,
        batch_sequences=16,
        dropout=0.2,
        checkpoint_steps=2,
    )
    return found


# saves of an uninterrupted run: gather after 8, 16, .. 40 of 48 sequences; train at steps 0, 2, 3, 4, 6, 8, 9
SAVES = {"gather": 5, "bases": 8, "teacher": 6, "train": 7}


@pytest.mark.parametrize("name", STAGES)
def test_killed_at_every_save_point_it_continues_to_the_same_bytes(
    cases: dict[str, Case], tmp_path: Path, name: str
) -> None:
    """Every attempt lives for one save: the next must not repeat it, or this would never end."""
    case = cases[name]
    runner = case.runner(tmp_path / name)
    kills = 0
    while not runner.run(last=1):
        kills += 1
        assert kills <= SAVES[name]
    assert kills == SAVES[name]
    assert runner.digest() == case.expected


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", STAGES)
def test_killed_at_random_changes_of_files_it_continues_to_the_same_bytes(
    cases: dict[str, Case], tmp_path: Path, name: str, seed: int
) -> None:
    case, draw = cases[name], random.Random(seed)
    runner = case.runner(tmp_path / name)
    kills = sum(not runner.run(change=draw.randint(1, case.changes // 2)) for _ in range(5))
    runner.run()
    assert kills >= 3
    assert runner.digest() == case.expected


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", STAGES)
def test_killed_at_random_moments_it_continues_to_the_same_bytes(
    cases: dict[str, Case], tmp_path: Path, name: str, seed: int
) -> None:
    case, draw = cases[name], random.Random(seed)
    runner = case.runner(tmp_path / name)
    delays = sorted(case.seconds * 10 ** draw.uniform(-1.5, -0.2) for _ in range(4))  # the soonest first: it hits
    kills = sum(not runner.run(after=delay) for delay in delays)
    runner.run()
    assert kills >= 1
    assert runner.digest() == case.expected


def modified(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_bases_that_are_whole_are_not_computed_again(cases: dict[str, Case], tmp_path: Path) -> None:
    """3 of 8 are there and one of them is damaged: 6 are to be computed."""
    runner = cases["bases"].runner(tmp_path / "bases")
    assert not runner.run(last=3)
    scratch = runner.folder / "scratch" / "bases"
    first, damaged, third = sorted(scratch.iterdir())
    flip(damaged)
    kept = {path.name: path.stat().st_mtime_ns for path in (first, third)}
    assert runner.run(last=7)
    assert {name: modified(scratch)[name] for name in kept} == kept
    assert f"{damaged}" in (runner.folder / "log").read_text()
    assert runner.digest() == cases["bases"].expected


def test_published_bases_read_as_all_tensors_do_and_are_no_second_copy(cases: dict[str, Case]) -> None:
    output = cases["bases"].reference
    units = read_units(output)
    tensors = load_tensors(output)
    assert list(tensors) == [unit.name for unit in units]
    for unit in units:
        q = tensors[unit.name]
        assert q.shape == (unit.dimension, unit.dimension)
        assert (q.T @ q - torch.eye(len(q), dtype=q.dtype)).abs().max() <= 1e-12
    saved = {path.name: read_checked(path) for path in output.glob("basis-*.safetensors")}
    assert len(saved) == len(units)
    ridges = read_json(output / "ridges.json")
    assert {name: file.fields["ridge"] for file in saved.values() for name in file.tensors} == ridges
    assert all(path.samefile(output.parent / "scratch" / "bases" / path.name) for path in output.glob("basis-*"))


def test_a_killed_training_keeps_two_checkpoints_and_survives_their_damage(
    cases: dict[str, Case], tmp_path: Path
) -> None:
    case = cases["train"]
    folder = tmp_path / "train" / "scratch" / "checkpoint"

    def steps() -> dict[int, Path]:
        """The slots, by step."""
        return {read_fields(slot / FIELDS)["step"]: slot for slot in folder.iterdir() if (slot / FIELDS).exists()}

    runner = case.runner(tmp_path / "train")
    assert not runner.run(last=4)
    assert steps().keys() == {4, 3}
    for path in steps()[4].glob("*.safetensors"):
        flip(path)
    assert not runner.run(last=1)  # from step 3 to step 4
    assert steps().keys() == {4, 3}
    for slot in steps().values():
        flip(slot / FIELDS)
    assert not runner.run(last=2)  # steps 0 and 2
    assert steps().keys() == {2, 0}
    assert runner.run()
    assert runner.digest() == case.expected
    assert "training starts from zero" in (runner.folder / "log").read_text()
