"""The graph of stages: calibrate -> gather -> bases -> measure -> allocate -> train -> merge -> evaluate -> report.

Everything left of ``allocate`` is the same whatever the number of ratios and objectives. ``build`` describes the graph
to whoever runs it or plans it, so the two cannot disagree.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedModel

from flows.config import CompressConfig, Target
from lsp_core.units import Unit, discover_units
from storage.manifest import ArtifactRef
from storage.remembered import DigestMemory
from tasks.allocate import allocate, check_reachable
from tasks.bases import bases
from tasks.caching import Arguments, Runtime, Stage
from tasks.calibrate import calibrate, calibrate_test
from tasks.evaluate import TaskFolder, evaluate, find_task_folder
from tasks.gather import gather
from tasks.measure import measure
from tasks.merge import merge
from tasks.models import ModelSource, check_positions, find_model, load_skeleton, resolve_device, resolve_precision
from tasks.report import report
from tasks.text import Part, TextOrigin, find_text
from tasks.train import teacher, teacher_bytes, train

log = logging.getLogger(__name__)

POOL = 4  # windows are drawn from the first POOL times as many as are asked for
LARGE_MODEL = 3_000_000_000  # parameters from which the KL grid has 16 points instead of 8


class Runner(Protocol):
    """What the graph is described to."""

    def run(self, stage: Stage, label: str = "", /, *, hints: Arguments | None = None, **arguments: Any) -> ArtifactRef:
        """Returns the artifact of a stage."""
        ...


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a configuration names, found and checked: nothing is computed yet. Texts by their role."""

    config: CompressConfig
    model: ModelSource
    skeleton: PreTrainedModel
    units: list[Unit]
    points: int
    device: str
    precision: str
    texts: dict[str, TextOrigin]
    task_folder: TaskFolder | None

    @property
    def runtime(self) -> Runtime:
        batch = self.config.evaluation.task_batch_size
        return Runtime(device=self.device, micro_batch=self.config.micro_batch, task_batch_size=batch)


@dataclass(frozen=True, kw_only=True)
class Built:
    """The artifacts that a run hands out; ``merges`` has one for each target."""

    reported: ArtifactRef
    merges: list[ArtifactRef]
    grid: ArtifactRef | None


def prepare(config: CompressConfig, *, partly: bool = False) -> Prepared:
    """Returns what ``config`` names. ``partly``: what is not there yet is named in the sources' ``lacks``.

    Errors: ``ValueError`` for whatever of it cannot be had or does not fit together.
    """
    device = resolve_device(config.device)
    digest = _digest(verify=config.verify)
    model = find_model(**config.model.model_dump(), device=device, digest=digest, partly=partly)
    check_positions(model, config.calibration.sequence_length, "calibration.sequence_length")
    check_positions(model, test_length(config), "evaluation.sequence_length")
    skeleton = load_skeleton(model)
    if not type(skeleton).__module__.startswith("transformers."):
        raise ValueError(f"{model.name}: a model whose code travels with it cannot be saved and loaded back compressed")
    points = config.allocation.grid_points or (16 if skeleton.num_parameters() >= LARGE_MODEL else 8)
    units = discover_units(skeleton, **config.discovery.model_dump())
    check_reachable(units, [target.ratio for target in config.targets], config.allocation.method, points)
    named = {
        "calibration": config.calibration.text,
        "allocation": config.allocation.text,
        "validation": config.validation.text,
        "test": config.evaluation.text,
    }
    return Prepared(
        config=config,
        model=model,
        skeleton=skeleton,
        units=units,
        points=points,
        device=device,
        precision=resolve_precision(config.precision, device),
        texts={
            role: find_text(**text.model_dump(), digest=digest, partly=partly)
            for role, text in named.items()
            if text is not None
        },
        task_folder=find_task_folder(config.evaluation.task_folder),
    )


def build(stages: Runner, prepared: Prepared) -> Built:
    """Describes every stage to ``stages``, in an order in which each one's inputs come before it."""
    config, model = prepared.config, prepared.model
    tokens = calibration_tokens(stages, prepared)
    validation = validation_tokens(stages, prepared)
    test = test_tokens(stages, prepared)
    further = _further_evaluation(prepared)
    dense = stages.run(evaluate, "dense", model=model, tokens=test, **further)

    grams = stages.run(
        gather,
        model=model,
        tokens=tokens,
        precision=prepared.precision,
        hints={"checkpoint_sequences": config.calibration.checkpoint_sequences},
        **config.discovery.model_dump(mode="json"),
    )
    ordered = stages.run(bases, model=model, grams=grams, init=config.init)
    subset = allocation_tokens(stages, prepared)
    grid = None
    if config.allocation.method == "measured_kl":
        grid = stages.run(measure, model=model, bases=ordered, tokens=subset, points=prepared.points)

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
        projectors = train_target(stages, prepared, target, ordered, chosen, tokens, validation)
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
        prompt=config.evaluation.prompt,
        targets=[target.model_dump(mode="json", include={"ratio", "objective"}) for target in config.targets],
        bases=ordered,
        grid=grid,
        dense=dense,
        **made,
    )
    return Built(reported=reported, merges=made["merges"], grid=grid)


def calibration_tokens(stages: Runner, prepared: Prepared) -> ArtifactRef:
    """Returns the sequences that Grams are gathered on and projectors are trained on."""
    count = prepared.config.calibration.sequences
    return _draw(
        stages, prepared, "training", "calibration", _calibration_part(prepared), take=count, pool=POOL * count
    )


def validation_tokens(stages: Runner, prepared: Prepared) -> ArtifactRef:
    """Returns held-out sequences, of the calibration text where no other is given."""
    count = prepared.config.validation.sequences
    role, part = ("validation", "all") if "validation" in prepared.texts else ("calibration", "validation")
    return _draw(stages, prepared, "validation", role, part, take=count, pool=POOL * count)


def allocation_tokens(stages: Runner, prepared: Prepared) -> ArtifactRef:
    """Returns the sequences that the KL grid is measured on: some of the calibration set, or of a text of their own."""
    count = prepared.config.allocation.sequences
    if "allocation" in prepared.texts:
        return _draw(stages, prepared, "allocation", "allocation", "all", take=count, pool=POOL * count)
    pool = POOL * prepared.config.calibration.sequences
    return _draw(stages, prepared, "allocation", "calibration", _calibration_part(prepared), take=count, pool=pool)


def test_tokens(stages: Runner, prepared: Prepared) -> ArtifactRef:
    """Returns the windows of the test text."""
    return stages.run(
        calibrate_test,
        "test",
        text=prepared.texts["test"],
        tokenizer=prepared.model.tokenizer,
        length=test_length(prepared.config),
        max_tokens=prepared.config.evaluation.max_tokens,
        bos=prepared.config.evaluation.bos,
    )


def test_length(config: CompressConfig) -> int:
    """Returns the tokens of a test window."""
    return config.evaluation.sequence_length or config.calibration.sequence_length


def train_target(
    stages: Runner,
    prepared: Prepared,
    target: Target,
    ordered: ArtifactRef,
    allocation: ArtifactRef,
    tokens: ArtifactRef,
    validation: ArtifactRef,
) -> ArtifactRef:
    """Returns the trained projectors of one target."""
    config, model = prepared.config, prepared.model
    width = prepared.skeleton.config.get_text_config().hidden_size
    size = teacher_bytes(model, config.calibration.sequences, config.calibration.sequence_length, width)
    dense_outputs = None
    if target.objective == "kl" and size <= config.teacher_cache_gib * 2**30:
        pace = {"checkpoint_sequences": config.calibration.checkpoint_sequences}
        dense_outputs = stages.run(teacher, "teacher", hints=pace, model=model, tokens=tokens)
    unkeyed = {"checkpoint_steps", "checkpoint_minutes"}
    settings = config.training.model_dump(mode="json", exclude=unkeyed)
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
        hints={"dense_outputs": dense_outputs, **config.training.model_dump(include=unkeyed)},
        **settings,
    )


def _draw(
    stages: Runner, prepared: Prepared, label: str, role: str, part: Part, *, take: int, pool: int
) -> ArtifactRef:
    return stages.run(
        calibrate,
        label,
        text=prepared.texts[role],
        tokenizer=prepared.model.tokenizer,
        length=prepared.config.calibration.sequence_length,
        take=take,
        pool=pool,
        part=part,
        seed=prepared.config.calibration.seed,
    )


def _further_evaluation(prepared: Prepared) -> dict[str, Any]:
    """Returns what is evaluated beside the perplexity; what has no effect is not said."""
    chosen = prepared.config.evaluation
    settings: dict[str, Any] = {"prompt": chosen.prompt}
    if chosen.prompt is not None:
        settings["prompt_tokens"] = chosen.prompt_tokens
    if chosen.tasks:
        settings |= {"tasks": list(chosen.tasks), "task_limit": chosen.task_limit, "harness": version("lm_eval")}
        settings["task_folder"] = prepared.task_folder
    return settings


def _calibration_part(prepared: Prepared) -> Part:
    return "all" if "validation" in prepared.texts else "calibration"


def _digest(*, verify: bool) -> Callable[[Path], str]:
    memory = DigestMemory()
    return lambda path: memory.digest(path, verify=verify)
