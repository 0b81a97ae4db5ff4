"""Shares of a stage's work: they cover it once, are balanced, and give the bits that the stage gives alone."""

import itertools
import json
import logging
import math
import random
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from lsp_core.discovery import discover_units
from lsp_core.durable import read_checked, write_durably
from lsp_core.gram import FILE
from lsp_core.units import Unit
from storage.digest import digest_folder
from storage.grid import KLGrid, save_tokens
from storage.manifest import ArtifactRef
from storage.tensors import save_tensors
from tasks import fanout, sums
from tasks.allocate import ALLOCATION
from tasks.artifacts import write_json, write_units
from tasks.caching import Runtime, Share, Stage, Work, split
from tasks.evaluate import DIVERGENCES, LOSSES, evaluate
from tasks.fanout import PartEnded, Workers, WorkersUnavailable, on_own_device, run_part
from tasks.gather import PARTS, gather
from tasks.measure import measure
from tasks.models import ModelSource, load_skeleton
from tasks.places import open_store
from tasks.shares import contiguous
from tasks.sums import keep_sums, mean_of, read_sums

GATHER = {"kv_routing": "auto", "tie": True, "exclude": [], "precision": "float64"}
WINDOWS, LENGTH, MICRO_BATCH = 25, 13, 3  # the last micro-batch is smaller
POINTS = 5
Publish = Callable[..., ArtifactRef]


def cheapest(costs: list[float], shares: int) -> float:
    """Returns the cost of the dearest of ``shares`` ranges, at best, by trying all cuts."""
    count = len(costs)
    cuts = itertools.combinations(range(1, count), min(shares, count) - 1)
    return min(max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cut, count))) for cut in cuts)


@pytest.mark.parametrize("shares", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("seed", range(5))
def test_shares_cover_everything_once_and_the_dearest_is_as_cheap_as_can_be(seed: int, shares: int) -> None:
    chance = random.Random(seed)
    costs = [chance.choice([0.1, 1, 3, 10]) * chance.random() for _ in range(8)]
    cut = contiguous(len(costs), shares, lambda start, stop: sum(costs[start:stop]))
    assert [index for share in cut for index in share] == list(range(len(costs)))
    assert len(cut) <= shares
    dearest = max(sum(costs[index] for index in share) for share in cut)
    assert dearest == pytest.approx(cheapest(costs, shares), rel=1e-12)
    assert dearest <= sum(costs) / shares + max(costs)


def test_what_a_share_costs_beside_its_pieces_counts() -> None:
    # a range costs what comes before its end, as a prefix that every share runs does, and its pieces
    cut = contiguous(8, 2, lambda start, stop: stop + 3 * (stop - start))
    assert cut == [range(5), range(5, 8)]  # 20 and 17, where halves would cost 16 and 20 as well, and 6 + 2 cost 24


def test_nothing_is_cut_into_nothing() -> None:
    assert contiguous(0, 3, lambda start, stop: math.inf) == []


@pytest.fixture
def tokens(published: Publish) -> ArtifactRef:
    ids = torch.randint(0, 256, (WINDOWS, LENGTH), generator=torch.Generator().manual_seed(3)).numpy()
    return published("calibrate", lambda folder: save_tokens(folder, ids))


@pytest.fixture
def bases(published: Publish, source: ModelSource) -> ArtifactRef:
    """Returns random ordered bases of the tiny model's units."""
    units = discover_units(load_skeleton(source))
    generator = torch.Generator().manual_seed(1)

    def basis(unit: Unit) -> Tensor:
        shape = (unit.dimension, unit.dimension)
        return torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64)).Q

    def fill(folder: Path) -> None:
        save_tensors(folder, {unit.name: basis(unit) for unit in units})
        write_units(folder, units)

    return published("bases", fill)


def plan(stage: Stage, work: Work, workers: int, arguments: dict[str, Any]) -> list[Share]:
    assert stage.parts is not None
    shares: list[Share] = json.loads(json.dumps(stage.parts.plan(work, workers, **arguments)))
    return shares


def do(stage: Stage, work: Work, share: Share, arguments: dict[str, Any]) -> None:
    assert stage.parts is not None
    stage.parts.run(work, share, **arguments)


def finish(stage: Stage, work: Work, arguments: dict[str, Any]) -> str:
    """Returns the digest of what the stage publishes."""
    for folder in (work.output, work.scratch):
        folder.mkdir(exist_ok=True)
    stage.function(work, **arguments)
    digest, _ = digest_folder(work.output)
    shutil.rmtree(work.output)
    shutil.rmtree(work.scratch)
    work.output.mkdir()
    work.scratch.mkdir()
    return digest


@pytest.mark.parametrize("workers", [2, 3, 20])
def test_shared_grams_have_the_bits_of_whole_ones(
    work: Work, source: ModelSource, tokens: ArtifactRef, workers: int
) -> None:
    arguments = {"model": source, "tokens": tokens, "checkpoint_sequences": 4, "sequences": 20, **GATHER}
    alone = finish(gather, work, arguments)
    shares = plan(gather, work, workers, arguments)
    names = [unit.name for unit in discover_units(load_skeleton(source))]
    assert [record["name"] for share in shares for record in share] == names
    assert len(shares) == min(workers, len(names))
    for share in shares:
        do(gather, work, share, arguments)
    assert finish(gather, work, arguments) == alone


def test_a_share_of_grams_that_is_not_at_its_end_or_damaged_is_summed_by_the_stage(
    work: Work, source: ModelSource, tokens: ArtifactRef, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = {"model": source, "tokens": tokens, "checkpoint_sequences": 4, **GATHER}
    alone = finish(gather, work, arguments)
    for share in plan(gather, work, 3, arguments):
        do(gather, work, share, arguments)
    first, second, _ = sorted(work.scratch.glob(f"{PARTS}/*/{FILE}"))
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    saved = read_checked(second)
    write_durably(second, saved.tensors, saved.fields | {"sequences": 8})  # as a killed part leaves it
    assert finish(gather, work, arguments) == alone
    assert "does not match its digest: these units are summed again" in caplog.text


@pytest.mark.parametrize("workers", [2, 3])
def test_shared_rows_have_the_bits_of_rows_measured_in_one_go(
    work: Work, source: ModelSource, tokens: ArtifactRef, bases: ArtifactRef, workers: int
) -> None:
    arguments = {"model": source, "bases": bases, "tokens": tokens, "points": POINTS}
    alone = finish(measure, work, arguments)
    shares = plan(measure, work, workers, arguments)
    assert [row for share in shares for row in share] == list(range(8))
    assert len(shares) == workers
    for share in reversed(shares):
        do(measure, work, share, arguments)
    assert KLGrid.open(str(work.scratch / "grid")).pending() == []
    assert finish(measure, work, arguments) == alone


def test_only_rows_that_are_left_are_shared_out_and_measured(
    work: Work, source: ModelSource, tokens: ArtifactRef, bases: ArtifactRef, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = {"model": source, "bases": bases, "tokens": tokens, "points": POINTS}
    plan(measure, work, 2, arguments)
    do(measure, work, [2, 3, 5], arguments)
    rows = {path: path.stat().st_ino for path in work.scratch.glob("grid/status/c/*/0")}
    assert sorted(int(path.parent.name) for path in rows) == [2, 3, 5]
    assert [row for share in plan(measure, work, 2, arguments) for row in share] == [0, 1, 4, 6, 7]
    do(measure, work, [2, 3, 4, 5], arguments)
    assert {path: path.stat().st_ino for path in rows} == rows
    assert len(KLGrid.open(str(work.scratch / "grid")).pending()) == 4


def test_more_shares_than_workers_where_loading_is_small_beside_the_work(
    work: Work, source: ModelSource, tokens: ArtifactRef, bases: ArtifactRef
) -> None:
    few = plan(measure, work, 2, {"model": source, "bases": bases, "tokens": tokens, "points": POINTS})
    shutil.rmtree(work.scratch / "grid")
    many = plan(measure, work, 2, {"model": source, "bases": bases, "tokens": tokens, "points": 33})
    assert len(few) == 2 < len(many) <= 8


@pytest.fixture
def untrained(source: ModelSource, tokens: ArtifactRef, bases: ArtifactRef, published: Publish) -> dict[str, Any]:
    """Returns the arguments of an evaluation of the untrained model, with its joint divergence."""
    ids = torch.randint(0, 256, (WINDOWS, LENGTH), generator=torch.Generator().manual_seed(7)).numpy()
    removed = {unit.name: unit.dimension // 3 for unit in discover_units(load_skeleton(source))}
    return {
        "model": source,
        "tokens": tokens,
        "bases": bases,
        "kl_tokens": published("calibrate", lambda folder: save_tokens(folder, ids), key="1"),
        "allocation": published("allocate", lambda folder: write_json(folder / ALLOCATION, {"removed": removed})),
    }


@pytest.mark.parametrize("workers", [2, 20])
def test_shared_sums_add_up_to_the_bits_of_one_pass(work: Work, untrained: dict[str, Any], workers: int) -> None:
    work, arguments = replace(work, runtime=Runtime(micro_batch=MICRO_BATCH)), untrained
    alone = finish(evaluate, work, arguments)
    shares = plan(evaluate, work, workers, arguments)
    assert len(shares) == 2  # nine micro-batches, four of them a share at least
    for kind in ("kl", "loss"):
        cut = [place for share in shares for name, *place in share if name == kind]
        assert [window for place in cut for window in range(*place)] == list(range(WINDOWS))
        assert all(start % MICRO_BATCH == 0 for start, _ in cut)
    for share in shares:
        do(evaluate, work, share, arguments)
    for folder in (LOSSES, DIVERGENCES):
        assert len(read_sums(work.scratch / folder, MICRO_BATCH)) == math.ceil(WINDOWS / MICRO_BATCH)
    assert plan(evaluate, work, workers, arguments) == []
    min((work.scratch / DIVERGENCES).iterdir()).unlink()  # of a share that came to nothing
    (left,) = plan(evaluate, work, workers, arguments)
    assert [kind for kind, *_ in left] == ["kl"]
    assert finish(evaluate, work, arguments) == alone


def test_sums_that_are_kept_are_not_computed_again(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "SECONDS_BETWEEN_SAVES", 0.0)
    work = replace(work, runtime=Runtime(micro_batch=3))
    values = torch.rand(25, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    computed: list[int] = []

    def keep(share: range, most: int = 9) -> dict[int, tuple[float, int]]:
        computed.clear()

        def compute(batches: list[range], take: Callable[[float, int], None]) -> None:
            for batch in batches:
                if len(computed) == most:
                    raise KeyboardInterrupt
                computed.append(batch.start)
                take(values[batch.start : batch.stop].sum().item(), len(batch))

        return keep_sums(work, "sums", share, compute, lambda *_: None)

    with pytest.raises(KeyboardInterrupt):
        keep(range(25), most=2)
    whole = keep(range(25))
    assert computed == [6, 9, 12, 15, 18, 21, 24]
    assert list(whole) == [0, 3, *computed]
    assert mean_of(whole) == pytest.approx(values.mean().item(), rel=25 * torch.finfo(torch.float64).eps)
    assert keep(range(25), most=0) == whole
    _, file = sorted((work.scratch / "sums").iterdir(), key=lambda file: file.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])
    assert list(keep(range(6, 12))) == computed == [6, 9]
    assert list(keep(range(25)).items()) == list(whole.items())
    assert computed == [12, 15, 18, 21, 24]
    assert read_sums(work.scratch / "sums", 4) == {}


def started(work: Work, stage: Stage, arguments: dict[str, Any], share: Share) -> dict[str, Any]:
    """Returns what a part of ``stage`` under the key k is called with."""
    common = {"key": "k", "label": "part", "place": work.store.uri, "verify": False, "index": 0, "threads": 1}
    plain = fanout._plain(stage, arguments)
    call = {"stage": fanout._name_of(stage), "share": share, "arguments": plain, "runtime": {"micro_batch": 3}}
    assert json.loads(json.dumps(call)) == call
    return {**common, **call}


def test_a_part_keeps_its_share_in_the_work_folder_of_the_stage(
    work: Work, source: ModelSource, tokens: ArtifactRef
) -> None:
    arguments = {"model": source, "tokens": tokens}
    run_part(**started(work, evaluate, arguments, [["loss", 0, 12]]))
    assert sorted(read_sums(work.store.work("k").path / LOSSES, 3)) == [0, 3, 6, 9]


def test_a_part_ends_with_its_flow(work: Work, source: ModelSource, tokens: ArtifactRef) -> None:
    call = started(work, evaluate, {"model": source, "tokens": tokens}, [["loss", 0, 12]])
    end = Event()
    end.set()
    before = fanout._ended.set(end)
    try:
        run_part(**call)
    finally:
        fanout._ended.reset(before)
    assert read_sums(work.store.work("k").path / LOSSES, 3) == {}


def test_a_part_of_a_stage_that_was_published_meanwhile_ends_quietly(
    work: Work,
    source: ModelSource,
    tokens: ArtifactRef,
    bases: ArtifactRef,
    published: Publish,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    arguments = {"model": source, "bases": bases, "tokens": tokens, "points": POINTS}
    call = started(work, measure, arguments, [0, 1])
    with pytest.raises(FileNotFoundError):
        run_part(**call)  # there is no grid

    def publish(*_: object, **__: object) -> None:
        published("measure", lambda folder: (folder / "grid").touch(), key="k")
        raise FileNotFoundError("deleted with the work folder")

    monkeypatch.setattr(measure, "parts", replace(measure.parts, run=publish))  # type: ignore[type-var]
    for _ in range(2):  # while the part runs, and before it
        run_part(**call)
        assert "ends early: another run has published the stage" in caplog.text
        caplog.clear()
        shutil.rmtree(work.store.work("k").path, ignore_errors=True)
    assert not work.store.work("k").path.exists()


def test_workers_out_of_reach_end_the_run_with_a_remedy(work: Work, source: ModelSource, tokens: ArtifactRef) -> None:
    def make() -> Elsewhere:
        raise OSError("Timed out trying to connect to tcp://127.0.0.1:9")

    runtime = Runtime(micro_batch=MICRO_BATCH)
    arguments = {"model": source, "tokens": tokens}
    with (
        Workers(2, make) as workers,
        pytest.raises(WorkersUnavailable, match=r"tcp://127.0.0.1:9\): .*workers.address"),
    ):
        workers.share_out(evaluate, work.store, "k", "evaluate", work.store.uri, runtime, arguments)


def test_progress_ends_a_part_whose_folder_is_gone(
    work: Work, source: ModelSource, tokens: ArtifactRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[BaseException] = []

    def run(part: Work, share: Share, **_: Any) -> None:
        shutil.rmtree(part.scratch)
        try:
            part.progress()(1, 2)
        except PartEnded as ended:
            seen.append(ended)
            raise

    monkeypatch.setattr(evaluate, "parts", replace(evaluate.parts, run=run))  # type: ignore[type-var]
    run_part(**started(work, evaluate, {"model": source, "tokens": tokens}, [["loss", 0, 12]]))
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("device", "gpus", "devices"),
    [
        ("cpu", 2, ["cpu"] * 3),
        ("cuda", 1, ["cuda"] * 3),
        ("cuda", 2, ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda:1", 2, ["cuda:1"] * 3),
    ],
)
def test_parts_take_the_gpus_that_they_see_in_turn(
    device: str, gpus: int, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert [on_own_device(Runtime(device=device), index).device for index in range(3)] == devices


def test_arguments_come_back_from_json_as_they_were(source: ModelSource, tokens: ArtifactRef) -> None:
    arguments = {"model": source, "tokens": tokens, "transfer": [tokens], "task_folder": None, "prompt": "a"}
    plain = json.loads(json.dumps(fanout._plain(evaluate, arguments)))
    assert fanout._typed(evaluate, plain) == arguments


class Elsewhere:
    """A runner whose workers are other machines: each has its copies of a remote store's files to itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.machines = 0

    def __enter__(self) -> "Elsewhere":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def submit(self, part: Any, parameters: dict[str, Any]) -> Any:
        self.machines += 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(self.folder / str(self.machines)))
            part.fn(**parameters)
        done: Future[None] = Future()
        done.set_result(None)
        return done


@pytest.mark.slow
@pytest.mark.parametrize("stage", [gather, measure, evaluate], ids=lambda stage: stage.name)
def test_workers_on_other_machines_hand_over_by_the_store(
    stage: Stage,
    prefect_server: None,
    work: Work,
    source: ModelSource,
    tokens: ArtifactRef,
    bases: ArtifactRef,
    untrained: dict[str, Any],
    s3_bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = {
        gather: {"model": source, "tokens": tokens, **GATHER},
        measure: {"model": source, "bases": bases, "tokens": tokens, "points": POINTS},
        evaluate: untrained,
    }
    alone = finish(stage, work, every[stage])
    place = f"s3://{s3_bucket}/store"
    store = open_store(place)
    for ref in (tokens, bases, untrained["kl_tokens"], untrained["allocation"]):
        manifest = work.store.manifest(ref.kind, ref.key)
        store.publish(ref.kind, ref.key, work.store.local(ref), manifest.lineage)
    runner = Elsewhere(tmp_path / "machines")
    with Workers(2, lambda: runner) as workers:
        workers.share_out(stage, store, "k", stage.name, place, work.runtime, every[stage])
    assert runner.machines == 2

    def forward(*_: object, **__: object) -> None:
        raise AssertionError("the parts have done everything")

    if stage is gather:
        monkeypatch.setattr("tasks.gather._sum", forward)
    elif stage is measure:
        monkeypatch.setattr("tasks.measure.measured_row", forward)
    else:
        monkeypatch.setattr("tasks.evaluate.sum_losses", forward)
        monkeypatch.setattr("tasks.evaluate.Sensitivity", forward)
    inputs, settings = split(every[stage])
    ref = stage.compute(store, "k", stage.name, work.runtime, inputs, settings, {}, None)
    assert ref.digest == alone
    assert not store.work("k").path.exists()
    assert store.files.names("work") == []
