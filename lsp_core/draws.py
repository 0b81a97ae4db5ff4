"""What training draws and schedules, as functions of the seed and the step: alpha, masks, order.

So the split into micro-batches and the number of processes change nothing, and resuming needs no saved state.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lsp_core.projector import Projector
from lsp_core.training_settings import TrainingSettings
from lsp_core.vectors import Form, Plan


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Draws of a training on ``examples`` sequences; ``factored``: at alpha = 1 units are in the factor form."""

    settings: TrainingSettings
    projectors: Mapping[str, Projector]
    examples: int
    factored: bool = True

    @property
    def sequences(self) -> int:
        """Sequences an epoch."""
        return min(self.settings.epoch_sequences or self.examples, self.examples)

    @property
    def steps(self) -> int:
        """Optimizer steps an epoch."""
        return math.ceil(self.sequences / self.settings.batch_sequences)

    def rows(self, step: int) -> Tensor:  # -> (B,)
        """Returns which sequences optimizer step ``step`` reads."""
        epoch, within = divmod(step, self.steps)
        order = torch.randperm(self.examples, generator=_generator(self.settings.seed, 0, epoch))[: self.sequences]
        return order[within * self.settings.batch_sequences : (within + 1) * self.settings.batch_sequences]

    def masks(self, step: int) -> dict[str, Tensor]:
        """Returns the masks (members, K) of optimizer step ``step`` by unit: True where a direction is removed."""
        masks: dict[str, Tensor] = {}
        for index, (name, projector) in enumerate(self.projectors.items()):
            shape = (len(projector.layers), projector.removed)
            draw = torch.rand(shape, generator=_generator(self.settings.seed, 1 + index, step))
            masks[name] = (draw >= self.settings.dropout).to(projector.device)
        return masks

    def plans(self, step: int) -> dict[str, Plan]:
        """Returns how each unit is projected in optimizer step ``step``."""
        ramp = self.settings.modulation_epochs * self.steps
        alpha = min(1.0, (step + 1) / ramp) if ramp > 0 else 1.0
        form = Form.FACTOR if alpha == 1 and self.factored else Form.ACTIVATION
        return {name: Plan(form=form, masks=mask.unbind(), alpha=alpha) for name, mask in self.masks(step).items()}


def _generator(*numbers: int) -> torch.Generator:
    """Returns a generator that is a function of ``numbers``."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (2**63 - 1)
    return torch.Generator().manual_seed(seed)
