"""``python -m flows ablate``: chosen settings crossed, every other one being equal, and what each cell costs."""

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from prefect import flow

from flows.artifacts import show_markdown, show_table, stage_rows
from flows.config import CompressConfig, Target, cross_product
from flows.graph import compress_target, evaluate_dense, initialize, seed_variants
from flows.operated import VERSION, operated
from flows.prepared import Labelled, Prepared, prepare, with_config
from flows.sets import Sets, draw, test_examples
from flows.task_runners import workers_of
from storage.files import write_whole
from storage.manifest import ArtifactRef
from tasks.ablation import ablation_markdown, ablation_table, axis_text, dots, read_cell, rows_of, spread_lines
from tasks.artifacts import read_json
from tasks.evaluate import EVALUATION
from tasks.plots import plot_cells
from tasks.running import Stages

log = logging.getLogger(__name__)

ABLATION, MARKDOWN, PICTURE = "ablate.json", "ablate.md", "plots/ablate.png"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination: ``values`` by axis, and the configuration with them, which has one target."""

    values: dict[str, Any]
    config: CompressConfig

    @property
    def name(self) -> str:
        return ", ".join(f"{axis} {axis_text(axis, value)}" for axis, value in self.values.items())


@flow(name="ablate", version=VERSION, persist_result=False)
@operated
def ablate(config: CompressConfig) -> dict[str, Any]:
    """Compresses once for each cell of the config's section ``ablate``, writes the table and the plot; returns both.

    Errors: ``ValueError``, before anything is computed, for a combination that is forbidden or cannot be reached.
    """
    started = time.monotonic()
    crossed = cells(config)
    prepared = prepare(crossed[0].config)
    variants = [_varied(prepared, cell) for cell in crossed]
    config.output.mkdir(parents=True, exist_ok=True)
    workers = workers_of(config.workers, prepared.device)
    stages = Stages(
        place=config.store,
        runtime=prepared.runtime,
        verify=config.verify,
        timeout_minutes=config.stage_timeout_minutes,
        workers=workers,
    )
    with workers:
        test = test_examples(stages, prepared)
        sets = [draw(labelled, variant, test) for _, labelled, variant in seed_variants(stages, prepared)]
        dense = evaluate_dense(stages, prepared, test)
        sets = [drawn.compared_with(dense) for drawn in sets]
        results = []
        for number, (cell, variant) in enumerate(zip(crossed, variants, strict=True), 1):
            log.info("cell %d of %d: %s", number, len(crossed), cell.name)
            results.append(_run_cell(stages, variant, sets, f"cell {number}"))
    stages.close()
    return _write_output(config, stages, crossed, dense, results, started)


def cells(config: CompressConfig) -> list[Cell]:
    """Returns the cells that the config's section ``ablate`` asks for, those of one ratio side by side.

    Errors: ``ValueError`` if there is only one, or if some combine settings that exclude each other.
    """
    axes = config.ablate
    own = {
        "init": config.init,
        "tie": config.discovery.tie,
        "allocation": config.allocation.method,
        "kv_routing": config.discovery.kv_routing,
    }
    names = list(own)
    settings = product(*(getattr(axes, name) or (own[name],) for name in names))
    crossed = [
        _cell(config, target, dict(zip(names, values, strict=True)))
        for values, target in product(settings, _targets(config))
    ]
    if len(crossed) == 1:
        raise ValueError("ablate: one cell is nothing to compare: give more values, as in --init whitened --init plain")
    forbidden = [cell.name for cell in crossed if cell.values["kv_routing"] == "input" and not cell.values["tie"]]
    if forbidden:
        raise ValueError(
            "ablate: kv_routing=input ties Q, K and V, tie=false forbids ties: drop one of the two values; "
            f"{len(forbidden)} of {len(crossed)} cells combine them, the first is {forbidden[0]}"
        )
    order = list(dict.fromkeys(cell.values["ratio"] for cell in crossed))
    return sorted(crossed, key=lambda cell: order.index(cell.values["ratio"]))


def print_ablation(content: dict[str, Any], *, as_json: bool) -> None:
    """Prints an ablation as one JSON object, or as a table for people."""
    where = f"table, plot and JSON: {content['config']['output']}"
    lines = ["", *ablation_table(content), "", *spread_lines(content), "", where]
    print(json.dumps(content) if as_json else "\n".join(lines))


def _targets(config: CompressConfig) -> tuple[Target, ...]:
    axes = config.ablate
    if not axes.ratio and not axes.objective:
        return config.targets
    values = cross_product(list(axes.ratio), list(axes.objective), config.targets)
    return tuple(Target.model_validate(value) for value in values)


def _cell(config: CompressConfig, target: Target, values: dict[str, Any]) -> Cell:
    discovery = config.discovery.model_copy(update={name: values[name] for name in ("tie", "kv_routing")})
    allocation = config.allocation.model_copy(update={"method": values["allocation"]})
    update = {"init": values["init"], "discovery": discovery, "allocation": allocation, "targets": (target,)}
    asked = {"objective": target.objective, "ratio": target.amount if target.ratio is None else target.ratio}
    return Cell(values={**values, **asked}, config=config.model_copy(update=update))


def _varied(prepared: Prepared, cell: Cell) -> Prepared:
    try:
        return with_config(prepared, cell.config)
    except ValueError as error:
        raise ValueError(f"ablate: {cell.name}: {error}") from error


def _run_cell(stages: Stages, prepared: Prepared, sets: Sequence[Sets], label: str) -> list[dict[str, Any]]:
    """Returns the figures of one cell, those of each seed."""
    (target,) = prepared.config.targets
    figures = []
    for (_, of_seed, variant), drawn in zip(seed_variants(stages, prepared), sets, strict=True):
        labelled = Labelled(of_seed, label)
        initial = initialize(labelled, variant, drawn)
        made = compress_target(labelled, variant, drawn, initial, target)
        figures.append(read_cell(stages.store.local, made.allocation, made.untrained, made.training, made.trained))
    return figures


def _write_output(
    config: CompressConfig,
    stages: Stages,
    crossed: Sequence[Cell],
    dense: ArtifactRef,
    results: Sequence[list[dict[str, Any]]],
    started: float,
) -> dict[str, Any]:
    named = [axis for axis, values in config.ablate if values]
    varied = [axis for axis in crossed[0].values if len({str(cell.values[axis]) for cell in crossed}) > 1]
    content = {
        "model": config.model.name_or_path,
        "axes": [axis for axis in crossed[0].values if axis in named or axis in varied],
        "seeds": list(config.seeds),
        "dense": read_json(stages.store.local(dense) / EVALUATION),
        "rows": rows_of([cell.values for cell in crossed], results),
        "stages": [asdict(record) for record in stages.records],
        "run": stages.run_record.id,
        "config": config.model_dump(mode="json"),
        "seconds": round(time.monotonic() - started, 2),  # without imports and Prefect's start
    }
    plot_cells(*dots(content), config.output / PICTURE)
    write_whole(config.output / ABLATION, json.dumps(content, indent=2, allow_nan=False) + "\n")
    write_whole(config.output / MARKDOWN, ablation_markdown(content, PICTURE))
    show_markdown("ablation", lambda: ablation_table(content), f"{config.model.name_or_path}, ablated")
    show_table("stages", lambda: stage_rows(content["stages"]), f"{config.model.name_or_path}: stages of this run")
    return content
