"""The flow: calibrate -> gather -> bases -> measure -> allocate -> train -> merge -> evaluate -> report.

Everything left of ``allocate`` runs once, whatever the number of ratios and objectives; what has been computed
before, in this run or another, comes from the store.
"""

import json
import logging
import shutil
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from transformers import PreTrainedConfig

from flows.config import CompressConfig, Target, TextSource
from lsp_core.units import discover_units
from storage.store import ArtifactRef, Store
from tasks.allocate import allocate, check_reachable
from tasks.artifacts import write_json
from tasks.bases import bases
from tasks.caching import Runtime, Stages
from tasks.calibrate import calibrate, calibrate_test
from tasks.evaluate import evaluate, find_task_folder
from tasks.gather import gather
from tasks.measure import measure
from tasks.merge import merge
from tasks.models import ModelSource, check_positions, find_model, load_skeleton, resolve_device, resolve_precision
from tasks.report import REPORT, markdown, report, table
from tasks.text import Part, find_text
from tasks.train import teacher, teacher_bytes, train

log = logging.getLogger(__name__)

POOL = 4  # windows are drawn from the first POOL times as many as are asked for
LARGE_MODEL = 3_000_000_000  # parameters from which the KL grid has 16 points instead of 8


@flow(name="compress", persist_result=False)
def compress(config: CompressConfig) -> dict[str, Any]:
    """Compresses a language model to every target of the config and reports what it cost; returns the report."""
    config.output.mkdir(parents=True, exist_ok=True)
    device = resolve_device(config.device)
    model = find_model(**config.model.model_dump(), device=device)
    check_positions(model, config.calibration.sequence_length, "calibration.sequence_length")
    skeleton = load_skeleton(model)
    if not type(skeleton).__module__.startswith("transformers."):
        raise ValueError(f"{model.name}: a model whose code travels with it cannot be saved and loaded back compressed")
    points = config.allocation.grid_points or (16 if skeleton.num_parameters() >= LARGE_MODEL else 8)
    units = discover_units(skeleton, **config.discovery.model_dump())
    check_reachable(units, [target.ratio for target in config.targets], config.allocation.method, points)
    runtime = Runtime(device=device, micro_batch=config.micro_batch, task_batch_size=config.evaluation.task_batch_size)
    stages = Stages(store=Store(config.store), runtime=runtime)

    tokens = calibration_tokens(stages, config, model)
    validation = validation_tokens(stages, config, model)
    test = test_tokens(stages, config, model)
    further: dict[str, Any] = {
        "prompt": config.evaluation.prompt,
        "prompt_tokens": config.evaluation.prompt_tokens,
        "tasks": list(config.evaluation.tasks),
        "task_folder": find_task_folder(config.evaluation.task_folder),
        "task_limit": config.evaluation.task_limit,
        "harness": version("lm_eval") if config.evaluation.tasks else None,
    }
    dense = stages.run(evaluate, "dense", model=model, tokens=test, **further)

    grams = stages.run(
        gather,
        model=model,
        tokens=tokens,
        precision=resolve_precision(config.precision, device),
        **config.discovery.model_dump(mode="json"),
    )
    ordered = stages.run(bases, model=model, grams=grams, init=config.init)
    subset = allocation_tokens(stages, config, model)
    grid = None
    if config.allocation.method == "measured_kl":
        grid = stages.run(measure, model=model, bases=ordered, tokens=subset, points=points)

    made: dict[str, list[ArtifactRef]] = {name: [] for name in ("allocations", "untrained", "untrained_uniform")}
    made |= {name: [] for name in ("trainings", "merges", "trained")}
    for target in config.targets:
        share = f"{target.ratio:g}"
        chosen = stages.run(
            allocate, share, bases=ordered, grid=grid, ratio=target.ratio, method=config.allocation.method
        )
        uniform = stages.run(
            allocate, f"{share} uniform", bases=ordered, grid=None, ratio=target.ratio, method="uniform_parameters"
        )
        made["allocations"].append(chosen)
        made["untrained"].append(
            stages.run(
                evaluate,
                f"{share} untrained",
                model=model,
                tokens=test,
                bases=ordered,
                allocation=chosen,
                kl_tokens=subset,
                **further,
            )
        )
        made["untrained_uniform"].append(
            stages.run(
                evaluate, f"{share} untrained, uniform", model=model, tokens=test, bases=ordered, allocation=uniform
            )
        )
        projectors = train_target(stages, config, target, model, ordered, chosen, tokens, validation, skeleton.config)
        merged = stages.run(
            merge, target.name, model=model, bases=ordered, projectors=projectors, tolerance=config.merge_tolerance
        )
        made["trainings"].append(projectors)
        made["merges"].append(merged)
        made["trained"].append(
            stages.run(evaluate, target.name, model=model, tokens=test, checkpoint=merged, **further)
        )

    reported = stages.run(
        report,
        model_name=config.model.name_or_path,
        prompt=config.evaluation.prompt,
        targets=[target.model_dump(mode="json", include={"ratio", "objective"}) for target in config.targets],
        bases=ordered,
        grid=grid,
        dense=dense,
        **made,
    )
    return write_output(config, stages, reported, made["merges"], grid)


def calibration_tokens(stages: Stages, config: CompressConfig, model: ModelSource) -> ArtifactRef:
    """Returns the sequences that Grams are gathered on and projectors are trained on."""
    count = config.calibration.sequences
    part: Part = "calibration" if config.validation.text is None else "all"
    return _draw(stages, config, model, "training", config.calibration.text, part, take=count, pool=POOL * count)


def validation_tokens(stages: Stages, config: CompressConfig, model: ModelSource) -> ArtifactRef:
    """Returns held-out sequences, of the calibration text where no other is given."""
    count = config.validation.sequences
    text, part = (
        (config.calibration.text, "validation") if config.validation.text is None else (config.validation.text, "all")
    )
    return _draw(stages, config, model, "validation", text, part, take=count, pool=POOL * count)


def allocation_tokens(stages: Stages, config: CompressConfig, model: ModelSource) -> ArtifactRef:
    """Returns the sequences that the KL grid is measured on: some of the calibration set, or of a text of their own."""
    count = config.allocation.sequences
    if config.allocation.text is not None:
        return _draw(stages, config, model, "allocation", config.allocation.text, "all", take=count, pool=POOL * count)
    part: Part = "calibration" if config.validation.text is None else "all"
    pool = POOL * config.calibration.sequences
    return _draw(stages, config, model, "allocation", config.calibration.text, part, take=count, pool=pool)


def _draw(
    stages: Stages,
    config: CompressConfig,
    model: ModelSource,
    label: str,
    text: TextSource,
    part: Part,
    *,
    take: int,
    pool: int,
) -> ArtifactRef:
    return stages.run(
        calibrate,
        label,
        text=find_text(**text.model_dump()),
        tokenizer=model.tokenizer,
        length=config.calibration.sequence_length,
        take=take,
        pool=pool,
        part=part,
        seed=config.calibration.seed,
    )


def test_tokens(stages: Stages, config: CompressConfig, model: ModelSource) -> ArtifactRef:
    """Returns the windows of the test text."""
    length = config.evaluation.sequence_length or config.calibration.sequence_length
    check_positions(model, length, "evaluation.sequence_length")
    return stages.run(
        calibrate_test,
        "test",
        text=find_text(**config.evaluation.text.model_dump()),
        tokenizer=model.tokenizer,
        length=length,
        max_tokens=config.evaluation.max_tokens,
        bos=config.evaluation.bos,
    )


def train_target(
    stages: Stages,
    config: CompressConfig,
    target: Target,
    model: ModelSource,
    ordered: ArtifactRef,
    allocation: ArtifactRef,
    tokens: ArtifactRef,
    validation: ArtifactRef,
    model_config: PreTrainedConfig,
) -> ArtifactRef:
    """Returns the trained projectors of one target."""
    width = model_config.get_text_config().hidden_size
    size = teacher_bytes(model, config.calibration.sequences, config.calibration.sequence_length, width)
    dense_outputs = None
    if target.objective == "kl" and size <= config.teacher_cache_gib * 2**30:
        dense_outputs = stages.run(teacher, "teacher", model=model, tokens=tokens)
    settings = config.training.model_dump(mode="json", exclude={"checkpoint_steps"})
    settings["epochs"] = target.epochs or config.training.epochs
    return stages.run(
        train,
        target.name,
        model=model,
        bases=ordered,
        allocation=allocation,
        tokens=tokens,
        validation=validation,
        objective=target.objective,
        hints={"dense_outputs": dense_outputs, "checkpoint_steps": config.training.checkpoint_steps},
        **settings,
    )


def write_output(
    config: CompressConfig, stages: Stages, reported: ArtifactRef, merges: list[ArtifactRef], grid: ArtifactRef | None
) -> dict[str, Any]:
    """Copies plots and checkpoints to the output folder and writes the report with what belongs to this run alone."""
    folder = stages.store.local(reported)
    content: dict[str, Any] = json.loads((folder / REPORT).read_text())
    shutil.copytree(folder / "plots", config.output / "plots", dirs_exist_ok=True)
    for target, merged, result in zip(config.targets, merges, content["results"], strict=True):
        checkpoint = config.output / "checkpoints" / target.name
        _replace_folder(stages.store.local(merged), checkpoint)
        result["checkpoint"] = str(checkpoint.resolve())
    content["grid"] = None if grid is None else stages.store.payload_uri(grid)
    content["stages"] = [asdict(record) for record in stages.records]
    content["config"] = config.model_dump(mode="json")
    text = markdown(content)
    write_json(config.output / REPORT, content)
    (config.output / "report.md").write_text(text, encoding="utf-8")
    create_markdown_artifact(
        "\n".join(table(content)), key="compression", description=f"{config.model.name_or_path}, compressed"
    )
    return content


def _replace_folder(source: Path, target: Path) -> None:
    temporary = target.with_name(target.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
