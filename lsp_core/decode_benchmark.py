"""Decoding one token at a context: dense, untied factor pairs, tied groups, and tied groups with the latent cache.

All arms of a *cell* (dtype, batch, context) run in one process and take turns. Weights and caches are random numbers:
a cache is filled, not computed, which is enough for speed. ``python -m lsp_core.decode_benchmark`` runs it where only
torch and transformers are installed.
"""

import argparse
import json
import logging
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from lsp_core.decode_cache import check_positions, full_cache_shapes
from lsp_core.decode_cell import Variant, measure_cell
from lsp_core.decode_report import GIB, table
from lsp_core.decode_settings import (
    DENSE,
    DTYPES,
    OURS,
    READY,
    REBUILT,
    ROTATED,
    TUNED,
    UNTIED,
    DecodeSettings,
)
from lsp_core.decode_step import MASKLESS
from lsp_core.decoding import make_ready
from lsp_core.device_memory import available_bytes, processor_name
from lsp_core.modeling_lsp import LSPConfig
from lsp_core.named_shapes import config_of
from lsp_core.random_models import (
    Pool,
    dense_model,
    described_units,
    materialize,
    pooled_shapes,
    realized_ratio,
    tied_model,
    untied_model,
)

log = logging.getLogger(__name__)

Units = list[dict[str, Any]]
NOTE = "Weights and cached keys, values and latents are random numbers: good for speed, not for text."


def decode(settings: DecodeSettings, output: Path | None = None) -> dict[str, Any]:
    """Returns the figures of all cells; ``output``, a JSON file, is rewritten after each.

    Of an arm: ``tokens_per_second``, of the whole batch, and ``speedup`` over each baseline in the same round, medians
    with quartiles; ``step_bytes`` of weights and cache that a step must read, and their ``bandwidth_share`` of a
    measured copy; ``byte_bound``, the speed-up over dense if bytes were all that counted; ``cache_bytes`` of the
    tensors held; ``peak_bytes``, on a GPU: weights, cache and the most that a step allocates. An arm that was not
    measured has a ``reason`` in place of these.
    Errors: ``ValueError`` for a model or a context that cannot be decoded, or weights that do not fit the device.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    config = config_of(settings.model)
    base, compressions = _compressions(config, settings.ratios)
    empty = dense_model(base)
    remarks = [check_positions(empty, context) for context in settings.contexts]
    full_cache_shapes(base, 1, 1)  # raises for what cannot be measured
    result: dict[str, Any] = {
        "benchmark": "decode",
        "model": settings.model,
        "device": processor_name(settings.place),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rounds": settings.rounds,
        "notes": [NOTE, *(remark for remark in remarks if remark is not None)],
        "ranks": [],
        "cells": [],
    }
    for dtype in settings.dtypes:
        variants, result["ranks"] = _variants(settings, base, compressions)
        pool = _pool(variants, settings, dtype)
        for variant in variants:
            materialize(variant.model, pool, DTYPES[dtype], settings.place)
            if variant.kind in (READY, REBUILT, ROTATED):
                make_ready(variant.model, latent_cache=variant.kind != READY)
        for batch in settings.batches:
            for context in settings.contexts:
                log.info("%s, batch %d, context %d", dtype, batch, context)
                result["cells"].append(measure_cell(settings, variants, base, DTYPES[dtype], batch, context))
                if output is not None:
                    output.parent.mkdir(parents=True, exist_ok=True)
                    output.write_text(json.dumps(result, indent=2) + "\n")
        del variants, pool
    return result


def _compressions(
    config: PreTrainedConfig, ratios: tuple[float, ...]
) -> tuple[PreTrainedConfig, dict[float | None, Units]]:
    """Returns the dense config, and the units by ratio; those of a compressed model's config by None."""
    if isinstance(config, LSPConfig):
        assert config.base_config is not None
        return config.base_config, {None: config.units}
    return config, {ratio: described_units(config, ratio) for ratio in ratios}


def _variants(
    settings: DecodeSettings, base: PreTrainedConfig, compressions: dict[float | None, Units]
) -> tuple[list[Variant], list[dict[str, Any]]]:
    """Returns the models that the arms need, on the meta device, the dense one first; and the ranks by ratio."""
    wanted = {arm.removesuffix(TUNED) for arm in settings.arms}
    dense = dense_model(base)
    variants = [Variant(kind=DENSE, ratio=None, realized=None, model=dense)]
    ranks = []
    for asked, units in compressions.items():
        realized = realized_ratio(dense, tied_model(base, units))
        ratio = realized if asked is None else asked
        chosen: dict[str, Any] = {"ratio": ratio, "tied": {unit["name"]: unit["rank"] for unit in units}}
        if UNTIED in wanted:
            pairs, chosen["untied"] = untied_model(base, realized)
            variants.append(Variant(kind=UNTIED, ratio=ratio, realized=realized_ratio(dense, pairs), model=pairs))
        for kind in (OURS, READY, REBUILT, ROTATED):
            if kind in wanted:
                variants.append(Variant(kind=kind, ratio=ratio, realized=realized, model=tied_model(base, units)))
        ranks.append(chosen)
    for variant in variants:
        if variant.kind not in (REBUILT, ROTATED):  # a latent cache brings an attention of its own
            variant.model.set_attn_implementation(MASKLESS)
    return variants, ranks


def _pool(variants: list[Variant], settings: DecodeSettings, dtype: str) -> Pool:
    """Errors: ``ValueError`` if the largest model does not fit the device."""
    needed = max(Pool.bytes_for(pooled_shapes(variant.model), DTYPES[dtype]) for variant in variants)
    free = available_bytes(settings.place)
    if free is not None and needed > free:
        raise ValueError(
            f"the weights of {settings.model} in {dtype} need {needed / GIB:.1f} GiB, and the {settings.place} has "
            f"{free / GIB:.1f} GiB free: ask for --dtype bfloat16, a smaller shape or another device"
        )
    return Pool(needed, DTYPES[dtype], settings.place)


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark by the options that are the fields of ``DecodeSettings``; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lsp_core.decode_benchmark", description=(__doc__ or "").split("\n")[0]
    )
    defaults: dict[str, Any] = {each.name: each.default for each in fields(DecodeSettings)}
    parser.add_argument("model", help="a named shape, a folder, or a config.json")
    for option, name, kind in (
        ("context", "contexts", int),
        ("batch", "batches", int),
        ("ratio", "ratios", float),
        ("dtype", "dtypes", str),
        ("arms", "arms", str),
    ):
        shown = ",".join(map(str, defaults[name]))
        parser.add_argument(f"--{option}", dest=name, default=shown, type=_list_of(kind), help=f"default: {shown}")
    for name in ("rounds", "tokens", "threads"):
        parser.add_argument(f"--{name}", default=defaults[name], type=int, help=f"default: {defaults[name]}")
    parser.add_argument("--device", help="cpu or cuda; default: a GPU where there is one")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--output", type=Path, help="write the JSON here too, after every cell")
    given = vars(parser.parse_args(arguments))
    as_json, output = given.pop("json"), given.pop("output")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        result = decode(DecodeSettings(**given), output)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result) if as_json else "\n".join(table(result)))
    return 0


def _list_of(kind: type) -> Any:
    def parse(text: str) -> tuple[Any, ...]:
        return tuple(kind(part) for part in text.split(","))

    return parse


if __name__ == "__main__":
    raise SystemExit(main())
