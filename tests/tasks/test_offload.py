"""Stages with offload publish the bytes that they publish without it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lsp_core.offload import Offload
from storage.digest import digest_folder
from storage.grid import save_tokens
from storage.manifest import ArtifactRef
from tasks.bases import bases
from tasks.caching import Runtime, Stage, Work
from tasks.gather import gather
from tasks.measure import measure
from tasks.models import ModelSource


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


def copy(source: Path, target: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())
