"""``python -m flows compress`` killed at random moments of every stage loses nothing and ends in the same bytes.

One summary line is printed; the figures of the README come from

    LSP_KILL_REPORT=kill.json python -m pytest -s -m slow tests/flows/test_kill_anywhere.py
"""

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from filelock import FileLock

from flows.config import CompressConfig
from storage.runs import read_runs
from storage.store import Store
from storage.upkeep import delete, find_garbage
from tests.flows.processes import Run, assert_same, digests, gathered_sequences, starting, trained_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.usefixtures("prefect_server")]
Make = Callable[..., CompressConfig]

SEED = 3
KILLS = 28
CHECKPOINT_SEQUENCES, CHECKPOINT_STEPS = 128, 8
PUBLISHED = ("gather", "measure", "train 0.3-kl")  # their last kill comes while the artifact is published
PUBLISHING = 0.03  # seconds that publishing takes at most here: digests, syncs, package versions
HANDING_OUT = 0.3  # seconds after the last stage, in which plots and checkpoints are copied
TEACHER = "train teacher"
BETWEEN = "between stages"
STAGES = {"calibrate", "gather", "bases", "measure", "allocate", "train", "merge", "evaluate", "report"}
PIECES = {
    "grid rows": "work/*/grid/status/c/*/0",
    "bases": "work/*/bases/*.safetensors",
    "teacher files": "work/*/teacher/*.safetensors",
}


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a killed run left in the store: its artifacts, and how far unfinished stages have come.

    ``pieces``: the inode of every finished piece by name; one that is written again has another.
    """

    artifacts: dict[str, str]
    pieces: dict[str, dict[str, int]]
    steps: int
    sequences: int

    @classmethod
    def found(cls, store: Path) -> "Left":
        return cls(
            artifacts=digests(store),
            pieces={
                kind: {path.relative_to(store).as_posix(): path.stat().st_ino for path in store.glob(pattern)}
                for kind, pattern in PIECES.items()
            },
            steps=trained_steps(store),
            sequences=gathered_sequences(store),
        )


@dataclass(kw_only=True)
class Tally:
    """What the kills hit, and what they cost."""

    kills: int = 0
    hit: Counter[str] = field(default_factory=Counter)  # by label
    publishing: Counter[str] = field(default_factory=Counter)  # by what was there of the artifact
    again: Counter[str] = field(default_factory=Counter)  # pieces written a second time
    lost: int = 0  # artifacts that were there before and are not, or not the same, after
    seconds: float = 0.0  # spent computing stages

    def compare(self, before: Left, after: Left) -> None:
        """Counts what one kill and the run that it ended have changed; no checkpoint may go back."""
        self.lost += sum(after.artifacts.get(name) != digest for name, digest in before.artifacts.items())
        for kind, pieces in after.pieces.items():
            again = sum(before.pieces[kind].get(name, inode) != inode for name, inode in pieces.items())
            self.again += Counter({kind: again})
        if after.artifacts.keys() == before.artifacts.keys():
            assert after.steps >= before.steps
            assert after.sequences >= before.sequences


def schedule(reference: Run) -> list[str]:
    """Returns the stage, by label, that each kill is aimed at: every one once, the longer ones more often."""
    stages = reference.computed()
    shares = dict.fromkeys(stages, 1)
    while sum(shares.values()) < KILLS - 1:
        shares[max(stages, key=lambda label: stages[label].seconds / shares[label])] += 1
    return [label for label, share in shares.items() for _ in range(share)]


def kill(run: Run, label: str, delay: float, store: Path, *, publishing: bool) -> str | None:
    """Kills ``run`` so many seconds into a stage or its publication; returns the label of the stage that it hit."""
    run.until(lambda: label in run.computed() or label in run.done())
    if publishing:
        run.until(lambda: label in run.done() or any(store.glob("work/*/finished")))
    time.sleep(delay)
    run.kill()
    hit = [name for name, stage in run.computed().items() if stage.ended is None]
    assert len(hit) <= 1
    return hit[0] if hit else None


def what_is_there(store: Path, before: Left, after: Left) -> str:
    """Returns how far the publication of an artifact had come when it was killed."""
    if len(after.artifacts) > len(before.artifacts):
        return "manifest written"
    if any(store.glob("work/*/finished")):
        return "before its files were moved"
    payloads = {path.name for path in (store / "payload").iterdir() if "." not in path.name}
    return "files without a manifest" if payloads - set(after.artifacts.values()) else "not begun"


def assert_whole(store: Path) -> None:
    """Every manifest that is to be seen reads, and the files it names are there, each with its digest."""
    opened = Store(str(store), verify=True, writable=False)
    manifests = list(opened.manifests())
    assert len(manifests) == len(list(opened.places()))
    assert [opened.problem(manifest, verify=True) for manifest in manifests] == [None] * len(manifests)


def assert_unlocked(store: Path) -> None:
    for path in store.rglob("*.lock"):
        FileLock(path).acquire(blocking=False).release()


def leftovers(store: Path) -> list[str]:
    """Returns what a store at rest has no use for."""
    found = [*store.glob("work/*"), *store.glob("manifest/*/*.tmp"), *store.glob("run/*.tmp")]
    found += [*store.glob("payload/*.tmp"), *store.glob("payload/replaced-*"), *store.glob("probe-*")]
    return sorted(path.relative_to(store).as_posix() for path in found)


def collect(store: Path) -> None:
    """Does what ``python -m flows store gc --last 1 --grace-hours 0 --delete`` does."""
    opened = Store(str(store))
    newest = read_runs(opened)[0]
    delete(opened, find_garbage(opened, [(need.kind, need.key) for need in newest.needs], grace_seconds=0))


def test_a_run_killed_anywhere_continues_to_the_same_bytes(tmp_path: Path, tiny_config: Make) -> None:
    words = random.Random(0)
    text = tmp_path / "train.txt"
    text.write_text(" ".join(words.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(20_000)))

    def config(folder: Path) -> CompressConfig:
        return tiny_config(
            folder,
            calibration={
                "text": {"path": text},
                "sequences": 1536,
                "sequence_length": 32,
                "checkpoint_sequences": CHECKPOINT_SEQUENCES,
            },
            allocation={"sequences": 160, "grid_points": 12},
            training={"epochs": 2, "batch_sequences": 24, "checkpoint_steps": CHECKPOINT_STEPS, "dropout": 0.2},
            micro_batch=1,
        )

    reference, folder = tmp_path / "uninterrupted", tmp_path / "killed"
    started = time.monotonic()
    with starting(tmp_path) as start:
        whole = start(config(reference))
        assert whole.wait() == 0, whole.text()
        targets = schedule(whole)
        tally = kill_again_and_again(lambda: start(config(folder)), targets, whole, folder / "store")
        last = start(config(folder))
        assert last.wait() == 0, last.text()
    tally.seconds += last.seconds()
    store = folder / "store"
    garbage = leftovers(store)
    summarize(tally, whole.seconds(), len(digests(store)), garbage, time.monotonic() - started)
    assert_whole(store)
    assert_same(folder, reference)
    assert_unlocked(store)
    assert {label.split()[0] for label in tally.hit} >= STAGES
    assert tally.lost == 0
    assert not tally.again
    collect(store)
    assert leftovers(store) == []
    assert_same(folder, reference)


def kill_again_and_again(start: Callable[[], Run], targets: list[str], reference: Run, store: Path) -> Tally:
    """Starts the same command again for every target, and once more, and kills it; looks into the store after each."""
    chance = random.Random(SEED)
    tally, done, shares, turns = Tally(), set[str](), Counter(targets), Counter[str]()
    left = Left.found(store)
    for target in (*targets, None):
        waiting = [label for label in dict.fromkeys(targets) if label not in done]
        label = target if target in waiting else waiting[0] if waiting else targets[-1]
        turns[label] += 1
        publishing = label in PUBLISHED and label in waiting and turns[label] >= shares[label]
        longest = reference.computed()[label].seconds / shares[label] if waiting else HANDING_OUT
        run = start()
        hit = kill(run, label, chance.random() * (PUBLISHING if publishing else longest), store, publishing=publishing)
        done |= run.done()
        tally.kills += 1
        tally.hit[hit or BETWEEN] += 1
        tally.seconds += run.seconds()

        assert_whole(store)
        now = Left.found(store)
        tally.compare(left, now)
        if publishing:
            tally.publishing[what_is_there(store, left, now)] += 1
        left = now
    return tally


def summarize(tally: Tally, reference: float, artifacts: int, garbage: list[str], seconds: float) -> None:
    """Prints the summary line and writes it where ``LSP_KILL_REPORT`` says."""
    steps = sum(kills for label, kills in tally.hit.items() if label.startswith("train ") and label != TEACHER)
    repeated = (tally.seconds - reference) / reference
    report = {
        "seed": SEED,
        "kills": tally.kills,
        "restarts": tally.kills,
        "kills_by_label": dict(tally.hit),
        "kills_while_publishing": dict(tally.publishing),
        "work_repeated_share": round(repeated, 4),
        "stage_seconds": round(tally.seconds, 2),
        "stage_seconds_uninterrupted": round(reference, 2),
        "grid_rows_bases_and_teacher_files_written_twice": tally.again.total(),
        "optimizer_steps_repeated_at_most": steps * CHECKPOINT_STEPS,
        "gathered_sequences_repeated_at_most": tally.hit["gather"] * CHECKPOINT_SEQUENCES,
        "artifacts": artifacts,
        "artifacts_lost": tally.lost,
        "left_for_gc": garbage,
        "seconds": round(seconds, 1),
    }
    print(
        f"\nkills {tally.kills}, restarts {tally.kills}, work repeated {repeated:.1%}, artifacts lost {tally.lost} of "
        f"{artifacts}, {seconds:.0f} s: {json.dumps(report)}"
    )
    if "LSP_KILL_REPORT" in os.environ:
        Path(os.environ["LSP_KILL_REPORT"]).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
