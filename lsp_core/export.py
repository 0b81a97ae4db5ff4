"""From a compressed checkpoint back to an ordinary dense one of the base architecture, for any runtime.

Each layer's weight is W = B (C) A, multiplied in float64 and rounded once; everything else stays as it is. What was
written is loaded back without the factors: its outputs are compared with the compressed model's, and each of its layers
with the factored one, since in 16 bits the outputs of a deep model hardly tell one wrong layer from roundings.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lsp_core.inputs import probe
from lsp_core.merging import dense_weight, outputs_of
from lsp_core.modeling import load_compressed
from lsp_core.modeling_lsp import FactoredLinear, replace_module

PROBE, PROBE_TOKENS = 4, 16  # examples, tokens of each
VECTORS = 16  # that each layer is tried with
ROUNDINGS = 5  # of the compressed model's own; a dense layer rounds its weights, which a factored one does not


class ParityError(ValueError):
    """A dense checkpoint whose outputs are not the compressed model's."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was written.

    ``layers``: how many were multiplied out; ``compressed_parameters``: of the model with its factors; ``num_bytes``:
    of all parameters; ``difference``: the largest between the outputs of both models, relative to the largest output;
    ``tolerance``: what it had to stay below.
    """

    architecture: str
    dtype: str
    layers: int
    compressed_parameters: int
    parameters: int
    num_bytes: int
    difference: float
    tolerance: float


def export_dense(folder: Path, output: Path, *, dtype: torch.dtype | None = None) -> Export:
    """Writes the function of the compressed checkpoint in ``folder`` to ``output`` as a dense one of the base model.

    ``dtype``: of the weights; None: the checkpoint's own. Beside the dense weights and those of the checkpoint, one
    layer's are held in float64.
    Errors: ``ValueError`` if the folder holds no compressed model, ``ParityError`` if what was written differs.
    """
    model = load_compressed(folder)
    stored, target = model.dtype, dtype or model.dtype
    examples = probe(model, PROBE, PROBE_TOKENS)
    if target != stored:
        expected = _outputs(type(model).from_pretrained(folder, dtype=target), examples)
    else:
        expected = _outputs(model, examples)
    widest = torch.promote_types(stored, target)
    if widest != stored:
        model = type(model).from_pretrained(folder, dtype=widest)
    with _exact_factors(model):
        exact = _outputs(model, examples)
    compressed_parameters = model.num_parameters()
    layers = len(factored_names(model.model))
    dense = densify(model, dtype=target)
    options: dict[str, Any] = dict(model.config.options)
    del model
    architecture = type(dense)
    parameters = dense.num_parameters()
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in dense.parameters())
    dense.save_pretrained(output)
    del dense
    dense = _load(architecture, output, options)
    difference, tolerance = _compare(dense, examples, expected, exact)
    if not difference <= tolerance:  # a NaN is no parity
        raise ParityError(
            f"the dense model's outputs differ from those of {folder} by {difference:.2g} of their size, more than the "
            f"{tolerance:.2g} that rounding to {_name(target)} explains: export it with a wider --dtype"
        )
    _check_layers(dense, folder)
    return Export(
        architecture=architecture.__name__,
        dtype=_name(target),
        layers=layers,
        compressed_parameters=compressed_parameters,
        parameters=parameters,
        num_bytes=num_bytes,
        difference=difference,
        tolerance=tolerance,
    )


@torch.no_grad()
def densify(model: PreTrainedModel, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Returns the base model inside the compressed ``model``, its factored layers replaced, in place, by dense ones.

    ``dtype``: of its parameters; None: each layer's own. ``model`` is of no use afterwards.
    """
    base: PreTrainedModel = model.model
    with torch.device("meta"):
        plain = type(base)(copy.deepcopy(base.config), **model.config.options)
    for name in factored_names(base):
        layer = base.get_submodule(name)
        assert isinstance(layer, FactoredLinear)
        dense = plain.get_submodule(name).train(layer.training)
        weight = dense_weight(layer).to(dtype or layer.weight.dtype)
        dense.weight = nn.Parameter((weight.T if isinstance(dense, Conv1D) else weight).contiguous())
        if layer.bias is not None:
            dense.bias = nn.Parameter(layer.bias.detach())
        replace_module(base, name, dense)
    if dtype is not None:
        for parameter in base.parameters():  # not the buffers: a rotation's frequencies stay as fine as they are
            parameter.data = parameter.data.to(dtype)
    base.config.dtype = base.dtype
    if base.can_generate():
        base.generation_config = model.generation_config
    return base


def factored_names(model: nn.Module) -> list[str]:
    """Returns the names of the factored layers, of one with several names the first."""
    return [name for name, module in model.named_modules() if isinstance(module, FactoredLinear)]


def _compare(model: PreTrainedModel, examples: Tensor, expected: Tensor, exact: Tensor) -> tuple[float, float]:
    """Returns how far the outputs of ``model`` are from ``expected``, and how far they may be.

    The compressed model, rounding each latent and product, gave ``expected``; with factored layers that round
    once it gives ``exact``. The difference of the two shows what this network makes of rounding errors; one unit in the
    last place of the largest output is allowed in any case. All relative to that output.
    """
    outputs = _outputs(model, examples)
    size = exact.abs().max().item()
    rounding = (expected - exact).abs().max().item() / size
    eps = torch.finfo(model.dtype).eps
    return (outputs - expected).abs().max().item() / size, ROUNDINGS * rounding + eps


@torch.no_grad()
def _check_layers(dense: PreTrainedModel, folder: Path) -> None:
    """Errors: ``ParityError`` if a layer of ``dense`` is not that of the compressed checkpoint in ``folder``.

    Both read the same random vectors, in float64. Weights that were rounded once are off by at most eps / 2 of each,
    and so are the outputs on average; what is off by a share of eps is an error.
    """
    tolerance = max(torch.finfo(dense.dtype).eps, torch.finfo(torch.float32).eps)  # of float64: sums in another order
    compressed, generator = load_compressed(folder), torch.Generator().manual_seed(0)
    for name in factored_names(compressed.model):
        layer, other = (copy.deepcopy(each.get_submodule(name)).double() for each in (compressed.model, dense))
        assert isinstance(layer, FactoredLinear)
        x = torch.randn(VECTORS, layer.in_features, generator=generator, dtype=torch.float64)
        y = layer(x)
        difference, size = (other(x) - y).norm().item(), y.norm().item()
        if not difference <= tolerance * size:
            raise ParityError(
                f"the dense model's layer {name} differs from that of {folder} by {difference:.2g}, where its outputs "
                f"have a size of {size:.2g}: more than rounding to {_name(dense.dtype)} explains; export it with a "
                "wider --dtype"
            )


def _outputs(model: PreTrainedModel, examples: Tensor) -> Tensor:
    return outputs_of(model, examples).double()


@contextmanager
def _exact_factors(model: nn.Module) -> Iterator[None]:
    """Within, factored layers compute in float64 from what they read and round what they return, one at a time."""

    def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        assert isinstance(layer, FactoredLinear)
        y = inputs[0].double() @ layer.input_factor.weight.double().T
        if layer.core is not None:
            y = y @ layer.core.weight.double().T
        y = y @ layer.output_factor.weight.double().T
        return (y if layer.bias is None else y + layer.bias.double()).to(output.dtype)

    handles = [module.register_forward_hook(hook) for module in model.modules() if isinstance(module, FactoredLinear)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _load(architecture: type[PreTrainedModel], folder: Path, options: dict[str, Any]) -> PreTrainedModel:
    """Returns the dense model in ``folder``. Errors: ``ParityError`` if it does not hold the weights that it needs."""
    loaded: tuple[PreTrainedModel, dict[str, Any]] = architecture.from_pretrained(  # type: ignore[assignment]
        folder, output_loading_info=True, **options
    )
    model, info = loaded
    odd = sorted(str(name) for names in info.values() for name in names)
    if odd:
        raise ParityError(f"the dense checkpoint does not load as a {architecture.__name__}: {', '.join(odd[:5])}")
    return model


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
