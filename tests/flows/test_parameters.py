"""The parameters of the flows that are deployed render as a typed form: descriptions, ranges, enums, defaults."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from prefect import Flow

from flows.compress import compress
from flows.config import CompressConfig
from flows.deployed_benchmark import BenchmarkConfig, benchmark_flow
from flows.deployed_evaluate import evaluate_flow
from flows.evaluate_config import EvaluateConfig

PREFECT_LIMIT = 512 * 1024  # bytes of a deployment's parameters
LEAST: dict[str, dict[str, Any]] = {  # what has no default
    "compress": {"model": {"name_or_path": "facebook/opt-125m"}},
    "evaluate": {"model": {"name_or_path": "facebook/opt-125m"}},
    "benchmark": {"benchmark": "store"},
}
MODELS = {"compress": CompressConfig, "evaluate": EvaluateConfig, "benchmark": BenchmarkConfig}
NAMES = {"ImageSource.classes"}  # numbers that name something
FLOWS = pytest.mark.parametrize("flow", [compress, evaluate_flow, benchmark_flow], ids=lambda flow: str(flow.name))


def fields(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every field of a flow's parameters with its place."""
    for owner, one in (("parameters", schema), *schema["definitions"].items()):
        for name, field in one.get("properties", {}).items():
            yield f"{owner}.{name}", field


def leaves(field: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the schemas of the values that a field takes, those of lists' items among them."""
    for one in field.get("anyOf", [field]):
        yield one
        if one.get("type") == "array":
            yield from leaves(one["items"])
        if isinstance(one.get("additionalProperties"), dict):
            yield from leaves(one["additionalProperties"])


@FLOWS
def test_every_field_says_what_it_is_and_what_it_takes(flow: Flow[Any, Any]) -> None:
    schema = flow.parameters.model_dump()
    definitions = schema["definitions"]
    for place, field in fields(schema):
        named = definitions.get(field.get("$ref", "").rpartition("/")[2], {})
        assert field.get("description") or named.get("description"), place
        for leaf in leaves(field):
            assert {"type", "$ref", "enum", "const"} & leaf.keys(), place  # no field that takes anything
            if leaf.get("type") in ("integer", "number") and place not in NAMES:
                assert {"minimum", "exclusiveMinimum"} & leaf.keys(), place


@FLOWS
def test_choices_are_lists_to_choose_from(flow: Flow[Any, Any]) -> None:
    enums = {place for place, field in fields(flow.parameters.model_dump()) for leaf in leaves(field) if "enum" in leaf}
    expected = {
        "compress": {
            "Target.objective",
            "CompressConfig.init",
            "CompressConfig.precision",
            "AllocationConfig.method",
            "DiscoveryConfig.kv_routing",
            "ModelConfig.dtype",
            "ModelConfig.task",
            "TrainingConfig.sharding",
            "WorkersConfig.runner",
        },
        "evaluate": {"ModelConfig.dtype", "ModelConfig.task", "TextEvaluationConfig.bos", "TextSource.format"},
        "benchmark": {"BenchmarkConfig.benchmark", "DecodeBenchmarkConfig.dtype", "DecodeBenchmarkConfig.arms"},
    }
    assert enums >= expected[flow.name]


@FLOWS
def test_the_form_s_defaults_are_valid_and_small(flow: Flow[Any, Any]) -> None:
    model, least = MODELS[flow.name], LEAST[flow.name]
    filled = model.model_validate(least).model_dump(mode="json")
    assert len(json.dumps(filled)) < PREFECT_LIMIT / 10
    assert len(json.dumps(flow.parameters.model_dump())) < PREFECT_LIMIT / 10
    assert model.model_validate(filled) == model.model_validate(least)
    assert flow.validate_parameters({"config": filled}) == {"config": model.model_validate(least)}
    schema = flow.parameters.model_dump()
    root = schema["definitions"][model.__name__]
    for name, field in root["properties"].items():
        if "default" in field:  # what the UI fills in
            assert model.model_validate(least | {name: field["default"]}) == model.model_validate(least), name


@FLOWS
def test_wrong_parameters_are_refused_by_name(flow: Flow[Any, Any]) -> None:
    with pytest.raises(Exception, match=r"config\.no_such_setting"):
        flow.validate_parameters({"config": {**LEAST[flow.name], "no_such_setting": 1}})
    assert flow.description
    assert flow.version
