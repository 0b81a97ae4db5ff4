"""Units, what shares one projector: a single linear layer, or a tied group; and the repeated blocks they lie in."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lsp_core.modeling_lsp import StandIn

Side = Literal["input", "output"]
LINEAR_TYPES = (nn.Linear, Conv1D)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One projected unit.

    ``dimension`` is D, the projected side; ``others`` the members' other sides; ``roles`` what each member makes of
    the attention's query, key and value, in that order and joined by "+", or "".
    """

    name: str
    side: Side
    members: tuple[str, ...]
    dimension: int
    others: tuple[int, ...]
    block: int
    roles: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """N_u: parameters of the dense members, biases not counted."""
        return self.dimension * sum(self.others)

    def factor_parameters(self, retained: int) -> int:
        """c_u(r): parameters of the factors at rank ``retained``, the shared one counted once."""
        return retained * (self.dimension + sum(self.others))

    def saved(self, removed: int) -> int:
        """s_u(k): parameters saved by removing ``removed`` directions; 0 where it stays dense, else maybe negative."""
        return 0 if removed == 0 else self.parameters - self.factor_parameters(self.dimension - removed)

    @property
    def break_even(self) -> int:
        """The smallest removed count k that saves parameters."""
        per_rank = self.dimension + sum(self.others)
        return self.dimension - (self.parameters - 1) // per_rank


def weight_of(module: nn.Module) -> Tensor:
    """Returns the weight of a linear layer as (D_out, D_in), a view."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.T if isinstance(module, Conv1D) else weight


def bias_of(module: nn.Module) -> Tensor | None:
    """Returns the bias of a linear layer, (D_out,), or None."""
    bias = module.bias
    assert bias is None or isinstance(bias, Tensor)
    return bias


def find_stacks(model: nn.Module) -> list[list[nn.Module]]:
    """Returns the stacks of repeated blocks in the order they are registered: two in an encoder-decoder.

    A stack is an outermost ``ModuleList`` whose children share one class and hold linear layers.
    Errors: ``ValueError`` if the model has none.
    """
    stacks: list[list[nn.Module]] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            repeated = (
                isinstance(child, nn.ModuleList) and len(child) > 0 and len({type(block) for block in child}) == 1
            )
            if repeated and any(isinstance(layer, (*LINEAR_TYPES, StandIn)) for layer in child.modules()):
                stacks.append(list(child.children()))
            else:
                visit(child)

    visit(model)
    if not stacks:
        raise ValueError(
            f"{type(model).__name__} has no repeated blocks with linear layers: there is nothing to compress"
        )
    return stacks


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks of all stacks, one after the other. Errors: as ``find_stacks``."""
    return [block for stack in find_stacks(model) for block in stack]
