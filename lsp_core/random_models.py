"""Models with random weights for figures of speed: dense, as tied groups, and as untied pairs of factors.

The weights of all models of a run are views of one pool of random numbers: the models take turns, so that together they
need the memory of the largest, and nothing is initialized twice. A pool is many times a cache, or its size is told.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from lsp_core.allocation import uniform_parameters
from lsp_core.discovery import discover_units
from lsp_core.modeling_lsp import FactoredLinear, LSPConfig, LSPForCausalLM, replace_module
from lsp_core.units import Unit, weight_of

PERIOD = 1_048_573  # a prime, so that no two rows of a matrix are the same numbers
ALIGNMENT = 256  # bytes
WEIGHT_SCALE = 0.02


class Pair(FactoredLinear):
    """y = B (A x) + bias: the factors of one layer, shared with none."""

    def __init__(self, layer: nn.Module, rank: int) -> None:
        rows, columns = weight_of(layer).shape
        output_factor = nn.Linear(rank, rows, bias=layer.bias is not None)
        super().__init__(nn.Linear(columns, rank, bias=False), None, output_factor, frozenset({"input"}))


def dense_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Returns the causal language model on the meta device, with a config of its own.

    Errors: ``ValueError`` if ``config`` is of no causal language model.
    """
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    except ValueError as error:
        raise ValueError(f"a {config.model_type} is no causal language model: {str(error).splitlines()[0]}") from None
    model.train(False)
    return model


def described_units(config: PreTrainedConfig, ratio: float) -> list[dict[str, Any]]:
    """Returns the units of ``LSPConfig`` that uniform parameters give at ``ratio``, each input-tied or as discovered.

    Errors: as ``discover_units`` and ``uniform_parameters``.
    """
    units = discover_units(dense_model(config))
    removed = uniform_parameters(units, ratio).removed
    return [
        {
            "name": unit.name,
            "side": unit.side,
            "members": list(unit.members),
            "roles": list(unit.roles),
            "rank": unit.dimension - removed[unit.name],
        }
        for unit in units
        if removed[unit.name] > 0
    ]


def tied_model(config: PreTrainedConfig, units: Sequence[dict[str, Any]]) -> PreTrainedModel:
    """Returns the compressed model of ``units`` on the meta device."""
    architecture = type(dense_model(config)).__name__
    with torch.device("meta"):
        model = LSPForCausalLM(
            LSPConfig(base_config=copy.deepcopy(config), base_architecture=architecture, units=list(units))
        )
    model.train(False)
    return model


def untied_model(config: PreTrainedConfig, ratio: float) -> tuple[PreTrainedModel, dict[str, int]]:
    """Returns the model on the meta device with a pair of factors for every layer, and the rank of each by its name.

    Errors: as ``described_units``.
    """
    model = dense_model(config)
    units: list[Unit] = discover_units(model, kv_routing="untied", tie=False)
    removed = uniform_parameters(units, ratio).removed
    ranks = {unit.name: unit.dimension - removed[unit.name] for unit in units if removed[unit.name] > 0}
    with torch.device("meta"):
        for name, rank in ranks.items():
            replace_module(model, name, Pair(model.get_submodule(name), rank))
    return model, ranks


def realized_ratio(dense: PreTrainedModel, compressed: PreTrainedModel) -> float:
    """Returns the share of the parameters of the targeted layers that ``compressed`` lacks."""
    targeted = sum(unit.parameters for unit in discover_units(dense, kv_routing="untied", tie=False))
    return (parameter_count(dense) - parameter_count(compressed)) / targeted


def parameter_count(model: nn.Module) -> int:
    """Returns the parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def weight_bytes(model: nn.Module) -> int:
    """Returns the bytes of the parameters, shared ones once."""
    return sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())


def bytes_read(model: PreTrainedModel, batch: int) -> int:
    """Returns the bytes of weights that a step of ``batch`` sequences, a token each, must read.

    Every parameter once, but of a table of embeddings that is no head too only a row for each sequence.
    """
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    multiplied = {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    rows = {id(table): batch * table.shape[1] for table in tables if id(table) not in multiplied}
    return sum(rows.get(id(parameter), parameter.numel()) * parameter.itemsize for parameter in model.parameters())


class Pool:
    """Random numbers on a device, which models and caches in turn take for their tensors."""

    def __init__(self, num_bytes: int, dtype: torch.dtype, device: str, *, scale: float = WEIGHT_SCALE) -> None:
        count = -(-num_bytes // dtype.itemsize)
        period = torch.randn(min(PERIOD, count), generator=torch.Generator().manual_seed(0)).mul_(scale)
        self._numbers = torch.empty(count, dtype=dtype, device=device)
        for part in self._numbers.split(PERIOD):
            part.copy_(period[: part.numel()])

    @staticmethod
    def bytes_for(shapes: Sequence[torch.Size], dtype: torch.dtype) -> int:
        """Returns the bytes of a pool from which tensors of ``shapes`` can be taken together."""
        return sum(-(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape in shapes)

    def take(self, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Returns tensors of ``shapes`` that do not overlap each other, but those of any other call."""
        step = ALIGNMENT // self._numbers.itemsize
        taken, start = [], 0
        for shape in shapes:
            taken.append(self._numbers[start : start + shape.numel()].view(shape))
            start += -(-shape.numel() // step) * step
        return taken


def pooled_shapes(model: nn.Module) -> list[torch.Size]:
    """Returns the shapes of the parameters that ``materialize`` takes from the pool."""
    return [parameter.shape for parameter in model.parameters() if parameter.dim() > 1]


def materialize(model: PreTrainedModel, pool: Pool, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Gives a model on the meta device weights from ``pool``, norms of 1 and biases of 0; returns it, frozen.

    What several modules hold they hold together afterwards too. Buffers are what the model's own initialization makes.
    """
    taken = iter(pool.take(pooled_shapes(model)))
    made: dict[int, nn.Parameter] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        if parameter.dim() > 1:
            values = next(taken)
        else:
            fill = torch.ones if names[id(parameter)].endswith("weight") else torch.zeros
            values = fill(parameter.shape, dtype=dtype, device=device)
        made[id(parameter)] = nn.Parameter(values, requires_grad=False)
        made[id(parameter)]._is_hf_initialized = True  # type: ignore[attr-defined] # transformers leaves such as they are
    for module in model.modules():
        for name, old in list(module._parameters.items()):
            if old is not None:
                module._parameters[name] = made[id(old)]
    for part in [module for module in model.modules() if isinstance(module, PreTrainedModel)]:
        for module in part.modules():
            if module._buffers:
                for name, buffer in list(module._buffers.items()):
                    module._buffers[name] = None if buffer is None else torch.empty_like(buffer, device=device)
                part._init_weights(module)
    return model
