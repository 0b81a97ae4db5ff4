from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from storage.manifest import ArtifactRef, Lineage
from storage.store import Store
from tasks.caching import Runtime, Work
from tasks.models import ModelSource, find_model, load_tokenizer


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)  # tiny matrices: threads only wait for each other


@pytest.fixture(scope="session")
def source(tiny_model: Path) -> ModelSource:
    return find_model(str(tiny_model))


@pytest.fixture(scope="session")
def tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    return load_tokenizer(source.tokenizer)


@pytest.fixture
def work(tmp_path: Path) -> Work:
    """Returns what a stage's function is given, with a store and folders of its own."""
    output, scratch = tmp_path / "stage-output", tmp_path / "scratch"
    output.mkdir()
    scratch.mkdir()
    store = Store(str(tmp_path / "store"))
    return Work(store=store, label="test", output=output, scratch=scratch, runtime=Runtime(micro_batch=3))


@pytest.fixture
def published(work: Work, tmp_path: Path) -> Callable[..., ArtifactRef]:
    """Returns a function that publishes what ``fill`` writes into a folder, under a key of the artifact's kind."""

    def publish(
        kind: str, fill: Callable[[Path], object], key: str = "0", settings: Mapping[str, Any] | None = None
    ) -> ArtifactRef:
        folder = tmp_path / f"{kind}-{key}"
        folder.mkdir()
        fill(folder)
        lineage = Lineage(
            stage=kind,
            version=1,
            inputs={},
            settings=dict(settings or {}),
            packages={},
            device="cpu",
            run=None,
            seconds=0.0,
        )
        return work.store.publish(kind, key, folder, lineage)

    return publish
