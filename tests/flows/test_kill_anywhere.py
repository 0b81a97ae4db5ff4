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
from lsp_core.durable import read_checked
from storage.runs import read_runs
from storage.store import Store
from storage.upkeep import delete, find_garbage
from tests.flows.processes import Run, assert_same, digests, saved_steps, starting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.usefixtures("prefect_server")]
Make = Callable[..., CompressConfig]

SEED = 3
KILLS = 24
CHECKPOINT_SEQUENCES, CHECKPOINT_STEPS = 128, 8
LATEST = 0.7  # of the time that a stage took uninterrupted: a kill is to hit it, and it may be faster next time
PUBLISHING = 0.004  # seconds from ``finished`` on that the first of these kills waits at most
MOMENTS = {
    "measure": "moved",
    "train 0.3-kl": "listed",
    "evaluate 0.3-kl": "finished",
}  # of publishing, their last kills
HANDING_OUT = 0.3  # seconds after the last stage, in which plots and checkpoints are copied
TEACHER = "train teacher"
BETWEEN = "between stages"
STAGES = {"calibrate", "gather", "bases", "measure", "allocate", "train", "merge", "evaluate", "report"}
PIECES = ("grid/status/c/*/0", "bases/*.safetensors", "teacher/*.safetensors")  # of unfinished stages
SUMS = "work/*/checkpoint/grams.safetensors"


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a killed run left in the store: its artifacts, and how far unfinished stages have come.

    ``pieces``: the inode of every finished piece by name; one that is written again has another. ``saved``: steps or
    sequences in the newest whole checkpoint, by the stage's key.
    """

    artifacts: dict[str, str]
    pieces: dict[str, int]
    saved: dict[str, int]

    @classmethod
    def found(cls, store: Path) -> "Left":
        pieces = [path for pattern in PIECES for path in store.glob(f"work/*/{pattern}")]
        return cls(
            artifacts=digests(store),
            pieces={path.relative_to(store / "work").as_posix(): path.stat().st_ino for path in pieces},
            saved={path.parts[-3]: read_checked(path).fields["sequences"] for path in store.glob(SUMS)}
            | {work.name: steps for work in store.glob("work/*") if (steps := saved_steps(work)) > 0},
        )

    def is_published(self, key: str) -> bool:
        return any(name.endswith(f"/{key}.json") for name in self.artifacts)


@dataclass(kw_only=True)
class Tally:
    """What the kills hit, and what they cost."""

    kills: int = 0
    hit: Counter[str] = field(default_factory=Counter)  # by label
    publishing: Counter[str] = field(default_factory=Counter)  # by what was there of the artifact
    again: int = 0  # pieces that had to be computed a second time
    lost: int = 0  # artifacts that were there before and are not, or not the same, after
    seconds: float = 0.0  # spent computing stages
    unsaved: float = 0.0  # of these, what the kills took

    def compare(self, before: Left, after: Left) -> None:
        """Counts what one kill and the run that it ended have changed; no checkpoint may go back."""
        self.lost += sum(after.artifacts.get(name) != digest for name, digest in before.artifacts.items())
        for name, inode in before.pieces.items():
            if not after.is_published(name.split("/")[0]):
                self.again += after.pieces.get(name) != inode
        for key, count in before.saved.items():
            assert after.is_published(key) or after.saved.get(key, 0) >= count


def schedule(reference: Run) -> list[str]:
    """Returns the stage, by label, that each kill but the last is aimed at: all of them, the longer ones repeatedly."""
    stages = reference.computed()
    shares = dict.fromkeys(stages, 1)
    while sum(shares.values()) < KILLS - 1:
        shares[max(stages, key=lambda label: stages[label].seconds / shares[label] ** 2)] += 1
    return [label for label, share in shares.items() for _ in range(share)]


def kill(run: Run, label: str, delay: float, store: Path, moment: str | None) -> str | None:
    """Kills ``run`` so many seconds into a stage, or after a moment of its publication; returns the label it hit."""

    def reach(condition: Callable[[], bool], pause: float = 0.001) -> None:
        run.until(lambda: condition() or label in run.done(), pause)

    def publishing() -> bool:
        return any(store.glob("work/*/finished-*"))

    def manifests() -> int:
        return sum(1 for _ in store.glob("manifest/*/*.json"))

    reach(lambda: label in run.computed())
    if moment is not None:
        listed = manifests()
        reach(publishing)
        if moment != "finished":
            reach(lambda: not publishing(), pause=0)
        if moment == "listed":
            reach(lambda: manifests() > listed, pause=0)
    time.sleep(delay)
    run.kill()
    hit = [name for name, stage in run.computed().items() if stage.ended is None]
    assert len(hit) <= 1
    return hit[0] if hit else None


def unsaved(run: Run, label: str, store: Path) -> float:
    """Returns the seconds that a killed run had computed since a stage began, or since it last kept anything."""
    assert run.ended is not None
    offset = time.time() - time.monotonic()
    files = [path for path in store.glob("work/*/**/*") if path.is_file() and path.suffix != ".tmp"]
    kept = [path.stat().st_mtime - offset for path in files if path.relative_to(store / "work").parts[1] != "output"]
    return run.ended - max([run.computed()[label].began, *kept])


def what_is_there(store: Path, before: Left, after: Left) -> str:
    """Returns how far the publication of an artifact had come when it was killed."""
    if len(after.artifacts) > len(before.artifacts):
        return "manifest written"
    if any(store.glob("work/*/finished-*")):
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
    delete(
        opened, find_garbage(opened, [(need.kind, need.key) for need in newest.needs], grace_seconds=0), grace_seconds=0
    )


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
    assert not [name for name in garbage if name.startswith("work/")]
    summarize(tally, whole.seconds(), len(digests(store)), garbage, time.monotonic() - started)
    assert_whole(store)
    assert_same(folder, reference)
    assert_unlocked(store)
    assert {label.split()[0] for label in tally.hit} >= STAGES
    assert tally.lost == 0
    assert tally.again == 0
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
        longest = LATEST * reference.computed()[label].seconds / shares[label] if waiting else HANDING_OUT
        moment = MOMENTS.get(label) if waiting and turns[label] >= shares[label] else None
        if moment is not None:
            longest = PUBLISHING if moment == "finished" else 0.0
        run = start()
        hit = kill(run, label, chance.random() * longest, store, moment)
        done |= run.done()
        tally.kills += 1
        tally.hit[hit or BETWEEN] += 1
        tally.seconds += run.seconds()

        assert_whole(store)
        now = Left.found(store)
        tally.compare(left, now)
        finished = sum(stage.ended is not None for stage in run.computed().values())
        if hit is not None and len(now.artifacts) == len(left.artifacts) + finished:  # it is not published
            tally.unsaved += unsaved(run, hit, store)
        if moment is not None:
            tally.publishing[what_is_there(store, left, now)] += 1
        left = now
    return tally


def summarize(tally: Tally, reference: float, artifacts: int, garbage: list[str], seconds: float) -> None:
    """Prints the summary line and writes it where ``LSP_KILL_REPORT`` says.

    Work repeated: what was computed and not kept when a kill came. Extra: that, and whatever a stage does again at each
    start, such as loading the model; noisy, for it compares two measured times.
    """
    steps = sum(kills for label, kills in tally.hit.items() if label.startswith("train ") and label != TEACHER)
    repeated = tally.unsaved / tally.seconds
    report = {
        "seed": SEED,
        "kills": tally.kills,
        "restarts": tally.kills,
        "kills_by_label": dict(tally.hit),
        "kills_while_publishing": dict(tally.publishing),
        "stage_seconds": round(tally.seconds, 2),
        "stage_seconds_repeated": round(tally.unsaved, 2),
        "stage_seconds_uninterrupted": round(reference, 2),
        "work_repeated_share": round(repeated, 4),
        "extra_share": round((tally.seconds - reference) / reference, 4),
        "grid_rows_bases_and_teacher_files_computed_twice": tally.again,
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
