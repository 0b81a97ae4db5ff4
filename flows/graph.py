"""The graph of stages: calibrate -> gather -> bases -> measure -> allocate -> train -> merge -> evaluate -> report.

Everything left of ``allocate`` is the same whatever the number of ratios and objectives. ``build`` describes the graph
to whoever runs it or plans it, so the two cannot disagree; its parts are there for other graphs of the same stages.
"""

from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from flows.allocating import allocate_target, allocate_uniform, measure_grid
from flows.config import Target
from flows.evaluating import text_settings
from flows.prepared import Labelled, Prepared, Runner, with_seed
from flows.sets import Sets, Test, draw, test_examples
from lsp_core.shapes import positions_of
from storage.manifest import ArtifactRef
from tasks.bases import bases
from tasks.caching import Launch
from tasks.decode import decode
from tasks.evaluate import evaluate
from tasks.gather import gather
from tasks.merge import merge
from tasks.rates import device_name
from tasks.report import report
from tasks.select import select
from tasks.train import teacher, teacher_bytes, train


@dataclass(frozen=True, kw_only=True)
class Initial:
    """What is the same for every ratio and objective; ``grid`` is None where the allocation needs none."""

    grams: ArtifactRef
    bases: ArtifactRef
    grid: ArtifactRef | None


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """The artifacts of one target; ``decode`` is None where speed is not asked for, or not yet."""

    allocation: ArtifactRef
    untrained: ArtifactRef
    training: ArtifactRef
    merge: ArtifactRef
    trained: ArtifactRef
    decode: ArtifactRef | None = None


@dataclass(frozen=True, kw_only=True)
class Built:
    """The artifacts that one seed's run hands out; ``merges`` has one for each target, all trained on ``training``."""

    seed: int | None
    training: ArtifactRef
    reported: ArtifactRef
    merges: list[ArtifactRef]
    grid: ArtifactRef | None


def build(stages: Runner, prepared: Prepared) -> list[Built]:
    """Describes every stage to ``stages``, in an order in which each one's inputs come before it.

    Returns what each of the config's seeds hands out; one of None where it lists no seeds.
    """
    variants = seed_variants(stages, prepared)
    test = test_examples(stages, prepared)
    sets = [draw(labelled, variant, test) for _, labelled, variant in variants]
    dense = evaluate_dense(stages, prepared, test)
    return [
        _build_one(seed, labelled, variant, drawn.compared_with(dense), dense)
        for (seed, labelled, variant), drawn in zip(variants, sets, strict=True)
    ]


def seed_variants(stages: Runner, prepared: Prepared) -> list[tuple[int | None, Runner, Prepared]]:
    """Returns each seed of the config with what its stages are described to, and from what."""
    seeds = prepared.config.seeds
    if not seeds:
        return [(None, stages, prepared)]
    return [
        (seed, Labelled(stages, f"seed {seed}") if len(seeds) > 1 else stages, with_seed(prepared, seed))
        for seed in seeds
    ]


def evaluate_dense(stages: Runner, prepared: Prepared, test: Test) -> ArtifactRef:
    """Returns the evaluation of the model as it is."""
    return stages.run(evaluate, "dense", model=prepared.model, **_tested(prepared, test))


def initialize(stages: Runner, prepared: Prepared, sets: Sets) -> Initial:
    """Returns the ordered bases, and the KL grid where ranks are allocated by it."""
    config, model = prepared.config, prepared.model
    grams = stages.run(
        gather,
        model=model,
        tokens=sets.training,
        precision=prepared.precision,
        hints={"checkpoint_sequences": config.calibration.checkpoint_sequences},
        **({} if config.calibration.gram_sequences is None else {"sequences": config.calibration.gram_sequences}),
        **config.discovery.arguments,
    )
    seed = {"seed": config.init_seed} if config.init == "random" else {}
    ordered = stages.run(bases, model=model, grams=grams, init=config.init, **seed)
    return Initial(grams=grams, bases=ordered, grid=measure_grid(stages, prepared, sets, ordered))


def compress_target(stages: Runner, prepared: Prepared, sets: Sets, initial: Initial, target: Target) -> Compressed:
    """Returns one target's ranks, its trained and merged model, and the evaluations before and after training."""
    config, model = prepared.config, prepared.model
    tested = _tested(prepared, sets.test)
    chosen = allocate_target(stages, prepared, sets, initial.bases, initial.grid, target)
    untrained = stages.run(
        evaluate,
        f"{target.amount} untrained",
        model=model,
        bases=initial.bases,
        allocation=chosen,
        kl_tokens=sets.allocation,
        **tested,
    )
    training = train_target(stages, prepared, sets, initial.bases, chosen, target)
    merged = stages.run(
        merge, target.name, model=model, bases=initial.bases, projectors=training, tolerance=config.merge_tolerance
    )
    trained = stages.run(evaluate, target.name, model=model, checkpoint=merged, **tested)
    return Compressed(allocation=chosen, untrained=untrained, training=training, merge=merged, trained=trained)


def train_target(
    stages: Runner, prepared: Prepared, sets: Sets, ordered: ArtifactRef, allocation: ArtifactRef, target: Target
) -> ArtifactRef:
    """Returns the trained projectors of one target, of several learning rates the best by validation."""
    config, model = prepared.config, prepared.model
    width = prepared.skeleton.config.get_text_config().hidden_size
    length = config.calibration.sequence_length if model.processor is None else positions_of(prepared.skeleton)
    size = teacher_bytes(model, config.calibration.sequences, length, width)
    dense_outputs = None
    if target.objective == "kl" and size <= config.teacher_cache_gib * 2**30:
        pace = {"checkpoint_sequences": config.calibration.checkpoint_sequences}
        dense_outputs = stages.run(teacher, "teacher", hints=pace, model=model, tokens=sets.training)
    unkeyed = {"checkpoint_steps", "checkpoint_minutes"}
    settings = config.training.model_dump(mode="json", exclude={*unkeyed, *Launch.model_fields, "learning_rate"})
    settings["epochs"] = target.epochs or config.training.epochs
    if settings["epoch_sequences"] is None:
        del settings["epoch_sequences"]
    rates = config.training.rates
    if len(rates) > 1:
        settings["keep_diverged"] = True
    trainings = [
        stages.run(
            train,
            target.name if len(rates) == 1 else f"{target.name} rate {rate:g}",
            model=model,
            bases=ordered,
            allocation=allocation,
            tokens=sets.training,
            validation=sets.validation,
            objective=target.objective,
            learning_rate=rate,
            hints={"dense_outputs": dense_outputs, **config.training.model_dump(include=unkeyed)},
            **settings,
        )
        for rate in rates
    ]
    return trainings[0] if len(trainings) == 1 else stages.run(select, target.name, trainings=trainings)


def _time_decoding(stages: Runner, prepared: Prepared, merged: ArtifactRef, target: Target) -> ArtifactRef | None:
    chosen = prepared.config.evaluation.decode
    if not chosen.contexts:
        return None
    return stages.run(
        decode,
        target.name,
        checkpoint=merged,
        **chosen.model_dump(mode="json"),
        dtype=str(prepared.model.torch_dtype).removeprefix("torch."),
        machine=device_name(prepared.device),
        torch_version=version("torch"),
    )


def _build_one(seed: int | None, stages: Runner, prepared: Prepared, sets: Sets, dense: ArtifactRef) -> Built:
    targets = prepared.config.targets
    initial = initialize(stages, prepared, sets)
    made, uniform = [], []
    for target in targets:
        compressed = compress_target(stages, prepared, sets, initial, target)
        made.append(replace(compressed, decode=_time_decoding(stages, prepared, compressed.merge, target)))
        uniform.append(_evaluate_uniform(stages, prepared, sets, initial, made[-1].allocation, target))
    reported = stages.run(
        report,
        prompt=prepared.config.evaluation.prompt,
        targets=[_described(prepared, target) for target in targets],
        grams=initial.grams,
        bases=initial.bases,
        grid=initial.grid,
        dense=dense,
        allocations=[compressed.allocation for compressed in made],
        untrained=[compressed.untrained for compressed in made],
        untrained_uniform=uniform,
        trainings=[compressed.training for compressed in made],
        merges=[compressed.merge for compressed in made],
        trained=[compressed.trained for compressed in made],
        **_efficiency(prepared, made),
    )
    merges = [compressed.merge for compressed in made]
    return Built(seed=seed, training=sets.training, reported=reported, merges=merges, grid=initial.grid)


def _evaluate_uniform(
    stages: Runner, prepared: Prepared, sets: Sets, initial: Initial, allocation: ArtifactRef, target: Target
) -> ArtifactRef:
    """Returns the evaluation of the untrained model at uniform ranks, which ``allocation`` is compared with."""
    uniform = allocate_uniform(stages, prepared, initial.bases, allocation, target)
    return stages.run(
        evaluate,
        f"{target.amount} untrained, uniform",
        model=prepared.model,
        bases=initial.bases,
        allocation=uniform,
        **_tested(prepared, replace(sets.test, transfer={}), further=False),
    )


def _efficiency(prepared: Prepared, made: list[Compressed]) -> dict[str, Any]:
    """Returns what the report states a decoder's memory and speed from; of other models nothing."""
    if prepared.model.task != "causal-lm":
        return {}
    timed = [compressed.decode for compressed in made if compressed.decode is not None]
    stated = {"model": prepared.model, "device_gib": prepared.config.evaluation.device_gib}
    return {**stated, "decodes": timed} if timed else stated


def _described(prepared: Prepared, target: Target) -> dict[str, Any]:
    """Returns what the report says a target is; its ratio is None where a divergence bounds it."""
    described = target.model_dump(mode="json", include={"ratio", "fit_gib", "max_kl", "objective"}, exclude_none=True)
    return {**described, "ratio": prepared.ratios.get(target.amount)}


def _tested(prepared: Prepared, test: Test, *, further: bool = True) -> dict[str, Any]:
    """Returns what an evaluation is of, and what it covers beside the main figure; what has no effect is not said."""
    chosen, model = prepared.config.evaluation, prepared.model
    if not model.gives_text:
        settings: dict[str, Any] = {"tokens": test.examples, "labelled": model.task == "image-classification"}
        if test.dense is not None:
            settings["dense"] = test.dense
        if test.transfer:
            settings["transfer"] = [ref for pair in test.transfer.values() for ref in pair]
            settings["transfer_names"] = list(test.transfer)
        return settings
    return {"tokens": test.examples, **text_settings(chosen, model, prepared.task_folder, further=further)}
