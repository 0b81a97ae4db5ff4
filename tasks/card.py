"""The model card of a compressed checkpoint: what it was made from and how, what it costs and gives, how to load it.

A card holds figures that are measured after ``merge``, so it is no part of that artifact and has no stage of its own:
it is written where the flow hands a checkpoint out. It says nothing of time or place: the same artifacts give the same
bytes.
"""

import json
import shutil
import struct
from math import prod
from pathlib import Path
from typing import Any

import torch
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from transformers import AutoConfig, AutoModelForCausalLM

from lsp_core.latent_cache import LatentCache, LatentLayer
from tasks.artifacts import read_json, write_json
from tasks.licence import UNKNOWN, find_licence
from tasks.markdown import code, escaped, linked, markdown_table
from tasks.metrics import metric_of
from tasks.model_files import CARD
from tasks.models import ModelSource
from tasks.report import ACCURACIES, model_label

FACTS = "card.json"
TEMPLATE = "card.md.j2"
PIPELINE_TAGS = {  # by task, and whether the model reads images
    ("causal-lm", False): "text-generation",
    ("seq2seq-lm", False): "text2text-generation",
    ("image-classification", True): "image-classification",
    ("encoder", False): "feature-extraction",
    ("encoder", True): "image-feature-extraction",
}
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # as safetensors and torch say it
LABELS = {"dense": "dense", "untrained_uniform": "NoLSP, uniform ranks", "untrained": "NoLSP"}


def write_card(
    folder: Path,
    *,
    model: ModelSource,
    report: dict[str, Any],
    result: dict[str, Any],
    calibration: dict[str, Any],
    seed: int | None = None,
) -> None:
    """Writes ``card.json`` and ``README.md`` into a checkpoint's ``folder``, and copies the base model's licence.

    ``report``: that of the run, ``result``: the checkpoint's among its results; ``calibration``: what the projectors
    were trained on, with its ``digest``; ``seed`` is None where there is no other.
    """
    licence = find_licence(Path(model.folder))
    facts = {
        "base_model": {
            "name": base_name(model),
            "revision": model.revision,
            "digest": model.digest,
            "license": {**licence.front_matter, "stated_by": licence.source},
        },
        **_described(folder, model, report, result),
        "calibration": calibration,
        "seed": seed,
    }
    for path in licence.files:
        shutil.copyfile(path, folder / path.name)
    write_json(folder / FACTS, facts)
    (folder / CARD).write_text(render(facts), encoding="utf-8")


def base_name(model: ModelSource) -> str:
    """Returns the id of a model of the hub, also of its cache; else a folder's name: its place is nobody's business."""
    folder = Path(model.folder)
    cached = folder.parent.parent.name
    if model.revision is not None:
        return model.name
    if folder.parent.name == "snapshots" and cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/", 1)
    return folder.name


def stored_size(folder: Path) -> dict[str, Any]:
    """Returns the numbers in a checkpoint's safetensors, their bytes and their dtypes, as the files list them."""
    parameters, num_bytes, dtypes = 0, 0, set()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                parameters += prod(tensor["shape"])
                num_bytes += tensor["data_offsets"][1] - tensor["data_offsets"][0]
                dtypes.add(DTYPES.get(tensor["dtype"], tensor["dtype"]))
    return {"parameters": parameters, "bytes": num_bytes, "dtypes": sorted(dtypes)}


def holds_latents(folder: Path) -> bool:
    """Returns whether a ``LatentCache`` of the checkpoint would hold latents, as far as its config tells."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    try:
        cache = LatentCache(model)
    except ValueError:
        return False
    return any(isinstance(layer, LatentLayer) for layer in cache.layers)


def _described(folder: Path, model: ModelSource, report: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Returns what the checkpoint, its report and its own result tell."""
    config, dense = read_json(folder / "config.json"), report["dense"]
    metric = metric_of(dense)
    (auto_class,) = config["auto_map"].keys() - {"AutoConfig"}
    ranks = {unit["name"]: unit["rank"] for unit in config["units"]}
    figures = {"dense": dense[metric.name], "trained": result[metric.name]}
    figures |= {"untrained": result[f"{metric.name}_init"], "untrained_uniform": result[f"{metric.name}_init_uniform"]}
    accuracies = {
        name: {"dense": dense[name], "untrained": result[f"{name}_init"], "trained": result[name]}
        for name in ACCURACIES
        if dense.get(name)
    }
    return {
        "task": model.task,
        "reads_images": model.processor is not None,
        "pipeline_tag": PIPELINE_TAGS[model.task, model.processor is not None],
        "architecture": config["base_architecture"],
        "auto_class": auto_class,
        "latents_of_keys_and_values": model.task == "causal-lm" and holds_latents(folder),
        "target": {name: result[name] for name in ("ratio", "fit_gib", "max_kl", "objective") if name in result},
        "realized_ratio": result["realized_ratio"],
        "compressed": stored_size(folder),
        "dense": {
            "parameters": dense["parameters"],
            "bytes": dense["parameters"] * model.torch_dtype.itemsize,
            "dtype": model.dtype,
        },
        "allocation": result["allocation"],
        "epochs": result["epochs"],
        "best_epoch": result["best_epoch"],
        "metric": metric.name,
        "measured_on": {metric.counted: dense[metric.counted]},
        "figures": figures,
        "kl_joint": result["kl_joint"],
        "kl_sum_of_isolated": result["kl_sum_of_isolated"],
        "accuracies": accuracies,
        "units": [
            {name: unit[name] for name in ("name", "side", "members", "dimension")}
            | {"rank": ranks.get(unit["name"], unit["dimension"]), "dense": unit["name"] not in ranks}
            for unit in report["units"]
        ],
    }


def render(facts: dict[str, Any]) -> str:
    """Returns the card as Markdown with YAML front matter, of ``facts`` as ``card.json`` holds them."""
    licence = {field: value for field, value in facts["base_model"]["license"].items() if field != "stated_by"}
    front = {
        "base_model": facts["base_model"]["name"],
        **licence,
        "library_name": "transformers",
        "pipeline_tag": facts["pipeline_tag"],
        "tags": ["lsp", "compression"],
    }
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"code": code, "escaped": escaped}
    return environment.get_template(TEMPLATE).render(
        facts,
        front_matter=yaml.safe_dump(front, sort_keys=False).rstrip("\n"),
        licence=_licence(licence, facts["base_model"]["license"]["stated_by"]),
        license_unknown=licence["license"] == UNKNOWN,
        asked=_asked(facts["target"]),
        removed=f"{facts['realized_ratio']:.2%}",
        label=model_label(facts["target"]["objective"]),
        unit=metric_of({facts["metric"]: None}).unit,
        reader="AutoImageProcessor" if facts["reads_images"] else "AutoTokenizer",
        sizes=markdown_table(["", "parameters", "bytes", "dtype"], _size_rows(facts)),
        quality=markdown_table(*_quality(facts)),
        ranks=markdown_table(["unit", "side", "rank", "of", "kept"], [_rank_row(unit) for unit in facts["units"]]),
        dense_units=[unit["name"] for unit in facts["units"] if unit["dense"]],
    )


def _licence(fields: dict[str, Any], source: str | None) -> str:
    """Returns the licence for people, and who says so where a card does."""
    identifier, link = fields["license"], fields.get("license_link")
    name = fields.get("license_name") or (", ".join(identifier) if isinstance(identifier, list) else identifier)
    if source is None:
        return UNKNOWN
    if source != CARD:
        return f"see {linked(link, link)}"
    return f"{escaped(name) if link is None else linked(name, link)}, as its card says"


def _asked(target: dict[str, Any]) -> str:
    """Returns what was asked for, for people."""
    if "fit_gib" in target:
        return f"weights of at most {target['fit_gib']:g} GiB, hence {target['ratio']:.2%}"
    if "max_kl" in target:
        return f"at most {target['max_kl']:g} nats of divergence before training"
    return f"{target['ratio']:.2%}"


def _size_rows(facts: dict[str, Any]) -> list[list[str]]:
    dense, own = facts["dense"], facts["compressed"]
    return [
        ["dense", f"{dense['parameters']:,}", f"{dense['bytes']:,}", dense["dtype"]],
        ["this checkpoint", f"{own['parameters']:,}", f"{own['bytes']:,}", ", ".join(own["dtypes"])],
    ]


def _quality(facts: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows of the table of what the models give, all measured in one way."""
    metric = metric_of({facts["metric"]: None})
    names = [(key, name) for key, tasks in facts["accuracies"].items() for name in tasks["dense"]]
    rows = []
    for model, label in {**LABELS, "trained": model_label(facts["target"]["objective"])}.items():
        row = [label, metric.template.format(facts["figures"][model])]
        for key, name in names:
            accuracy = facts["accuracies"][key].get(model, {}).get(name, {}).get("acc")
            row.append("" if accuracy is None else f"{accuracy:.1%}")
        rows.append(row)
    return ["model", metric.title, *(escaped(name) for _, name in names)], rows


def _rank_row(unit: dict[str, Any]) -> list[str]:
    rank, dimension = unit["rank"], unit["dimension"]
    if unit["dense"]:
        return [code(unit["name"]), unit["side"], "dense", f"{dimension:,}", ""]
    return [code(unit["name"]), unit["side"], f"{rank:,}", f"{dimension:,}", f"{rank / dimension:.1%}"]
