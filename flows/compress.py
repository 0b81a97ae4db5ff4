"""The flow: runs the graph of stages and hands out the report, the plots and the checkpoints."""

import json
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from glob import escape
from pathlib import Path
from typing import Any

import yaml
from prefect import flow
from prefect.artifacts import create_markdown_artifact

from flows.config import CompressConfig
from flows.graph import Built, build
from flows.prepared import Prepared, prepare
from storage.files import move_aside, renamed, write_whole
from tasks.card import write_card
from tasks.report import REPORT, markdown, table
from tasks.running import Stages
from tasks.summary import combined

CONFIG = "config.yaml"
STALE_SECONDS = 3600.0  # no copy of a file takes as long


@flow(name="compress", persist_result=False)
def compress(config: CompressConfig) -> dict[str, Any]:
    """Compresses a language model to every target of the config and reports what it cost; returns the report."""
    started = time.monotonic()
    config.output.mkdir(parents=True, exist_ok=True)
    prepared = prepare(config)
    stages = Stages(place=config.store, runtime=prepared.runtime, verify=config.verify)
    built = build(stages, prepared)
    stages.close()
    return write_output(prepared, stages, built, started)


def write_output(prepared: Prepared, stages: Stages, built: list[Built], started: float) -> dict[str, Any]:
    """Copies plots and checkpoints to the output folder and writes the report with what belongs to this run alone."""
    config, several = prepared.config, len(built) > 1
    reports = [(one.seed, _hand_out(prepared, stages, one, one.seed if several else None)) for one in built]
    content: dict[str, Any] = {"model": config.model.name_or_path, **combined(reports)}
    grids = [None if one.grid is None else stages.store.payload_uri(one.grid) for one in built]
    content["grid"] = grids[0]
    if several:
        content["grids"] = grids  # in the order of the seeds
    content["stages"] = [asdict(record) for record in stages.records]
    content["run"] = stages.run_record.id
    content["config"] = config.model_dump(mode="json")
    content["seconds"] = round(time.monotonic() - started, 2)  # without imports and Prefect's start
    text = markdown(content)
    write_whole(config.output / REPORT, json.dumps(content, indent=2, allow_nan=False) + "\n")
    write_whole(config.output / "report.md", text)
    write_whole(config.output / CONFIG, yaml.safe_dump(content["config"], sort_keys=False))
    create_markdown_artifact(
        "\n".join(table(content)), key="compression", description=f"{config.model.name_or_path}, compressed"
    )
    return content


def _hand_out(prepared: Prepared, stages: Stages, built: Built, seed: int | None) -> dict[str, Any]:
    """Copies the plots and checkpoints of one seed and returns its report; ``seed`` is None where there is no other."""
    config, folder = prepared.config, stages.store.local(built.reported)
    plots = config.output / "plots" / ("" if seed is None else f"seed-{seed}")
    shutil.copytree(folder / "plots", plots, dirs_exist_ok=True)
    content: dict[str, Any] = json.loads((folder / REPORT).read_text())
    for target, merged, result in zip(config.targets, built.merges, content["results"], strict=True):
        checkpoint = config.output / "checkpoints" / (target.name if seed is None else f"{target.name}-seed-{seed}")
        with _replacing(stages.store.local(merged), checkpoint) as copy:
            write_card(
                copy,
                model=prepared.model,
                report=content,
                result=result,
                calibration={"amount": _calibrated_on(prepared), "digest": built.training.digest},
                seed=built.seed,
            )
        result["checkpoint"] = str(checkpoint.resolve())
    return content


def _calibrated_on(prepared: Prepared) -> str:
    """Returns how much the projectors are trained on, for people."""
    chosen = prepared.config.calibration
    if prepared.model.processor is not None:
        return f"{chosen.sequences:,} images"
    return f"{chosen.sequences:,} sequences of {chosen.sequence_length:,} tokens"


@contextmanager
def _replacing(source: Path, target: Path) -> Iterator[Path]:
    """Hands out a copy of ``source``, then puts it in the place of ``target``; another run may do the same."""
    temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")
    _clear_left(target)
    try:
        shutil.copytree(source, temporary)
        yield temporary
        while not renamed(temporary, target):
            move_aside(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _clear_left(target: Path) -> None:
    """Deletes the copies for ``target`` that killed runs left: those in which nothing changed for a long time."""
    for left in target.parent.glob(f"{escape(target.name)}.{'[0-9a-f]' * 32}.tmp"):
        with suppress(FileNotFoundError):  # another run deletes it too, or puts it in its place
            # times of change: a copy has the times of writing of its source
            changed = max(path.lstat().st_ctime for path in [left, *left.rglob("*")])
            if time.time() - changed > STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
