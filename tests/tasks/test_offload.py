"""Stages with offload publish the bytes that they publish without it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lsp_core.discovery import discover_units
from lsp_core.offload import Offload
from storage.digest import digest_folder
from storage.grid import save_tokens
from storage.manifest import ArtifactRef
from storage.tensors import save_tensors
from tasks.allocate import ALLOCATION
from tasks.artifacts import write_json, write_units
from tasks.bases import bases
from tasks.caching import Runtime, Stage, Work
from tasks.curve import curve
from tasks.evaluate import evaluate
from tasks.gather import gather
from tasks.measure import measure
from tasks.merge import merge
from tasks.models import ModelSource, load_skeleton
from tasks.train import teacher
from tasks.within import allocate_within


def output_of(stage: Stage, work: Work, offload: bool, **arguments: Any) -> Path:
    output = work.output / f"{stage.name}-{offload}"
    scratch = work.scratch / f"{stage.name}-{offload}"
    output.mkdir()
    scratch.mkdir()
    runtime = Runtime(micro_batch=3, offload=offload)
    stage.function(replace(work, output=output, scratch=scratch, runtime=runtime), **arguments)
    return output


def test_offload_changes_no_byte(
    work: Work, source: ModelSource, published: Callable[..., ArtifactRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []
    monkeypatch.setattr(Offload, "close", lambda offload: moved.append(offload.moves))
    ids = torch.randint(3, 200, (7, 12), generator=torch.Generator().manual_seed(0))
    tokens = published("tokens", lambda folder: save_tokens(folder, ids.numpy()))
    found: dict[bool, list[Path]] = {}
    for offload in (False, True):
        grams = output_of(
            gather,
            work,
            offload,
            model=source,
            tokens=tokens,
            kv_routing="auto",
            tie=True,
            exclude=[],
            precision="float64",
        )
        gathered = published("gather", lambda folder, grams=grams: copy(grams, folder), key=str(offload))
        ordered = output_of(bases, work, offload, model=source, grams=gathered, init="whitened")
        based = published("bases", lambda folder, ordered=ordered: copy(ordered, folder), key=str(offload))
        grid = output_of(measure, work, offload, model=source, bases=based, tokens=tokens, points=3)
        found[offload] = [grams, ordered, grid]
    assert [digest_folder(path) for path in found[True]] == [digest_folder(path) for path in found[False]]
    assert len(moved) == 2
    assert all(moves > 0 for moves in moved)


def test_offload_changes_no_byte_of_what_comes_after_the_grid(
    work: Work, source: ModelSource, published: Callable[..., ArtifactRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []
    monkeypatch.setattr(Offload, "close", lambda offload: moved.append(offload.moves))
    ids = torch.randint(3, 200, (7, 12), generator=torch.Generator().manual_seed(0))
    tokens = published("tokens", lambda folder: save_tokens(folder, ids.numpy()))
    units = discover_units(load_skeleton(source))
    generator = torch.Generator().manual_seed(1)
    ordered = {
        u.name: torch.linalg.qr(torch.randn(u.dimension, u.dimension, generator=generator, dtype=torch.float64)).Q
        for u in units
    }
    removed = {unit.name: unit.dimension // 2 for unit in units}

    def write_bases(folder: Path) -> None:
        write_units(folder, units)
        save_tensors(folder, ordered)

    based = published("bases", write_bases)
    allocation = published("allocate", lambda folder: write_json(folder / ALLOCATION, {"removed": removed}))
    vectors = {name: ordered[name][:, -count:] for name, count in removed.items()}
    projectors = published("train", lambda folder: save_tensors(folder, vectors))
    merged = output_of(merge, work, False, model=source, bases=based, projectors=projectors, tolerance=0.0)
    checkpoint = published("merge", lambda folder: copy(merged, folder))
    measuring: dict[str, Any] = {
        "model": source,
        "bases": based,
        "grid": None,
        "tokens": tokens,
        "method": "uniform_parameters",
    }
    text = {"model": source, "tokens": tokens, "prompt": "alpha", "prompt_tokens": 3}
    untrained = {"bases": based, "allocation": allocation, "kl_tokens": tokens}
    cases: list[tuple[Stage, dict[str, Any], int]] = [
        (teacher, {"model": source, "tokens": tokens}, 1),
        (allocate_within, {**measuring, "max_kl": 3.0}, 1),
        (curve, {**measuring, "points": 3}, 1),
        (evaluate, text, 1),
        (evaluate, text | untrained, 2),  # the allocation's divergence, and the merged model
        (evaluate, text | {"checkpoint": checkpoint}, 1),
    ]
    for number, (stage, arguments, times) in enumerate(cases):
        here = replace(work, output=work.output / str(number), scratch=work.scratch / str(number))
        here.output.mkdir()
        here.scratch.mkdir()
        plain, offloaded = (output_of(stage, here, offload, **arguments) for offload in (False, True))
        assert digest_folder(offloaded) == digest_folder(plain), stage.name
        assert len(moved) == times, stage.name
        assert all(moves > 0 for moves in moved)
        moved.clear()


def copy(source: Path, target: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())
