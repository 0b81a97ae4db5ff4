"""What decides a training: its settings, their defaults, and which of two epochs is the better one."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Objective = Literal["kl", "task"]
Metric = Literal["perplexity", "accuracy", "kl"]
HINTS = ("micro_batch", "checkpoint_steps", "checkpoint_minutes")  # settings that change the result by rounding at most


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings of ``train_projectors``; the defaults are design.md's."""

    learning_rate: float
    objective: Objective = "kl"
    epochs: int = 10
    batch_sequences: int = 16  # examples an optimizer step
    epoch_sequences: int | None = None  # examples an epoch, drawn anew for each; none: all
    micro_batch: int = 4  # examples a forward pass; changes memory, and the result by rounding alone
    warmup_fraction: float = 0.05  # of all steps, linear, before the cosine
    modulation_epochs: float = 1.0  # alpha ramps from 0 to 1 over these
    dropout: float = 0.05  # probability that a removed direction is kept in a step
    orthogonality: float = 0.05  # lambda_ort
    patience: int = 3  # epochs without improvement before an early stop
    seed: int = 0
    keep_diverged: bool | None = None  # of a training that diverges, its best epoch counts, instead of an error
    checkpoint_steps: int = 50  # a checkpoint after so many steps or minutes, and after each epoch
    checkpoint_minutes: float = 10.0

    def recorded(self) -> dict[str, Any]:
        """Returns the settings that the result depends on."""
        return {name: value for name, value in asdict(self).items() if name not in HINTS and value is not None}


def is_better(record: Mapping[str, float], than: Mapping[str, float], metric: Metric) -> bool:
    """Whether an epoch's ``record`` is better: by a lower metric, or a higher accuracy; of equal ones by the loss."""
    if metric != "accuracy":
        return record["validation"] < than["validation"]
    return (-record["validation"], record["validation_loss"]) < (-than["validation"], than["validation_loss"])


def default_learning_rate(parameters: int) -> float:
    """Returns 1e-3 below 500M parameters, 1e-4 below 6B, else 3e-5."""
    return 1e-3 if parameters < 500_000_000 else 1e-4 if parameters < 6_000_000_000 else 3e-5
