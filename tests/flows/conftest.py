import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flows.config import CompressConfig


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)  # tiny matrices: threads only wait for each other


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """Takes off the handler that the command line binds to its test's standard error, which is closed afterwards."""
    root = logging.getLogger()
    level = root.level
    yield
    root.handlers = [handler for handler in root.handlers if type(handler) is not logging.StreamHandler]
    root.setLevel(level)


@pytest.fixture(scope="session")
def tiny_config(tiny_model: Path, tiny_text: dict[str, Path]) -> Callable[..., CompressConfig]:
    """Returns a maker of configurations that compress the tiny model in seconds; sections may be overridden."""

    def make(folder: Path, **changes: Any) -> CompressConfig:
        values: dict[str, Any] = {
            "model": {"name_or_path": str(tiny_model)},
            "calibration": {"text": {"path": tiny_text["train"]}, "sequences": 16, "sequence_length": 32},
            "allocation": {"sequences": 4},
            "validation": {"sequences": 4},
            "training": {"epochs": 2, "batch_sequences": 8},
            "evaluation": {"text": {"path": tiny_text["test"]}, "tasks": (), "prompt": "alpha", "prompt_tokens": 4},
            "targets": [{"ratio": 0.3, "objective": "kl"}],
            "store": str(folder / "store"),
            "output": folder / "output",
            "device": "cpu",
        }
        return CompressConfig.model_validate(values | changes)

    return make
