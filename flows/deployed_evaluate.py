"""The flow ``evaluate``: a language model by itself, dense or compressed; every stage is cached as those of others."""

import json
import time
from dataclasses import asdict
from typing import Any

from prefect import flow

from flows.artifacts import show_markdown, show_plan, show_table, stage_rows
from flows.evaluate_config import EvaluateConfig
from flows.evaluating import describe_evaluation, find_evaluated
from flows.operated import VERSION, operated
from flows.task_runners import workers_of
from storage.files import write_whole
from tasks.artifacts import read_json
from tasks.evaluate import EVALUATION
from tasks.markdown import code, markdown_table
from tasks.running import Stages

MARKDOWN = "evaluation.md"


@flow(name="evaluate", version=VERSION, persist_result=False)
@operated
def evaluate_flow(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluates a language model on a test text and on tasks; writes and returns the figures."""
    started = time.monotonic()
    config.output.mkdir(parents=True, exist_ok=True)
    model, runtime = find_evaluated(config)
    workers = workers_of(config.workers, runtime.device)
    stages = Stages(
        place=config.store,
        runtime=runtime,
        verify=config.verify,
        timeout_minutes=config.stage_timeout_minutes,
        workers=workers,
    )
    show_plan(stages.store, lambda runner: describe_evaluation(runner, config, model), model.name)
    with workers:
        evaluation = describe_evaluation(stages, config, model)
    stages.close()
    content: dict[str, Any] = {"model": model.name, "revision": model.revision}
    content |= read_json(stages.store.local(evaluation) / EVALUATION)
    content["stages"] = [asdict(record) for record in stages.records]
    content["run"] = stages.run_record.id
    content["config"] = config.model_dump(mode="json")
    content["seconds"] = round(time.monotonic() - started, 2)  # without imports and Prefect's start
    write_whole(config.output / EVALUATION, json.dumps(content, indent=2, allow_nan=False) + "\n")
    write_whole(config.output / MARKDOWN, "\n".join([f"# {model.name}, evaluated", "", *table(content)]) + "\n")
    show_markdown("evaluation", lambda: table(content), f"{model.name}, evaluated")
    show_table("stages", lambda: stage_rows(content["stages"]), f"{model.name}: stages of this run")
    return content


def table(content: dict[str, Any]) -> list[str]:
    """Returns the figures of an evaluation as Markdown lines."""
    rows = [
        ["parameters", f"{content['parameters']:,}"],
        ["perplexity", f"{content['perplexity']:.4g}"],
        ["test tokens", f"{content['tokens']:,}"],
    ]
    for name, metrics in content.get("tasks", {}).items():
        rows += [[f"{name}, {metric}", f"{value:.4g}"] for metric, value in metrics.items()]
    if "continuation" in content:
        rows.append(["continuation", code(content["continuation"])])
    return markdown_table(["figure", "value"], rows)


def print_evaluation(content: dict[str, Any], *, as_json: bool) -> None:
    """Prints an evaluation as one JSON object, or as a table for people."""
    print(
        json.dumps(content) if as_json else "\n".join(["", *table(content), "", f"JSON: {content['config']['output']}"])
    )
