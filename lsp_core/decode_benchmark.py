"""Decoding one token at a context: dense, untied factor pairs, tied groups, and tied groups with the latent cache.

All arms of a *cell* (dtype, batch, context) run in one process and take turns. Weights and caches are random numbers:
a cache is filled, not computed, which is enough for speed. ``python -m lsp_core.decode_benchmark`` runs it where only
torch and transformers are installed.
"""

import argparse
import gc
import json
import logging
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from lsp_core.decode_cell import measure_cell
from lsp_core.decode_checks import check_compressed, check_decoder, check_positions
from lsp_core.decode_report import table
from lsp_core.decode_settings import DTYPES, DecodeSettings
from lsp_core.decode_variants import Units, give_weights, variants_of
from lsp_core.device_memory import processor_name
from lsp_core.modeling_lsp import LSPConfig
from lsp_core.named_shapes import config_of
from lsp_core.random_models import dense_model, described_units

log = logging.getLogger(__name__)

NOTE = "Weights and cached keys, values and latents are random numbers: good for speed, not for text."


def decode(settings: DecodeSettings, output: Path | None = None) -> dict[str, Any]:
    """Returns the figures of all cells; ``output``, a JSON file, is rewritten after each.

    Of an arm: ``tokens_per_second``, of the whole batch, and ``speedup`` over each baseline in the same round, medians
    with quartiles; ``step_bytes`` of weights and cache that a step must read, and their ``bandwidth_share`` of a
    measured copy; ``byte_bound``, the speed-up over dense if bytes were all that counted; ``cache_bytes`` of the
    tensors held; ``peak_bytes``, on a GPU: weights, cache and the most that a step allocates. An arm that was not
    measured has a ``reason`` in place of these.
    Errors: ``ValueError`` for a model or a context that cannot be decoded, weights of which none fit the device, or an
    ``output`` that cannot be written.
    """
    if output is not None:
        _check_writable(output)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    config = config_of(settings.model)
    base, compressions = _compressions(config, settings.ratios)
    empty = dense_model(base)
    check_decoder(empty)
    remarks = [check_positions(empty, context) for context in settings.contexts]
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
    with torch.cuda.device(settings.place) if settings.on_gpu else nullcontext():
        for dtype in settings.dtypes:
            for cell in _cells(settings, base, compressions, dtype, result):
                result["cells"].append(cell)
                if output is not None:
                    _write(output, json.dumps(result, indent=2) + "\n")
            gc.collect()  # the weights of one dtype make room for those of the next
    return result


def _cells(
    settings: DecodeSettings,
    base: PreTrainedConfig,
    compressions: dict[float | None, Units],
    dtype: str,
    result: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """Yields the cells of one dtype, whose weights nothing holds afterwards; puts the ranks into ``result``."""
    variants, result["ranks"] = variants_of(settings, base, compressions)
    give_weights(variants, settings, dtype)
    for batch in settings.batches:
        for context in settings.contexts:
            log.info("%s, batch %d, context %d", dtype, batch, context)
            yield measure_cell(settings, variants, base, DTYPES[dtype], batch, context)


def _check_writable(output: Path) -> None:
    if output.is_dir():
        raise ValueError(f"output: {output} is a folder: name a file in it")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output: {output} cannot be written: {error.strerror}") from None
    if not os.access(output.parent, os.W_OK):
        raise ValueError(f"output: {output} cannot be written: no permission")


def _write(path: Path, text: str) -> None:
    """Writes a file such that nobody ever reads a part of it."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _compressions(
    config: PreTrainedConfig, ratios: tuple[float, ...]
) -> tuple[PreTrainedConfig, dict[float | None, Units]]:
    """Returns the dense config, and the units by ratio; those of a compressed model's config by None."""
    if isinstance(config, LSPConfig):
        check_compressed(config)
        assert config.base_config is not None
        return config.base_config, {None: config.units}
    try:
        return config, {ratio: described_units(config, ratio) for ratio in ratios}
    except RuntimeError as error:  # of shapes that do not fit
        raise ValueError(f"a {config.model_type} with this config cannot run: {str(error).splitlines()[0]}") from None


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
    parser.add_argument("--device", help="cpu, cuda or cuda:1; default: a GPU where there is one")
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
