"""``python -m flows curve``: what every ratio would cost, from the grid alone, before any training."""

import json
import shutil
from dataclasses import asdict
from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from flows.artifacts import show_markdown, show_plan, show_table, stage_rows
from flows.config import CompressConfig
from flows.graph import initialize, seed_variants
from flows.operated import VERSION, operated
from flows.prepared import Prepared, Runner, prepare
from flows.sets import draw, test_examples
from flows.task_runners import workers_of
from storage.files import write_whole
from storage.manifest import ArtifactRef
from tasks.curve import BOUND, CURVE, PICTURE, curve, reach
from tasks.running import Stages

MARKDOWN = "curve.md"
NOTE = "Nothing is trained. KL, in nats per token: summed over units cut alone, and of all cuts at once."


@flow(name="curve", version=VERSION, persist_result=False)
@operated
def measure_curve(
    config: CompressConfig, points: Annotated[int, Field(ge=2, le=200, description="Ratios to measure.")]
) -> dict[str, Any]:
    """Measures ``points`` ratios of a config, whatever its targets, and hands out the curve, which it returns."""
    config.output.mkdir(parents=True, exist_ok=True)
    prepared = prepare(config, targets=False)
    workers = workers_of(config.workers, prepared.device)
    stages = Stages(
        place=config.store,
        runtime=prepared.runtime,
        verify=config.verify,
        timeout_minutes=config.stage_timeout_minutes,
        workers=workers,
    )
    show_plan(stages.store, lambda runner: describe_curve(runner, prepared, points), config.model.name_or_path)
    with workers:
        folder = stages.store.local(describe_curve(stages, prepared, points))
    stages.close()
    content: dict[str, Any] = {"model": config.model.name_or_path, **json.loads((folder / CURVE).read_text())}
    content["summary"] = summary(content)
    (config.output / PICTURE).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / PICTURE, config.output / PICTURE)
    write_whole(config.output / CURVE, json.dumps(content, indent=2, allow_nan=False) + "\n")
    write_whole(config.output / MARKDOWN, markdown(content))
    show_markdown("curve", lambda: [*table(content), "", content["summary"]], f"{content['model']}, by ratio")
    show_table("stages", lambda: stage_rows([asdict(record) for record in stages.records]), "stages of this run")
    return content


def describe_curve(stages: Runner, prepared: Prepared, points: int) -> ArtifactRef:
    """Describes the stages up to the curve to ``stages``; of several seeds the first."""
    _, stages, prepared = seed_variants(stages, prepared)[0]
    sets = draw(stages, prepared, test_examples(stages, prepared))
    initial = initialize(stages, prepared, sets)
    chosen = prepared.config.allocation
    return stages.run(
        curve,
        model=prepared.model,
        bases=initial.bases,
        grid=initial.grid,
        tokens=sets.allocation,
        points=points,
        method=chosen.method,
        **chosen.caps,
    )


def print_curve(content: dict[str, Any], *, as_json: bool) -> None:
    """Prints a curve as one JSON object, or as a table for people."""
    print(json.dumps(content) if as_json else "\n".join(["", *table(content), "", content["summary"]]))


def markdown(content: dict[str, Any]) -> str:
    """Returns a curve for people to read."""
    lines = [
        f"# {content['model']}, by ratio",
        "",
        f"Dense: {content['parameters']:,} parameters, {content['gib']:.4g} GiB. Ranks by {content['method']}. {NOTE}",
        "",
        *table(content),
        "",
        content["summary"],
        "",
        f"![KL against the share removed]({PICTURE})",
    ]
    return "\n".join(lines) + "\n"


def table(content: dict[str, Any]) -> list[str]:
    """Returns the points of a curve as Markdown lines."""
    lines = [
        "| removed |     parameters |      GiB | KL isolated | KL joint |",
        "|--------:|---------------:|---------:|------------:|---------:|",
    ]
    for row in content["points"]:
        isolated = "" if row["kl_sum_of_isolated"] is None else f"{row['kl_sum_of_isolated']:.4g}"
        lines.append(
            f"| {row['realized_ratio']:7.2%} | {row['parameters']:14,} | {row['gib']:8.4g} | {isolated:>11} | "
            f"{row['kl_joint']:8.4g} |"
        )
    return lines


def summary(content: dict[str, Any]) -> str:
    """Returns the sentence that says how far the joint KL stays small."""
    reached = reach(content["points"], BOUND)
    whole = reached == content["points"][-1]["realized_ratio"]
    return f"joint KL stays below {BOUND:g} nats up to a ratio of {reached:.2f}" + (
        ", the largest that can be reached" if whole else ""
    )
