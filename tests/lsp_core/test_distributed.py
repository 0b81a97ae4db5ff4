"""Training by several processes of torchrun against training by one: the same V, the same errors, any number resumes.

One launch of three processes runs everything, by two of them, by three, and by two again; the tests look at what came
out.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lsp_core.checkpoint import FIELDS, SLOTS
from tests.lsp_core.training_jobs import Job, Seen, launch, run

pytestmark = pytest.mark.slow

# 6 sequences: batches of 4 and 2, on 3 processes one without a row; alpha ramps over the first two of the six steps
SETTINGS = {
    "learning_rate": 3e-3,
    "epochs": 3,
    "batch_sequences": 4,
    "micro_batch": 2,
    "patience": 9,
    "dropout": 0.2,
    "warmup_fraction": 0.0,
}
PARITY = [
    Job(name="kl", settings=SETTINGS),
    Job(name="task", family="qwen3", settings=SETTINGS | {"objective": "task", "micro_batch": 1}),
    Job(name="stored-teacher", family="opt", settings=SETTINGS, teacher=True, validation=5),
    Job(name="one-unit", settings=SETTINGS | {"epochs": 1}, units=1),
    Job(name="replicated-qf", settings=SETTINGS, replicate=True),
    Job(name="sharded", settings=SETTINGS | {"micro_batch": 1}, sharding="sharded", validation=2),
    Job(name="float32", dtype="float32", settings=SETTINGS),
]
ON_THREE = ("kl", "one-unit", "sharded")
# Tolerances of V, absolute. Sums in another order change a gradient by roundings of its largest terms, beside which an
# entry of its own may be nothing. Adam divides by |g| + 1e-8: an entry that is rounding alone, 1e-16 in float64, moves
# by 1e-8 of the learning rate a step, in float32, whose roundings are above 1e-8, by all of it, either way. The factor
# of 10 is for gradients of several nats.
STEPS, RATE = 6, 3e-3
TOLERANCE = {"float64": 10 * STEPS * RATE * 1e-8, "float32": 2 * STEPS * RATE}
TYPICAL = {"float64": 1e-13, "float32": 1e-5}  # and the median entry, which is not lost in cancellation


def resumable(name: str, folder: Path, **options: Any) -> Job:
    """Batches of 2, a checkpoint every other step and at the ends of epochs, after 3 steps."""
    settings = SETTINGS | {"batch_sequences": 2, "checkpoint_steps": 2}
    return Job(name=name, settings=settings, work=str(folder), **options)


FAILING = [
    Job(name="diverges", settings=SETTINGS | {"learning_rate": 1e308}),
    Job(name="kept", settings=SETTINGS | {"learning_rate": 1e30, "keep_diverged": True}, dtype="float32"),
    Job(name="nan-in-one", settings=SETTINGS | {"keep_diverged": True}, broken=True),
]


@dataclasses.dataclass(frozen=True)
class Runs:
    """What processes saw: ``alone`` of one process, ``several`` by the number of processes; both by job."""

    alone: dict[str, Seen]
    several: dict[int, dict[str, list[Seen]]]
    folder: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("distributed")

    def killed(folder: str, **options: Any) -> Job:
        return resumable(f"killed-{folder}", root / folder, until=5, **options)

    def resumed(folder: str, processes: int, **options: Any) -> Job:
        copy = root / f"{folder}-on-{processes}{''.join(options)}"
        return resumable(folder, copy, copied=str(root / folder), processes=processes, **options)

    alone = {job.name: run(dataclasses.replace(job, sharding="replicated", replicate=False)) for job in PARITY}
    alone["uninterrupted"] = run(resumable("uninterrupted", root / "none"))
    alone["one-unit-resumed"] = run(resumable("one-unit-resumed", root / "none-one-unit", units=1))
    run(killed("by-one"))
    jobs = [
        *PARITY,
        *FAILING,
        resumable("uninterrupted", root / "whole"),
        killed("by-two"),
        resumable("blind", root / "blind", separate=True),
        resumable("full", root / "full", full=True),
        *(dataclasses.replace(job, processes=3) for job in PARITY if job.name in ON_THREE),
        resumed("by-two", 3),
        killed("by-three", processes=3),
        killed("one-unit-resumed", processes=3, units=1),
        resumed("one-unit-resumed", 3, units=1),
        resumed("by-one", 2),
        resumed("by-two", 2),
        resumed("by-three", 2),
        dataclasses.replace(resumed("by-two", 2, damaged=True), name="damaged"),
    ]
    several = launch(jobs, root / "launch")
    alone["by-two"] = run(resumed("by-two", 1))
    return Runs(alone, several, root)


def differences(ours: Seen, expected: Seen) -> torch.Tensor:
    assert ours.vectors.keys() == expected.vectors.keys()
    return torch.cat([(v - expected.vectors[name]).abs().flatten() for name, v in ours.vectors.items()])


@pytest.mark.parametrize(
    ("job", "processes"),
    [
        pytest.param(job, processes, id=f"{job.name}-{processes}")
        for job in PARITY
        for processes in ([2, 3] if job.name in ON_THREE else [2])
    ],
)
def test_several_processes_train_the_same_vectors(runs: Runs, job: Job, processes: int) -> None:
    seen, expected = runs.several[processes][job.name], runs.alone[job.name]
    assert [each.error for each in seen] == [""] * processes
    assert all(each.steps == expected.steps for each in seen)
    assert all(each.history == seen[0].history for each in seen), "every process takes the same decisions"
    found = differences(seen[0], expected)
    moved = torch.cat([(v - b).abs().flatten() for v, b in moved_from_the_start(job, expected)])
    assert moved.median() > RATE / 4, "the vectors have to have moved"
    assert found.max() <= TOLERANCE[job.dtype]
    assert found.median() <= TYPICAL[job.dtype]
    rounding = {"float64": 1e-9, "float32": 1e-3}[job.dtype]
    for ours, theirs in zip(seen[0].history, expected.history, strict=True):
        assert ours == pytest.approx(theirs, rel=rounding)


def moved_from_the_start(job: Job, seen: Seen) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    from tests.lsp_core.conftest import _prepared

    case = _prepared(job.family)
    for name, v in seen.vectors.items():
        yield v, case.bases[name][:, -case.removed[name] :].to(v)


@pytest.mark.parametrize("processes", [2, 3])
def test_of_sharded_blocks_each_process_holds_its_part(runs: Runs, processes: int) -> None:
    whole, parts = runs.alone["sharded"].block_bytes, [each.block_bytes for each in runs.several[processes]["sharded"]]
    assert sum(parts) >= whole
    # a parameter of few rows is filled up, to one more row for each process: here 48 and 80 rows
    assert all(part <= whole / processes * (1 + processes / 48) for part in parts)
    assert all(each.block_bytes == whole for each in runs.several[processes]["kl"])


@pytest.mark.parametrize("processes", [2, 3])
def test_each_unit_has_one_owner_which_alone_reads_its_basis(runs: Runs, processes: int) -> None:
    for job in (job for job in PARITY if job.name in runs.several[processes]):
        seen = runs.several[processes][job.name]
        names = list(runs.alone[job.name].vectors)
        read = [each.read for each in seen]
        if job.replicate:
            assert all(sorted(each) == sorted(names) for each in read)
        else:
            assert sorted(name for each in read for name in each) == sorted(names)
            assert sum(bool(each) for each in read) == min(processes, len(names))
        assert seen[0].vectors.keys() == set(names)
    assert sum(not each.read for each in runs.several[processes]["one-unit"]) == processes - 1


def test_an_error_of_one_process_is_raised_in_all(runs: Runs) -> None:
    """V overflows where it lives; the others are told."""
    errors = [each.error for each in runs.several[2]["diverges"]]
    assert errors[0] == errors[1]
    assert "lower the learning rate" in errors[0]


@pytest.mark.parametrize(("name", "reason"), [("kept", "non-finite"), ("nan-in-one", "the training loss is nan")])
def test_what_is_kept_of_a_divergence_is_the_same_in_all(runs: Runs, name: str, reason: str) -> None:
    """V that overflows where it lives, and a loss that is none where one process's sequence is read."""
    seen = runs.several[2][name]
    assert [each.history for each in seen] == [seen[0].history] * 2
    assert seen[0].history
    assert [each.diverged for each in seen] == [seen[0].diverged] * 2
    assert reason in seen[0].diverged


def test_resumed_by_as_many_processes_the_bits_are_the_same(runs: Runs) -> None:
    whole, resumed = runs.several[2]["uninterrupted"][0], runs.several[2]["by-two"][0]
    assert resumed.steps == [5, 6, 7, 8, 9]
    assert resumed.history == whole.history
    assert whole.vectors.keys() == resumed.vectors.keys()
    assert all(torch.equal(v, resumed.vectors[name]) for name, v in whole.vectors.items())


@pytest.mark.parametrize(
    "resumed",
    [
        lambda runs: runs.alone["by-two"],
        lambda runs: runs.several[3]["by-two"][0],
        lambda runs: runs.several[2]["by-one"][0],
        lambda runs: runs.several[2]["by-three"][0],
    ],
    ids=["2 to 1", "2 to 3", "1 to 2", "3 to 2"],
)
def test_another_number_of_processes_continues(runs: Runs, resumed: Callable[[Runs], Seen]) -> None:
    seen, expected = resumed(runs), runs.alone["uninterrupted"]
    assert seen.steps == [5, 6, 7, 8, 9]
    assert differences(seen, expected).max() <= TOLERANCE["float64"]
    assert differences(seen, expected).median() <= TYPICAL["float64"]


def test_one_damaged_file_of_a_checkpoint_is_found_by_whoever_reads_it(runs: Runs) -> None:
    """Steps 4 and 3 were kept."""
    seen, whole = runs.several[2]["damaged"], runs.several[2]["uninterrupted"][0]
    assert all(each.steps == [4, 5, 6, 7, 8, 9] for each in seen)
    assert all(torch.equal(v, seen[0].vectors[name]) for name, v in whole.vectors.items())


def test_the_leader_tells_of_checkpoints_and_no_file_is_a_pickle(runs: Runs) -> None:
    """Steps 0, 2, 3, 4, 6, 8, 9."""
    assert [each.checkpoints for each in runs.several[2]["uninterrupted"]] == [7, 0]
    files = {path.relative_to(runs.folder / "whole").as_posix() for path in (runs.folder / "whole").rglob("*.*")}
    shards = {f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)}
    assert files == {f"{slot}/{name}" for slot in SLOTS for name in (FIELDS, *shards)}
    fields = json.loads((runs.folder / "whole" / SLOTS[0] / FIELDS).read_text())["fields"]
    assert set(fields["files"]) == shards


def test_a_process_that_does_not_see_the_folder_is_named(runs: Runs) -> None:
    errors = [each.error for each in runs.several[2]["blind"]]
    for error in errors:
        assert error.startswith("ValueError: process 1 on ")
        assert "does not see the checkpoints" in error
        assert "file system that all nodes share" in error


def test_a_checkpoint_that_the_leader_cannot_finish_ends_all(runs: Runs) -> None:
    assert [each.error for each in runs.several[2]["full"]] == ["OSError: [Errno 28] No space left on device"] * 2


def test_processes_without_a_unit_keep_and_continue_checkpoints(runs: Runs) -> None:
    seen, expected = runs.several[3]["one-unit-resumed"], runs.alone["one-unit-resumed"]
    assert all(each.steps == [5, 6, 7, 8, 9] for each in seen)
    assert differences(seen[0], expected).max() <= TOLERANCE["float64"]
