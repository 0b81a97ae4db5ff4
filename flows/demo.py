"""The demo: the committed model, the text that every Python carries, three ratios and both objectives."""

import logging
from pathlib import Path
from typing import Any

from flows.compress import compress
from flows.config import (
    AllocationConfig,
    CalibrationConfig,
    CompressConfig,
    EvaluationConfig,
    ModelConfig,
    Target,
    TextSource,
    TrainingConfig,
    ValidationConfig,
)
from flows.demo_text import folder_documents, python_documents, write_splits
from flows.demo_training import END_OF_TEXT, DemoTraining, train_demo_model
from flows.sources import DecodeConfig
from tasks.report import side_by_side, table

log = logging.getLogger(__name__)

COMMITTED_MODEL = Path(__file__).with_name("demo_model")
TARGETS = (
    Target(ratio=0.3, epochs=1),
    Target(ratio=0.5, epochs=1),
    Target(ratio=0.7),
    Target(ratio=0.7, objective="task"),
)
DECODED_AT = 192  # tokens, of the 256 that the model has positions for
PROMPT = 'def read(self, size=-1):\n    """Read and return up to size bytes, where size is an int.\n'


def demo(*, text: Path | None, retrain: bool, output: Path, store: str) -> dict[str, Any]:
    """Compresses the demo model to every target, prints the table and a continued prompt; returns the report.

    ``text``: a folder to use instead of Python's own text; ``retrain``: train the model on that text first.
    Errors: ``ValueError`` if the folder holds too little text.
    """
    documents = python_documents() if text is None else folder_documents(text)
    splits = write_splits(documents, output / "text")
    model = COMMITTED_MODEL
    if retrain:
        model = train_demo_model(splits, output / "model", output / "model-training", DemoTraining())
    config = demo_config(model, splits, output=output, store=store)
    content = compress(config)
    print("\n" + "\n".join(table(content)))
    print("\n" + side_by_side(content, max(target.ratio for target in TARGETS)))
    print(f"\nreport, plots and checkpoints: {output}")
    return content


def demo_config(model: Path, splits: dict[str, Path], *, output: Path, store: str) -> CompressConfig:
    """Returns the demo's configuration for the splits that ``write_splits`` made."""
    sources = {split: TextSource(path=path, separator=END_OF_TEXT) for split, path in splits.items()}
    return CompressConfig(
        model=ModelConfig(name_or_path=str(model), dtype="float32"),
        targets=TARGETS,
        calibration=CalibrationConfig(text=sources["train"], sequences=768, sequence_length=256),
        allocation=AllocationConfig(sequences=16),
        validation=ValidationConfig(text=sources["validation"], sequences=48),
        training=TrainingConfig(epochs=3, batch_sequences=8, learning_rate=2e-3, modulation_epochs=0.1),
        evaluation=EvaluationConfig(
            text=sources["test"],
            max_tokens=40_000,
            bos="none",
            tasks=(),
            prompt=PROMPT,
            decode=DecodeConfig(contexts=(DECODED_AT,)),
        ),
        store=store,
        output=output,
        device="cpu",
        micro_batch=8,
    )
