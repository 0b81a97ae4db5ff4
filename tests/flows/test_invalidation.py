"""Which stages each field of the configuration invalidates: a field without a decision here fails."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from flows.compress import compress
from flows.config import CompressConfig
from flows.plan import plan

pytestmark = pytest.mark.usefixtures("prefect_server")
Make = Callable[..., CompressConfig]

DRAWN = {"calibrate training", "calibrate validation", "calibrate allocation"}
READ_WEIGHTS = {"evaluate dense", "gather", "train teacher"}  # the first stages that read the model
PROMPTED = {"evaluate dense", "evaluate 0.3 untrained", "evaluate 0.3-kl"}
NOTHING: set[str] = set()
REFUSED = None  # it does not go with a local folder of plain text

# By field: another value, and the stages whose key it changes; what lies right of those is unknown until they ran.
DECISIONS: dict[str, tuple[Any, set[str] | None]] = {
    "model.name_or_path": ("COPY", NOTHING),
    "model.revision": ("main", REFUSED),
    "model.dtype": ("float64", READ_WEIGHTS),
    "model.task": ("causal-lm", NOTHING),  # as it was found to be
    "model.trust_remote_code": (True, NOTHING),  # there is no code beside this model
    "targets.ratio": (0.4, {"allocate 0.4", "allocate 0.4 uniform"}),
    "targets.fit_gib": (1e-4, {"allocate fit0.0001GiB", "allocate fit0.0001GiB uniform"}),
    "targets.max_kl": (0.05, {"allocate kl0.05"}),
    "targets.objective": ("task", {"train 0.3-task"}),
    "targets.epochs": (1, {"train 0.3-kl"}),
    "seeds": ([1], DRAWN),
    "calibration.text.dataset": ("some/text", REFUSED),
    "calibration.text.config": ("other", NOTHING),
    "calibration.text.split": ("other", NOTHING),
    "calibration.text.revision": ("other", NOTHING),
    "calibration.text.path": ("OTHER TEXT", DRAWN),
    "calibration.text.field": ("other", NOTHING),  # plain text has no fields
    "calibration.text.format": ("chat", REFUSED),
    "calibration.text.separator": ("\n", DRAWN),
    "calibration.mix.text.dataset": ("some/text", REFUSED),
    "calibration.mix.text.config": ("other", NOTHING),
    "calibration.mix.text.split": ("other", NOTHING),
    "calibration.mix.text.revision": ("other", NOTHING),
    "calibration.mix.text.path": ("OTHER TEXT", DRAWN),
    "calibration.mix.text.field": ("other", NOTHING),
    "calibration.mix.text.format": ("chat", REFUSED),
    "calibration.mix.text.separator": ("\n", DRAWN),
    "calibration.mix.weight": (3.0, DRAWN),
    "calibration.mix.cap": (3, DRAWN),
    "calibration.sequences": (20, {"calibrate training", "calibrate allocation"}),
    "calibration.sequence_length": (24, DRAWN | {"calibrate test"}),
    "calibration.gram_sequences": (8, {"gather"}),
    "calibration.seed": (1, DRAWN),
    "calibration.checkpoint_sequences": (1, NOTHING),
    "discovery.kv_routing": ("untied", {"gather"}),
    "discovery.tie": (False, {"gather"}),
    "discovery.include": (["*down_proj", "*o_proj"], {"gather"}),
    "discovery.exclude": (["*down_proj"], {"gather"}),
    "discovery.groups.members": (["*q_proj", "*k_proj"], {"gather"}),
    "discovery.groups.side": ("output", {"gather"}),
    "precision": ("float32", {"gather"}),
    "init": ("plain", {"bases"}),
    "init_seed": (1, NOTHING),  # there is nothing random in it
    # its allocation is the uniform one, which is there already
    "allocation.method": ("uniform_parameters", {"evaluate 0.3 untrained", "train 0.3-kl"}),
    "allocation.sequences": (5, {"calibrate allocation"}),
    "allocation.text.dataset": ("some/text", REFUSED),
    "allocation.text.config": ("other", {"calibrate allocation"}),  # given, it is another text for all we know
    "allocation.text.split": ("other", {"calibrate allocation"}),
    "allocation.text.revision": ("other", {"calibrate allocation"}),
    "allocation.text.path": ("OTHER TEXT", {"calibrate allocation"}),
    "allocation.text.field": ("other", {"calibrate allocation"}),
    "allocation.text.format": ("chat", REFUSED),
    "allocation.text.separator": ("\n", {"calibrate allocation"}),
    "allocation.grid_points": (5, {"measure"}),
    "allocation.min_rank": ({"*o_proj": 20}, {"allocate 0.3", "allocate 0.3 uniform"}),
    "allocation.keep_dense": (["*o_proj"], {"allocate 0.3", "allocate 0.3 uniform"}),
    "validation.text.dataset": ("some/text", REFUSED),
    "validation.text.config": ("other", DRAWN),  # a validation text of its own frees what was held out
    "validation.text.split": ("other", DRAWN),
    "validation.text.revision": ("other", DRAWN),
    "validation.text.path": ("OTHER TEXT", DRAWN),
    "validation.text.field": ("other", DRAWN),
    "validation.text.format": ("chat", REFUSED),
    "validation.text.separator": ("\n", DRAWN),
    "validation.sequences": (5, {"calibrate validation"}),
    "evaluation.text.dataset": ("some/text", REFUSED),
    "evaluation.text.config": ("other", NOTHING),
    "evaluation.text.split": ("other", NOTHING),
    "evaluation.text.revision": ("other", NOTHING),
    "evaluation.text.path": ("OTHER TEXT", {"calibrate test"}),
    "evaluation.text.field": ("other", NOTHING),
    "evaluation.text.format": ("chat", REFUSED),
    "evaluation.text.separator": ("\n", {"calibrate test"}),
    "evaluation.max_tokens": (600, {"calibrate test"}),
    "evaluation.sequence_length": (24, {"calibrate test"}),
    "evaluation.bos": ("every_window", {"calibrate test"}),
    "evaluation.prompt": ("beta", PROMPTED),
    "evaluation.prompt_tokens": (5, PROMPTED),
    "evaluation.tasks": (["some_task"], PROMPTED),
    "evaluation.task_folder": ("FOLDER", NOTHING),  # there are no tasks
    "evaluation.task_limit": (3, NOTHING),
    "evaluation.task_batch_size": (3, NOTHING),
    "evaluation.device_gib": (80.0, {"report"}),
    "evaluation.decode.contexts": ([8], {"decode 0.3-kl"}),
    "evaluation.decode.batch": (2, NOTHING),  # no context is timed
    "evaluation.decode.tuned": (True, NOTHING),
    "training.epochs": (3, {"train 0.3-kl"}),
    "training.epoch_sequences": (8, {"train 0.3-kl"}),
    "training.batch_sequences": (4, {"train 0.3-kl"}),
    "training.learning_rate": (2e-3, {"train 0.3-kl"}),
    "training.warmup_fraction": (0.1, {"train 0.3-kl"}),
    "training.dropout": (0.1, {"train 0.3-kl"}),
    "training.orthogonality": (0.1, {"train 0.3-kl"}),
    "training.modulation_epochs": (0.5, {"train 0.3-kl"}),
    "training.patience": (1, {"train 0.3-kl"}),
    "training.checkpoint_steps": (1, NOTHING),
    "training.checkpoint_minutes": (1.0, NOTHING),
    "training.num_processes": (2, NOTHING),
    "training.num_nodes": (2, NOTHING),
    "training.rendezvous_endpoint": ("localhost:29400", NOTHING),
    "training.sharding": ("sharded", NOTHING),
    "training.max_restarts": (1, NOTHING),
    "training.seed": (1, {"train 0.3-kl"}),
    "ablate.init": (["plain", "whitened"], NOTHING),
    "ablate.tie": ([True, False], NOTHING),
    "ablate.allocation": (["measured_kl", "uniform_rank"], NOTHING),
    "ablate.kv_routing": (["auto", "untied"], NOTHING),
    "ablate.objective": (["kl", "task"], NOTHING),
    "ablate.ratio": ([0.3, 0.4], NOTHING),
    "merge_tolerance": (1e-6, {"merge 0.3-kl"}),
    "store": ("COPY", NOTHING),
    "verify": (True, NOTHING),
    "output": ("FOLDER", NOTHING),
    "device": ("cpu", NOTHING),
    "micro_batch": (3, NOTHING),
    "teacher_cache_gib": (0.0, NOTHING),
    "workers.runner": ("dask", NOTHING),
    "workers.count": (2, NOTHING),
    "workers.address": ("tcp://localhost:8786", NOTHING),
    "offload": (True, NOTHING),
    "stage_timeout_minutes": (5.0, NOTHING),
}


# What is for models that read images, and for encoders, is refused as a whole.
OTHERS = (
    "calibration.images.",
    "allocation.images.",
    "validation.images.",
    "evaluation.images.",
    "evaluation.transfer.",
    "evaluation.text_transfer.",
)
NEEDED = {  # beside a field
    "num_nodes": {"rendezvous_endpoint": "localhost:29400"},
    "runner": {"count": 2},
    "address": {"runner": "dask", "count": 2},
}
BEGUN = {"groups": [{"members": ["*q_proj", "*k_proj", "*v_proj"], "side": "input"}]}  # what an empty section starts as


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yields the path of every value that a configuration holds."""
    for name, field in model.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]  # of a list or a mapping, what it holds
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if section is None:
            yield prefix + name
        else:
            yield from fields(section, f"{prefix}{name}.")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_config: Make) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    compress(tiny_config(folder))
    compress(tiny_config(folder, calibration=mixed(tiny_config, folder)))
    return folder


def mixed(tiny_config: Make, folder: Path) -> dict[str, Any]:
    """Returns the calibration of the tiny configuration, on its two texts in equal shares."""
    base = tiny_config(folder)
    texts = [{"text": text.model_dump()} for text in (base.calibration.text, base.evaluation.text)]
    return {"mix": texts} | base.calibration.model_dump(include={"sequences", "sequence_length"})


def test_every_field_has_a_decision() -> None:
    assert sorted(DECISIONS) == sorted(name for name in fields(CompressConfig) if not name.startswith(OTHERS))


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("calibration", "images", [{"path": "."}]),
        ("allocation", "images", [{"path": "."}]),
        ("validation", "images", [{"path": "."}]),
        ("evaluation", "images", {"path": "."}),
        ("evaluation", "transfer", {"name": {"train": {"path": "."}, "test": {"path": "."}}}),
        ("evaluation", "text_transfer", {"name": {"train": {"path": "."}, "test": {"path": "."}}}),
    ],
)
def test_what_is_for_other_models_is_refused(
    section: str, field: str, value: Any, finished: Path, tiny_config: Make
) -> None:
    config = tiny_config(finished).model_dump(mode="json")
    config[section][field] = value
    with pytest.raises(ValueError, match=r"reads text|is for encoders"):
        plan(CompressConfig.model_validate(config))


@pytest.mark.parametrize("name", DECISIONS)
def test_a_field_invalidates_what_it_can_change(
    name: str, finished: Path, tiny_config: Make, tiny_text: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    value, expected = DECISIONS[name]
    changes = {"calibration": mixed(tiny_config, finished)} if name.startswith("calibration.mix.") else {}
    base = tiny_config(finished, **changes).model_dump(mode="json")
    base["targets"][0]["objective"] = "kl"
    config = changed(base, name, real(name, value, finished, tiny_text, tiny_model, tmp_path))
    if expected is REFUSED:
        with pytest.raises(ValueError, match=r"belongs to a hub id|either dataset|chat is read from"):
            plan(CompressConfig.model_validate(config))
        return
    steps = plan(CompressConfig.model_validate(config))["stages"]
    missed = {step["label"] for step in steps if step["state"] == "miss"}
    assert missed == expected
    for step in steps:
        if step["state"] == "unknown":
            assert set(step["reason"].removeprefix("unknown until ").split(", ")) <= missed


def real(name: str, value: Any, finished: Path, tiny_text: dict[str, Path], tiny_model: Path, tmp_path: Path) -> Any:
    """Returns the value proper for the names in capitals."""
    if value == "COPY":
        source = finished / "store" if name == "store" else tiny_model
        return str(shutil.copytree(source, tmp_path / "copy"))
    if value == "FOLDER":
        return str(tmp_path)
    if value == "OTHER TEXT":
        other = tmp_path / "other.txt"
        other.write_text(tiny_text["train"].read_text().replace("alpha", "omega"))
        return str(other)
    return value


def changed(config: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Returns ``config`` with one value set; a section that it leaves out starts as the calibration text."""
    place: Any = config
    *parents, last = name.split(".")
    for parent in parents:
        if place[parent] is None:
            place[parent] = dict(config["calibration"]["text"])
        elif place[parent] == []:
            place[parent] = BEGUN[parent]
        place = place[parent][0] if isinstance(place[parent], list) else place[parent]
    place[last] = value
    if last in ("fit_gib", "max_kl"):  # instead of a ratio
        place["ratio"] = None
    if last in NEEDED:
        place |= NEEDED[last]
    return config
