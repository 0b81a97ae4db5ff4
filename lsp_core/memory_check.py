"""Peak device memory of each stage, stated and measured: ``python -m lsp_core.memory_check llama-810m --json``.

Stated is what ``python -m flows plan`` states, for a GPU, from shapes alone. Measured is ``max_memory_allocated`` of
the stage's own functions on random weights, where there is a GPU; elsewhere only the stated figures are given. Merging
works on the CPU and needs none. Needs torch, transformers and safetensors only.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lsp_core.allocation import uniform_parameters
from lsp_core.basis import ordered_basis
from lsp_core.block_grams import gather_by_blocks
from lsp_core.costs import bases_cost, evaluate_cost, gather_cost, measure_cost
from lsp_core.device_memory import processor_name
from lsp_core.discovery import discover_units
from lsp_core.gram import gather_grams
from lsp_core.losses import sum_losses
from lsp_core.named_shapes import config_of
from lsp_core.offload import offloaded
from lsp_core.peaks import distinct
from lsp_core.random_models import Pool, dense_model, materialize, pooled_shapes
from lsp_core.sensitivity import Sensitivity
from lsp_core.shapes import Shapes, shapes_of
from lsp_core.teacher import cache_teacher
from lsp_core.training import train_projectors
from lsp_core.training_costs import teacher_cost, train_cost
from lsp_core.training_settings import TrainingSettings
from lsp_core.units import Unit, weight_of

HOME = torch.device("cpu")
OFFLOADED = " offloaded"  # ending of a stage's name
MICRO_BATCHES = 4
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """``micro_batch`` sequences of ``length`` tokens; ``ratio`` of the parameters is removed for training."""

    length: int = 512
    micro_batch: int = 4
    ratio: float = 0.5

    @property
    def sequences(self) -> int:
        return MICRO_BATCHES * self.micro_batch

    @property
    def batches(self) -> dict[str, Any]:
        return {"sequences": self.sequences, "length": self.length, "micro_batch": self.micro_batch}

    @property
    def training(self) -> TrainingSettings:
        """One step in each form, of two micro-batches."""
        return TrainingSettings(
            learning_rate=1e-4, epochs=1, batch_sequences=2 * self.micro_batch, micro_batch=self.micro_batch
        )


def stated_peaks(shapes: Shapes, units: list[Unit], removed: Mapping[str, int], sizes: Sizes) -> dict[str, int]:
    """Returns the bytes that each stage is said to need."""
    grams = {**sizes.batches, "precision_bytes": 8}
    found = {}
    for offload, ending in ((True, OFFLOADED), (False, "")):
        found[f"gather{ending}"] = gather_cost(shapes, units, **grams, offload=offload)
        found[f"bases{ending}"] = bases_cost(shapes, units, precision_bytes=8, offload=offload)
        found[f"measure{ending}"] = measure_cost(shapes, units, points=2, **grams, offload=offload)
        found[f"teacher{ending}"] = teacher_cost(shapes, **sizes.batches, offload=offload)
        found[f"evaluate{ending}"] = evaluate_cost(shapes, units, **sizes.batches, offload=offload)
    found["train"] = training_cost(shapes, units, removed, sizes)
    return {stage: cost.peak_bytes for stage, cost in found.items()}


def stated_shares(
    shapes: Shapes, units: list[Unit], removed: Mapping[str, int], sizes: Sizes, processes: int
) -> dict[str, int]:
    """Returns the bytes that training is said to need on each of ``processes`` devices, a step being as large again."""
    return {
        f"train {sharding} on {processes}": training_cost(
            shapes, units, removed, sizes, processes=processes, sharded=sharding == "sharded"
        ).peak_bytes
        for sharding in ("replicated", "sharded")
    }


def training_cost(
    shapes: Shapes, units: list[Unit], removed: Mapping[str, int], sizes: Sizes, *, processes: int = 1, **given: Any
) -> Any:
    """Returns the cost of the training of ``Sizes.training``, with as many sequences for each of ``processes``."""
    chosen = sizes.training
    return train_cost(
        shapes,
        units,
        removed,
        sequences=processes * sizes.sequences,
        length=sizes.length,
        micro_batch=sizes.micro_batch,
        epochs=chosen.epochs,
        batch_sequences=processes * chosen.batch_sequences,
        validation_sequences=sizes.micro_batch,
        modulation_epochs=chosen.modulation_epochs,
        dropout=chosen.dropout,
        precision_bytes=8,
        processes=processes,
        **given,
    )


def measured_peaks(
    model: PreTrainedModel, units: list[Unit], removed: Mapping[str, int], sizes: Sizes, device: str
) -> dict[str, int]:
    """Returns the bytes that each stage needed on the GPU ``device``; ``model`` is on the CPU."""
    tokens = torch.randint(model.config.vocab_size, (sizes.sequences, sizes.length))
    batch: dict[str, Any] = {"micro_batch": sizes.micro_batch}
    squares = {unit.dimension: _orthogonal(unit.dimension, device) for unit in distinct(units)}
    bases = {unit.name: squares[unit.dimension] for unit in units}
    found: dict[str, int] = {}
    teachers: list[Any] = []
    for offload, ending in ((True, OFFLOADED), (False, "")):
        home = HOME if offload else None
        if not offload:
            torch.nn.Module.to(model, device)
        gathering = partial(gather_by_blocks, home=HOME) if offload else gather_grams
        found[f"bases{ending}"] = _measured(device, partial(_order, model, units, device))
        with offloaded(model, device) if offload else nullcontext():
            found[f"gather{ending}"] = _measured(device, partial(gathering, model, units, tokens, **batch))
            found[f"measure{ending}"] = _measured(device, partial(_measure, model, units, bases, tokens, home, batch))
            found[f"evaluate{ending}"] = _measured(device, partial(sum_losses, model, tokens, range(sizes.micro_batch)))
            found[f"teacher{ending}"] = _measured(
                device, lambda: teachers.append(cache_teacher(model, tokens, **batch))
            )
    training = partial(
        train_projectors, model, units, bases, removed, tokens, tokens[: sizes.micro_batch], sizes.training
    )
    found["train"] = _measured(device, partial(training, teacher=teachers[0]))
    return found


def _measured(device: str, run: Callable[[], object]) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device)


def _orthogonal(dimension: int, device: str) -> Tensor:
    q: Tensor = torch.linalg.qr(torch.randn(dimension, dimension, dtype=torch.float64, device=device)).Q
    return q.cpu()


def _order(model: PreTrainedModel, units: list[Unit], device: str) -> None:
    for unit in distinct(units):
        rows = torch.randn(2 * unit.dimension, unit.dimension, dtype=torch.float64)
        weights = [weight_of(model.get_submodule(name)).detach().to(device) for name in unit.members]
        ordered_basis(unit, (rows.T @ rows).to(device), weights)


def _measure(
    model: PreTrainedModel,
    units: list[Unit],
    bases: Mapping[str, Tensor],
    tokens: Tensor,
    home: torch.device | None,
    batch: dict[str, Any],
) -> None:
    sensitivity = Sensitivity(model, units, bases, tokens, home=home, **batch)
    for unit in distinct(units):
        sensitivity.measure(unit.name, unit.dimension // 2)


def check(
    name: str, *, dtype: torch.dtype, sizes: Sizes, processes: int = 1, device: str | None = None
) -> dict[str, Any]:
    """Returns ``stated_bytes`` of each stage, and on a GPU ``measured_bytes`` and their ``ratio``.

    ``device``: none: a GPU where there is one. Errors: ``ValueError`` as ``config_of``.
    """
    config = config_of(name)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    empty = dense_model(config)
    units = discover_units(empty)
    removed = uniform_parameters(units, sizes.ratio).removed
    shapes = shapes_of(empty, dtype=dtype, on_host=False)
    stated = stated_peaks(shapes, units, removed, sizes)
    if processes > 1:
        stated |= stated_shares(shapes, units, removed, sizes, processes)
    measured: dict[str, int] = {}
    if torch.device(device).type == "cuda":
        wanted = pooled_shapes(empty)
        model = materialize(empty, Pool(Pool.bytes_for(wanted, dtype), dtype, "cpu"), dtype, "cpu")
        measured = measured_peaks(model, units, removed, sizes, device)
    stages = {}
    for stage, size in stated.items():
        there = measured.get(stage)
        ratio = None if there is None else size / there
        stages[stage] = {"stated_bytes": size, "measured_bytes": there, "ratio": ratio}
    return {"model": name, "device": processor_name(device), "dtype": str(dtype), "stages": stages}


def main(arguments: list[str] | None = None) -> int:
    """Prints the peaks of a named shape, of a folder with a config.json, or of a config's JSON file."""
    parser = argparse.ArgumentParser(prog="python -m lsp_core.memory_check", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--length", type=int, default=Sizes.length)
    parser.add_argument("--micro-batch", type=int, default=Sizes.micro_batch)
    parser.add_argument("--ratio", type=float, default=Sizes.ratio)
    parser.add_argument("--processes", type=int, default=1, help="that train together, one a device: stated only")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    sizes = Sizes(length=given.length, micro_batch=given.micro_batch, ratio=given.ratio)
    try:
        found = check(given.model, dtype=DTYPES[given.dtype], sizes=sizes, processes=given.processes)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(found))
        return 0
    print(f"{found['model']} in {found['dtype']} on {found['device']}")
    for stage, peak in found["stages"].items():
        told = f"{stage:24} stated {peak['stated_bytes'] / 2**30:7.2f} GiB"
        if peak["ratio"] is not None:
            told += f"  measured {peak['measured_bytes'] / 2**30:7.2f} GiB  ratio {peak['ratio']:.3f}"
        print(told)
    if not torch.cuda.is_available():
        print("There is no GPU here: only stated figures are given.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
