"""Reports as ``report.json`` holds them, one of each kind, small and made up, for tests of what shows them."""

from typing import Any

from tasks.html_figures import Curves

KINDS, BLOCKS, DIMENSION = ("q_proj+k_proj", "down_proj"), 3, 40
HOSTILE = "</script><img src=x onerror=document.title='run'>\"'`${1}<!--<script>%{x}"


def units(prefix: str = "model.layers") -> list[dict[str, Any]]:
    return [
        {
            "name": f"{prefix}.{block}.{kind}",
            "side": "input",
            "members": [f"{prefix}.{block}.{part}" for part in kind.split("+")],
            "dimension": DIMENSION,
            "parameters": 960,
            "block": block,
        }
        for block in range(BLOCKS)
        for kind in KINDS
    ]


def result(metric: str, ratio: float, objective: str, **changes: Any) -> dict[str, Any]:
    figures = {"perplexity": (44.0, 30.0, 21.0), "accuracy": (0.25, 0.5, 0.875), "similarity": (0.5, 0.75, 0.9375)}
    uniform, init, trained = figures[metric]
    return {
        "ratio": ratio,
        "objective": objective,
        "allocation": "measured_kl",
        "realized_ratio": ratio + 0.0004,
        "removed": {unit["name"]: 5 + 10 * unit["block"] for unit in units()},
        "kl_sum_of_isolated": 0.25,
        "kl_joint": 0.3125,
        f"{metric}_init": init,
        f"{metric}_init_uniform": uniform,
        metric: trained,
        "parameters": int(1e4 * (1 - ratio / 2)),
        "epochs": 2,
        "best_epoch": 1,
        "history": [
            {"epoch": 0, "validation": 30.0},
            {"epoch": 1, "validation": 20.0, "train_loss": 0.5},
            {"epoch": 2, "validation": 25.0, "train_loss": 0.25},
        ],
        "continuation_init": "and and",
        "continuation": f"by {objective}",
        "checkpoint": f"/somewhere/checkpoints/{ratio:g}-{objective}",
    } | changes


def language(**changes: Any) -> dict[str, Any]:
    """A decoder, with everything that a report may have."""
    tasks = {"easy": {"acc": 0.5}, "written": {"exact_match": 0.25}}
    sweep = [{"learning_rate": rate, "best_epoch": 1, "validation": 20 + 100 * rate} for rate in (1e-3, 1e-2)]
    own = {"tasks_init": tasks, "tasks": tasks, "learning_rate": 1e-3, "validated_on": "perplexity", "sweep": sweep}
    content = {
        "model": "maker/tiny",
        "prompt": "Once upon\n  a time",
        "dense": {"perplexity": 17.125, "parameters": 10_000, "tokens": 4096, "continuation": "there", "tasks": tasks},
        "units": units(),
        "left_alone": {f"model.layers.{block}.mlp.gate": "a router" for block in range(BLOCKS)},
        "results": [result("perplexity", ratio, objective, **own) for ratio, objective in ((0.3, "kl"), (0.7, "task"))],
        "stages": stages(),
        "run": "6f0c",
        "started": "2026-02-03T04:05:06.789+00:00",
        "seconds": 61.25,
        "config": {"model": {"name_or_path": "maker/tiny"}, "targets": [{"ratio": 0.3}]},
        "device_gib": 80.0,
        "decoding": {"machine": "cpu", "threads": 2, "torch": "2", "dtype": "float32", "batch": 1}
        | {"failed": None, "reasons": {}},
    }
    _with_costs(content)
    return content | changes


def _with_costs(content: dict[str, Any]) -> None:
    names = ("weights_gib", "kv_floats_per_token_per_layer", "weights_plus_kv_128k_gib", "max_context_k_tokens")
    for owner in (content["dense"], *content["results"]):
        share = owner["parameters"] / 10_000
        owner["efficiency"] = dict.fromkeys((*names, "prefill_tflop_2k", "decode_gflop_2k"), 100 * share)
    for one in content["results"]:
        gain = 10_000 / one["parameters"]
        arm = {"cache_bytes": 10, "weights_bytes": 20, "peak_bytes": 2**29}
        ready = {**arm, "tokens_per_second": 50 * gain, "speedup": gain}
        one["speed"] = {"64": {"dense": {**arm, "tokens_per_second": 50.0, "speedup": 1.0}, "ours-ready": ready}}


def stages() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "label": f"{name} it",
            "key": f"{index}{'0' * 63}",
            "state": state,
            "seconds": 1.5,
            "reason": why,
        }
        for index, (name, state, why) in enumerate(
            [("gather", "Cached", None), ("bases", "Cached", None), ("train", "Completed", "never computed | before")]
        )
    ]


def classifier() -> dict[str, Any]:
    """An image classifier: accuracies, and transfer."""
    probes = {"flowers": {"acc": 0.75, "converged": True}}
    dense = {"accuracy": 0.9375, "similarity": 1.0, "parameters": 10_000, "examples": 640, "transfer": probes}
    history = [{"epoch": epoch, "validation": 0.5 + 0.1 * epoch, "validation_loss": 0.2} for epoch in range(3)]
    own = {"transfer_init": {"flowers": {"acc": 0.5}}, "transfer": probes, "history": history}
    results = [result("accuracy", 0.5, "kl", **own), result("accuracy", 0.5, "task", **own)]
    return {"model": "./vit", "prompt": None, "dense": dense, "units": units(), "left_alone": {}, "results": results}


def encoder() -> dict[str, Any]:
    """A model without a task: the cosine to the dense features."""
    dense = {"similarity": 1.0, "parameters": 10_000, "examples": 640}
    results = [result("similarity", 0.5, "kl")]
    return {"model": "bert", "prompt": None, "dense": dense, "units": units(), "left_alone": {}, "results": results}


def seeds() -> dict[str, Any]:
    """Two seeds of two targets, one of them bound by a divergence."""
    content = language()
    results = [
        {**one, "seed": seed, "perplexity": 21.0 + seed, "checkpoint": f"/o/checkpoints/{one['ratio']}-seed-{seed}"}
        | ({"max_kl": 0.1, "ratio": 0.7 + 0.01 * seed} if one["ratio"] == 0.7 else {})
        for seed in (0, 1)
        for one in content["results"]
    ]
    return content | {"seeds": [0, 1], "results": results}


def without_grid() -> dict[str, Any]:
    """Uniform ranks, for which nothing is measured."""
    one = result("perplexity", 0.5, "kl", allocation="uniform_rank", kl_sum_of_isolated=None)
    return {**encoder(), "dense": {"perplexity": 17.0, "parameters": 10_000, "tokens": 64}, "results": [one]}


def hostile() -> dict[str, Any]:
    """Every name that comes from outside is code."""
    content = language(model=HOSTILE, prompt=HOSTILE, left_alone={HOSTILE: HOSTILE}, config={HOSTILE: HOSTILE})
    content["units"] = [{**unit, "name": f"{unit['name']}{HOSTILE.replace('.', '_')}"} for unit in units()]
    tasks = {HOSTILE: {"acc": 0.5}}
    content["dense"] |= {"continuation": HOSTILE, "tasks": tasks}
    for one in content["results"]:
        own = {"continuation": HOSTILE, "continuation_init": HOSTILE, "tasks": tasks, "tasks_init": tasks}
        one |= {**own, "checkpoint": f"/o/{HOSTILE}".replace("</", "<"), "removed": {}}
    content["stages"] = [{**stage, "label": HOSTILE, "reason": HOSTILE} for stage in stages()]
    return content


CONTENTS = {
    "language": language,
    "classifier": classifier,
    "encoder": encoder,
    "seeds": seeds,
    "without grid": without_grid,
    "hostile": hostile,
}


def curves(content: dict[str, Any]) -> dict[int | None, Curves]:
    """Returns the grids of a report by seed: rising, one point of them at zero, which rounding gives."""
    if content["results"][0]["kl_sum_of_isolated"] is None:
        return {}
    found = {
        unit["name"]: [(0, -1e-12), *((count, 1e-4 * (1 + unit["block"]) * count**2) for count in (10, 20, 30))]
        for unit in content["units"]
    }
    return dict.fromkeys(content.get("seeds", [None]), found)
