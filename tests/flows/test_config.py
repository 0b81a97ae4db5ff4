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
        ({"calibration": {"sequences": 8, "gram_sequences": 8}, "allocation": {"sequences": 2}}, ""),
        ({"training": {"epoch_sequences": 5000}}, ""),
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
        ({"calibration": {"text": {"path": "a"}, "mix": [{"text": {"path": "b"}}]}}, "calibration"),
        ({"calibration": {"mix": [{"text": {"path": "b"}}, {"text": {"path": "b"}, "cap": 2}]}}, "calibration"),
        ({"calibration": {"mix": [{"text": {"path": "b"}, "weight": 0}]}}, "calibration.mix.0.weight"),
        ({"calibration": {"mix": [{"text": {"path": "b"}, "cap": 0}]}}, "calibration.mix.0.cap"),
        ({"calibration": {"mix": [{"weight": 1.0}]}}, "calibration.mix.0.text"),
        ({"calibration": {"mix": [{"text": {"path": "b"}, "cap": 1023}]}}, "calibration"),
        ({"calibration": {"sequences": 8}, "allocation": {"sequences": 9}}, ""),
        ({"discovery": {"kv_routing": "input", "tie": False}}, ""),
        ({"training": {"dropout": 1.0}}, "training.dropout"),
    ],
)
def test_a_wrong_value_is_refused_at_its_place(values: dict[str, Any], place: str) -> None:
    with pytest.raises(ValidationError) as caught:
        CompressConfig.model_validate({"model": MODEL} | values)
    assert place in [".".join(map(str, error["loc"])) for error in caught.value.errors()]


def test_the_caps_of_a_mix_state_what_they_sum_to() -> None:
    parts = [{"text": {"path": "a"}, "cap": 5}, {"text": {"path": "b"}, "cap": 7}]
    with pytest.raises(ValidationError, match="the caps sum to 12, below the 13 sequences: raise a cap or ask for few"):
        CompressConfig.model_validate({"model": MODEL, "calibration": {"mix": parts, "sequences": 13}})


def test_how_chat_is_read_unless_given() -> None:
    def read(**values: Any) -> tuple[str, str]:
        text = CompressConfig.model_validate({"model": MODEL, "calibration": {"text": {"path": "a"} | values}})
        return text.calibration.text.field, text.calibration.text.separator

    assert read() == ("text", "\n\n")
    assert read(format="chat") == ("messages", "")
    assert read(format="chat", field="turns", separator="\n") == ("turns", "\n")
    assert read(format="text", field="turns") == ("turns", "\n\n")


def test_cross_product_takes_what_is_not_given_from_the_config() -> None:
    given = (Target(ratio=0.3, objective="kl"), Target(ratio=0.7, objective="kl"))
    both = [(t["ratio"], t["objective"]) for t in cross_product([0.5, 0.6], ["kl", "task"], given)]
    assert both == [(0.5, "kl"), (0.6, "kl"), (0.5, "task"), (0.6, "task")]
    assert [t["ratio"] for t in cross_product([], ["task"], given)] == [0.3, 0.7]
    assert cross_product([0.4], [], None) == [{"ratio": 0.4, "objective": "kl"}]


def test_the_config_survives_json() -> None:
    mix = [{"text": {"path": "a.jsonl", "format": "chat"}, "weight": 2.5}, {"text": {"path": "b.txt"}, "cap": 500}]
    for calibration in ({"text": {"path": "text.txt"}}, {"text": {"path": "a.jsonl", "format": "chat"}}, {"mix": mix}):
        config = CompressConfig.model_validate({"model": MODEL, "calibration": calibration})
        assert CompressConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ({"ratio": 0.7}, "0.7-kl"),
        ({"fit_gib": 1.5}, "fit1.5GiB-kl"),
        ({"max_kl": 0.05, "objective": "task"}, "kl0.05-task"),
    ],
)
def test_a_target_is_named_by_what_it_asks_for(target: dict[str, Any], name: str) -> None:
    assert Target(**target).name == name


@pytest.mark.parametrize("target", [{}, {"ratio": 0.5, "max_kl": 0.1}, {"ratio": 0.5, "fit_gib": 1, "max_kl": 0.1}])
def test_a_target_asks_for_one_thing(target: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="give one of ratio, fit_gib"):
        Target(**target)


def test_sizes_and_divergences_are_crossed_with_objectives() -> None:
    given = (Target(fit_gib=2.0), Target(max_kl=0.1), Target(fit_gib=2.0, objective="task"))
    assert cross_product([], ["task"], given) == [
        {"fit_gib": 2.0, "objective": "task"},
        {"max_kl": 0.1, "objective": "task"},
    ]
    assert cross_product([0.4], [], given)[0] == {"ratio": 0.4, "objective": "kl"}
