"""What the processes of a group exchange in a step: the basis of each unit, from its owner, and its gradient, to it.

Both run unit by unit in one order in all processes, each begun as soon as it can be: while one is on its way, the next
is computed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import Work

from lsp_core.distributed import Group
from lsp_core.gram import NonFiniteError
from lsp_core.projector import Projector
from lsp_core.vectors import Plan


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """``owners``: the process that owns each unit, by name; None: every one does, and all orthonormalize alike."""

    group: Group
    projectors: Mapping[str, Projector]
    owners: Mapping[str, int | None]

    def set_forms(self, plans: Mapping[str, Plan]) -> None:
        """Projects every unit as ``plans`` say.

        Errors: ``NonFiniteError``, in every process, if a V is not finite or has dependent columns.
        """
        bases: dict[str, Tensor] = {}
        works = []
        error: NonFiniteError | None = None
        for name, projector in self.projectors.items():
            try:
                bases[name] = self._basis(projector, plans[name])
            except ValueError as found:
                bases[name], error = projector.empty_basis(plans[name]), error or NonFiniteError(str(found))
            owner = self.owners[name]
            if owner is not None:
                works.append(self.group.broadcast(bases[name], owner))
        _wait(works)
        self.group.raise_together(error)
        for name, projector in self.projectors.items():
            projector.install(plans[name], bases.pop(name))

    def _basis(self, projector: Projector, plan: Plan) -> Tensor:
        if projector.vectors is None:
            return projector.empty_basis(plan)
        basis = projector.vectors.basis(plan).to(projector.dtype)
        return basis if self.group.size == 1 else basis.contiguous()

    def backward(self) -> None:
        """Adds to ``v.grad``, at the owners, what the micro-batches of all processes left, and makes units dense."""
        gradients: dict[str, Tensor | None] = {}
        works = []
        for name, projector in self.projectors.items():
            gradient = projector.gradient(zeros=self.group.size > 1)
            if gradient is not None and self.group.size > 1:
                gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()
            works.append(None if gradient is None else self.group.reduce(gradient, self.owners[name]))
            gradients[name] = gradient
        for (name, projector), work in zip(self.projectors.items(), works, strict=True):
            _wait([work])
            gradient = gradients.pop(name)
            if projector.vectors is not None and gradient is not None:
                projector.vectors.backward(gradient)

    def collected(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns, at the leader, the V-like tensors (D, K) that the owners hold as ``vectors``, on the CPU."""
        found: dict[str, Tensor] = {}
        for name, projector in self.projectors.items():
            shape = (projector.unit.dimension, projector.removed)
            precision = torch.promote_types(projector.dtype, torch.float32)
            v = self.group.to_leader(vectors.get(name), shape, precision, self.owners[name] or 0)
            if v is not None:
                found[name] = v
        return found


def _wait(works: list[Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
