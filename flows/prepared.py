"""What a configuration names, found and checked before anything is computed."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedModel

from flows.amounts import resolve_ratios
from flows.config import CompressConfig
from flows.fitting import check_decode, check_labels, check_launch, check_objectives, check_padding
from flows.sources import ImageSource, TextSource
from lsp_core.discovery import Group, discover_units
from lsp_core.units import Unit
from storage.manifest import ArtifactRef
from storage.remembered import DigestMemory
from tasks.caching import Arguments, Runtime, Stage
from tasks.images import ImageOrigin, find_images
from tasks.models import ModelSource, check_positions, find_model, load_skeleton, resolve_device, resolve_precision
from tasks.text import TextOrigin, find_text
from tasks.zero_shot import TaskFolder, find_task_folder

LARGE_MODEL = 3_000_000_000  # parameters from which the KL grid has 16 points instead of 8


class Runner(Protocol):
    """What the graph is described to."""

    def run(self, stage: Stage, label: str = "", /, *, hints: Arguments | None = None, **arguments: Any) -> ArtifactRef:
        """Returns the artifact of a stage."""
        ...


@dataclass(frozen=True)
class Labelled:
    """A runner under which every label ends with what the stages are part of."""

    stages: Runner
    ending: str

    def run(self, stage: Stage, label: str = "", /, *, hints: Arguments | None = None, **arguments: Any) -> ArtifactRef:
        return self.stages.run(stage, f"{label} {self.ending}".strip(), hints=hints, **arguments)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a configuration names, found and checked: nothing is computed yet.

    ``texts``, and ``images``, which are pools, by their role; ``transfer``: the names of the sets for linear probes;
    ``ratios`` of the targets by their amount, but of those that are bound by a divergence.
    """

    config: CompressConfig
    model: ModelSource
    skeleton: PreTrainedModel
    units: list[Unit]
    points: int
    ratios: dict[str, float]
    device: str
    precision: str
    texts: dict[str, TextOrigin]
    images: dict[str, list[ImageOrigin]]
    transfer: tuple[str, ...]
    task_folder: TaskFolder | None

    @property
    def roles(self) -> Collection[str]:
        """What there is data of its own for."""
        return self.texts.keys() | self.images.keys()

    @property
    def runtime(self) -> Runtime:
        config = self.config
        return Runtime(
            device=self.device,
            micro_batch=config.micro_batch,
            task_batch_size=config.evaluation.task_batch_size,
            offload=config.offload,
            launch=config.training.launch,
        )


def prepare(config: CompressConfig, *, partly: bool = False, targets: bool = True) -> Prepared:
    """Returns what ``config`` names.

    ``partly``: what is not there yet is named in the sources' ``lacks``; ``targets``: False leaves them aside.

    Errors: ``ValueError`` for whatever of it cannot be had or does not fit together.
    """
    device = resolve_device(config.device)
    check_launch(config, device)
    digest = _digest(verify=config.verify)
    model = find_model(**config.model.model_dump(), device=device, digest=digest, partly=partly)
    skeleton = load_skeleton(model)
    if model.processor is None:
        check_positions(model, skeleton, config.calibration.sequence_length, "calibration.sequence_length")
        check_positions(model, skeleton, config.test_length, "evaluation.sequence_length")
    if not type(skeleton).__module__.startswith("transformers."):
        raise ValueError(f"{model.name}: a model whose code travels with it cannot be saved and loaded back compressed")
    points = config.allocation.grid_points or (16 if skeleton.num_parameters() >= LARGE_MODEL else 8)
    units = _discover(skeleton, config)
    aimed = config if targets else config.model_copy(update={"targets": ()})
    ratios = resolve_ratios(aimed, units, points, skeleton, model.torch_dtype)
    texts, pools = _data(config, model)
    find = partial(find_images, digest=digest, partly=partly)
    images = {role: [find(**one.model_dump()) for one in pool] for role, pool in pools.items() if pool}
    if model.task == "encoder" and model.tokenizer is not None and model.tokenizer.lacks is None:
        check_padding(skeleton, model.tokenizer)
    if model.task == "image-classification":
        check_labels("evaluation.images", images["test"], skeleton)
    for name in config.evaluation.transfer:
        for purpose in ("train", "test"):
            check_labels(f"evaluation.transfer.{name}.{purpose}", images[transferred(name, purpose)])
    if targets:
        check_objectives(config, model, skeleton, images)
        check_decode(config, model, skeleton)
    return Prepared(
        config=config,
        model=model,
        skeleton=skeleton,
        units=units,
        points=points,
        ratios=ratios,
        device=device,
        precision=resolve_precision(config.precision, device),
        texts={
            role: find_text(**text.model_dump(), digest=digest, partly=partly)
            for role, text in texts.items()
            if text is not None
        },
        images=images,
        transfer=tuple(config.evaluation.transfer if images else config.evaluation.text_transfer),
        task_folder=find_task_folder(config.evaluation.task_folder),
    )


def with_config(prepared: Prepared, config: CompressConfig) -> Prepared:
    """Returns ``prepared`` for a config that names the same model and texts and chooses otherwise.

    Errors: ``ValueError`` for a ratio that its allocation does not reach, layers that it cannot group, or an objective
    that there is no task for.
    """
    check_objectives(config, prepared.model, prepared.skeleton, prepared.images)
    units = prepared.units
    if config.discovery != prepared.config.discovery:
        units = _discover(prepared.skeleton, config)
    ratios = resolve_ratios(config, units, prepared.points, prepared.skeleton, prepared.model.torch_dtype)
    return replace(prepared, config=config, units=units, ratios=ratios)


def with_seed(prepared: Prepared, seed: int) -> Prepared:
    """Returns ``prepared`` with ``seed`` for the calibration draw, random bases and training."""
    config = prepared.config
    calibration = config.calibration.model_copy(update={"seed": seed})
    training = config.training.model_copy(update={"seed": seed})
    update = {"calibration": calibration, "training": training, "init_seed": seed, "seeds": ()}
    return replace(prepared, config=config.model_copy(update=update))


def _discover(skeleton: PreTrainedModel, config: CompressConfig) -> list[Unit]:
    chosen = config.discovery.model_dump()
    groups = [Group(**group) for group in chosen.pop("groups")]
    return discover_units(skeleton, **chosen, groups=groups)


def _data(
    config: CompressConfig, model: ModelSource
) -> tuple[dict[str, TextSource | None], dict[str, tuple[ImageSource, ...]]]:
    """Returns the texts that a model reads, by their role, or the pools of images.

    Errors: ``ValueError`` where the config names data of the other kind, or lacks what the model needs.
    """
    calibration, validation, evaluation = config.calibration, config.validation, config.evaluation
    if evaluation.prompt is not None and not model.gives_text:
        raise ValueError(f"evaluation.prompt: {model.name} continues no text: drop it")
    if model.processor is None:
        given = {"calibration.images": calibration.images, "validation.images": validation.images}
        given |= {"evaluation.images": evaluation.images, "evaluation.transfer": evaluation.transfer}
        given["allocation.images"] = config.allocation.images
        _refuse(given, f"{model.name} reads text: it is for models that read images, drop it")
        if evaluation.text_transfer and model.gives_text:
            raise ValueError("evaluation.text_transfer is for encoders: a language model is judged by its perplexity")
        texts: dict[str, TextSource | None] = {mixed(index): part.text for index, part in enumerate(calibration.mix)}
        texts = texts or {"calibration": calibration.text}
        for name, sets in evaluation.text_transfer.items():
            texts |= {transferred(name, "train"): sets.train, transferred(name, "test"): sets.test}
        own = {"allocation": config.allocation.text, "validation": validation.text, "test": evaluation.text}
        return texts | own, {}
    given = {"calibration.mix": calibration.mix, "validation.text": validation.text}
    given |= {"allocation.text": config.allocation.text, "evaluation.text_transfer": evaluation.text_transfer}
    _refuse(given, f"{model.name} reads images: it is for models that read text, drop it")
    if not calibration.images or evaluation.images is None:
        missing = "evaluation.images" if calibration.images else "calibration.images"
        raise ValueError(f"{missing}: {model.name} reads images, name some")
    pools = {"calibration": calibration.images, "validation": validation.images, "test": (evaluation.images,)}
    pools["allocation"] = config.allocation.images
    for name, pair in evaluation.transfer.items():
        pools |= {transferred(name, "train"): (pair.train,), transferred(name, "test"): (pair.test,)}
    return {}, pools


def _refuse(given: dict[str, Any], remedy: str) -> None:
    """Errors: ``ValueError`` naming the first setting that is given."""
    for name, value in given.items():
        if value:
            raise ValueError(f"{name}: {remedy}")


def transferred(name: str, purpose: str) -> str:
    """Returns the role of one of the two sets of a linear probe, ``purpose`` being train or test."""
    return f"transfer.{name}.{purpose}"


def mixed(index: int) -> str:
    """Returns the role of one text of the calibration's mix."""
    return f"calibration.{index}"


def _digest(*, verify: bool) -> Callable[[Path], str]:
    memory = DigestMemory()
    return lambda path: memory.digest(path, verify=verify)
