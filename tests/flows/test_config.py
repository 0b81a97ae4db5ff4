from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from flows.config import CompressConfig, Target, cross_product

MODEL = {"name_or_path": "model"}


def test_the_model_alone_is_enough() -> None:
    config = CompressConfig.model_validate({"model": MODEL})
    assert config.targets == (Target(ratio=0.5, objective="kl"),)
    assert config.evaluation.tasks == ("openbookqa", "arc_easy", "winogrande", "hellaswag", "piqa", "mathqa")


def sections(model: type[BaseModel]) -> list[type[BaseModel]]:
    found = [model]
    for field in model.model_fields.values():
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found += sections(kind)
    return found


@pytest.mark.parametrize("section", sections(CompressConfig), ids=lambda section: section.__name__)
def test_every_field_is_described_and_frozen(section: type[BaseModel]) -> None:
    assert section.model_config["frozen"]
    assert section.model_config["extra"] == "forbid"
    assert not [name for name, field in section.model_fields.items() if not field.description]


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"trainin": {"epochs": 3}}, "trainin"),
        ({"training": {"epoch": 3}}, "training.epoch"),
        ({"targets": [{"ratio": 0.0}]}, "targets.0.ratio"),
        ({"targets": [{"ratio": 1.0}]}, "targets.0.ratio"),
        ({"targets": [{"ratio": float("nan")}]}, "targets.0.ratio"),
        ({"targets": []}, "targets"),
        ({"targets": [{"ratio": 0.5}, {"ratio": 0.5, "objective": "kl"}]}, "targets"),
        ({"targets": [{"ratio": 0.5, "objective": "kd"}]}, "targets.0.objective"),
        ({"calibration": {"text": {"dataset": "a", "path": "b"}}}, "calibration.text"),
        ({"calibration": {"text": {}}}, "calibration.text"),
        ({"calibration": {"sequences": 8}, "allocation": {"sequences": 9}}, ""),
        ({"discovery": {"kv_routing": "input", "tie": False}}, ""),
        ({"training": {"dropout": 1.0}}, "training.dropout"),
    ],
)
def test_a_wrong_value_is_refused_at_its_place(values: dict[str, Any], place: str) -> None:
    with pytest.raises(ValidationError) as caught:
        CompressConfig.model_validate({"model": MODEL} | values)
    assert place in [".".join(map(str, error["loc"])) for error in caught.value.errors()]


def test_cross_product_takes_what_is_not_given_from_the_config() -> None:
    given = (Target(ratio=0.3, objective="kl"), Target(ratio=0.7, objective="kl"))
    both = [(t["ratio"], t["objective"]) for t in cross_product([0.5, 0.6], ["kl", "task"], given)]
    assert both == [(0.5, "kl"), (0.6, "kl"), (0.5, "task"), (0.6, "task")]
    assert [t["ratio"] for t in cross_product([], ["task"], given)] == [0.3, 0.7]
    assert cross_product([0.4], [], None) == [{"ratio": 0.4, "objective": "kl"}]


def test_the_config_survives_json() -> None:
    config = CompressConfig.model_validate({"model": MODEL, "calibration": {"text": {"path": "text.txt"}}})
    assert CompressConfig.model_validate_json(config.model_dump_json()) == config
