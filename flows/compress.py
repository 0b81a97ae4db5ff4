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

from flows.artifacts import (
    allocation_lines,
    curve_lines,
    file_lines,
    show_markdown,
    show_plan,
    show_table,
    stage_rows,
)
from flows.config import CompressConfig
from flows.graph import Built, build
from flows.operated import VERSION, operated
from flows.prepared import Prepared, prepare
from flows.task_runners import workers_of
from storage.files import move_aside, renamed, write_whole
from tasks.card import write_card
from tasks.html import CONFIG, HTML, MARKDOWN, html, read_curves
from tasks.html_lineage import read_manifests
from tasks.report import REPORT, markdown, table
from tasks.running import Stages
from tasks.summary import combined

STALE_SECONDS = 3600.0  # no copy of a file takes as long


@flow(name="compress", version=VERSION, persist_result=False)
@operated
def compress(config: CompressConfig) -> dict[str, Any]:
    """Compresses a language model to every target of the config and reports what it cost; returns the report."""
    started = time.monotonic()
    config.output.mkdir(parents=True, exist_ok=True)
    prepared = prepare(config)
    workers = workers_of(config.workers, prepared.device)
    stages = Stages(
        place=config.store,
        runtime=prepared.runtime,
        verify=config.verify,
        timeout_minutes=config.stage_timeout_minutes,
        workers=workers,
    )
    show_plan(stages.store, lambda runner: build(runner, prepared), config.model.name_or_path)
    with workers:
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
    content["started"] = stages.run_record.started
    content["config"] = config.model_dump(mode="json")
    content["seconds"] = round(time.monotonic() - started, 2)  # without imports and Prefect's start
    text = markdown(content)
    write_whole(config.output / REPORT, json.dumps(content, indent=2, allow_nan=False) + "\n")
    write_whole(config.output / MARKDOWN, text)
    write_whole(config.output / CONFIG, yaml.safe_dump(content["config"], sort_keys=False))
    curves = {
        one.seed if several else None: read_curves(stages.store, one.grid) for one in built if one.grid is not None
    }
    write_whole(config.output / HTML, html(content, curves, read_manifests(stages.store, content["stages"])))
    show_run(stages, built, content, config.output)
    return content


def show_run(stages: Stages, built: list[Built], content: dict[str, Any], output: Path) -> None:
    """Publishes what the report holds as artifacts of the run in Prefect."""
    model, grid = content["model"], built[0].grid
    show_markdown("compression", lambda: table(content), f"{model}, compressed")
    show_markdown("allocation", lambda: allocation_lines(content["units"], content["results"]), f"{model}: ranks")
    if grid is not None:
        show_markdown("kl-curves", lambda: curve_lines(stages.store.local(grid)), f"{model}: KL of single cuts")
    show_table("stages", lambda: stage_rows(content["stages"]), f"{model}: stages of this run")
    checkpoints = [result["checkpoint"] for result in content["results"]]
    show_markdown("files", lambda: file_lines(output, stages.store.uri, checkpoints), f"{model}: files")


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
