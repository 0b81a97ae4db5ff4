"""The configuration of an evaluation: a language model alone, dense or compressed, in a folder or on the hub."""

from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from flows.config import CompressConfig, ModelConfig, Positive, WorkersConfig
from flows.sources import Section, TextEvaluationConfig
from storage.places import check_uri

SAME: Any = CompressConfig.model_fields  # settings that mean what they mean there
LENGTH = 2048  # tokens of a window, as in compress


class EvaluateConfig(Section):
    """Everything that decides an evaluation."""

    model: ModelConfig = Field(description="The model to evaluate: a folder, dense or compressed, or a hub id.")
    evaluation: TextEvaluationConfig = Field(
        TextEvaluationConfig(), description="What the model is evaluated on, in windows of 2,048 tokens by default."
    )
    store: str = SAME["store"]
    verify: bool = SAME["verify"]
    output: Path = Field(Path("runs/evaluate"), description="Folder for evaluation.json and evaluation.md.")
    device: str = SAME["device"]
    micro_batch: int = SAME["micro_batch"]
    workers: WorkersConfig = Field(WorkersConfig(), description="Who shares the work.")
    offload: bool = SAME["offload"]
    stage_timeout_minutes: Positive | None = SAME["stage_timeout_minutes"]

    @property
    def length(self) -> int:
        """Returns the tokens of a test window."""
        return self.evaluation.sequence_length or LENGTH

    @field_validator("store")
    @classmethod
    def _no_secret(cls, store: str) -> str:
        return check_uri(store)
