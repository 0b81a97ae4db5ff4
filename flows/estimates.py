"""What each stage of the graph costs: its arguments, put in the terms of ``lsp_core.costs``."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from flows.graph import Prepared, test_length
from lsp_core.allocation import uniform_parameters
from lsp_core.costs import (
    allocate_cost,
    bases_cost,
    calibrate_cost,
    evaluate_cost,
    gather_cost,
    measure_cost,
    merge_cost,
    teacher_cost,
    train_cost,
)
from lsp_core.shapes import Cost, shapes_of
from storage.grid import tokens_shape
from storage.manifest import ArtifactRef
from storage.store import Store
from tasks.allocate import ALLOCATION, allocate
from tasks.artifacts import read_json
from tasks.bases import bases
from tasks.caching import Arguments, Stage
from tasks.calibrate import calibrate, calibrate_test
from tasks.evaluate import evaluate
from tasks.gather import gather
from tasks.measure import measure
from tasks.merge import merge
from tasks.report import report
from tasks.text import TextOrigin, text_bytes
from tasks.train import teacher, train

BYTES_PER_TOKEN = 4  # of text, roughly; no more is known before it is tokenized
HUB_TEXT_BYTES = 2_000_000  # taken for a hub dataset, whose size is not known here
REPORT_BYTES = 500_000


class Estimates:
    """The costs of one configuration's stages; what the store has already told of an artifact is used."""

    def __init__(self, prepared: Prepared, store: Store) -> None:
        self.prepared = prepared
        self.store = store
        self.shapes = shapes_of(
            prepared.skeleton,
            dtype=prepared.model.torch_dtype,
            stored_bytes=prepared.model.num_bytes or None,
            on_host=prepared.device == "cpu",
        )
        self.precision_bytes = torch.finfo(getattr(torch, prepared.precision)).bits // 8
        self._removed: dict[str, Mapping[str, int]] = {}  # by the key of an allocation, a training or a merge
        self._tokens: dict[str, tuple[int, int]] = {}  # sequences and length by the key of token blocks
        self._costs: dict[Stage, Callable[[Arguments, str], Cost]] = {
            calibrate: self._calibrate,
            calibrate_test: self._calibrate,
            gather: self._gather,
            bases: self._bases,
            measure: self._measure,
            allocate: self._allocate,
            teacher: self._teacher,
            train: self._train,
            merge: self._merge,
            evaluate: self._evaluate,
            report: lambda _, __: Cost(written_bytes=REPORT_BYTES),
        }

    def cost(self, stage: Stage, key: str, arguments: Arguments) -> Cost:
        """Returns what it costs to compute ``stage``."""
        return self._costs[stage](arguments, key)

    def note(self, stage: Stage, key: str, arguments: Arguments, found: ArtifactRef | None) -> None:
        """Keeps what later stages' costs depend on: ranks, and numbers of tokens."""
        if stage in (calibrate, calibrate_test):
            self._tokens[key] = self._expected_tokens(arguments) if found is None else tokens_shape(self._folder(found))
        elif stage is allocate:
            if found is None:
                self._removed[key] = uniform_parameters(self.prepared.units, arguments["ratio"]).removed
            else:
                self._removed[key] = read_json(self._folder(found) / ALLOCATION)["removed"]
        elif stage is train:
            self._removed[key] = self._removed[arguments["allocation"].key]
        elif stage is merge:
            self._removed[key] = self._removed[arguments["projectors"].key]

    def _folder(self, ref: ArtifactRef) -> Path:
        return self.store.local(ref)

    def _expected_tokens(self, arguments: Arguments) -> tuple[int, int]:
        length = arguments["length"]
        if "take" in arguments:
            return arguments["take"], length
        tokens = self._text_bytes(arguments["text"]) // BYTES_PER_TOKEN
        return max(1, min(tokens, arguments["max_tokens"] or tokens) // length), length

    def _text_bytes(self, text: TextOrigin) -> int:
        return text_bytes(text) if text.path is not None else HUB_TEXT_BYTES

    def _calibrate(self, arguments: Arguments, key: str) -> Cost:
        sequences, length = self._tokens[key]
        size = self._text_bytes(arguments["text"])
        if "pool" in arguments:  # text is read until there are that many windows
            size = min(size, arguments["pool"] * length * BYTES_PER_TOKEN)
        return calibrate_cost(sequences=sequences, length=length, text_bytes=size)

    def _gather(self, arguments: Arguments, _: str) -> Cost:
        return gather_cost(
            self.shapes, self.prepared.units, **self._batches(arguments["tokens"]), precision_bytes=self.precision_bytes
        )

    def _bases(self, arguments: Arguments, _: str) -> Cost:
        return bases_cost(
            self.shapes, self.prepared.units, precision_bytes=self.precision_bytes, init=arguments["init"]
        )

    def _measure(self, arguments: Arguments, _: str) -> Cost:
        return measure_cost(
            self.shapes,
            self.prepared.units,
            points=arguments["points"],
            **self._batches(arguments["tokens"]),
            precision_bytes=self.precision_bytes,
        )

    def _allocate(self, _: Arguments, __: str) -> Cost:
        return allocate_cost(self.prepared.units, points=self.prepared.points)

    def _teacher(self, arguments: Arguments, _: str) -> Cost:
        return teacher_cost(self.shapes, **self._batches(arguments["tokens"]))

    def _train(self, arguments: Arguments, key: str) -> Cost:
        settings = self.prepared.config.training
        return train_cost(
            self.shapes,
            self.prepared.units,
            self._removed[key],
            **self._batches(arguments["tokens"]),
            epochs=arguments["epochs"],
            batch_sequences=settings.batch_sequences,
            validation_sequences=self._tokens[arguments["validation"].key][0],
            modulation_epochs=settings.modulation_epochs,
            dropout=settings.dropout,
            precision_bytes=self.precision_bytes,
            objective=arguments["objective"],
            teacher_kept=arguments["dense_outputs"] is not None,
        )

    def _merge(self, _: Arguments, key: str) -> Cost:
        return merge_cost(self.shapes, self.prepared.units, self._removed[key], precision_bytes=self.precision_bytes)

    def _evaluate(self, arguments: Arguments, _: str) -> Cost:
        merged, allocation = arguments.get("checkpoint"), arguments.get("allocation")
        source = merged or allocation
        kl_tokens = arguments.get("kl_tokens")
        return evaluate_cost(
            self.shapes,
            self.prepared.units,
            **self._batches(arguments["tokens"]),
            removed=None if source is None else self._removed[source.key],
            checkpoint=merged is not None,
            kl_sequences=0 if kl_tokens is None else self._tokens[kl_tokens.key][0],
            kl_length=test_length(self.prepared.config) if kl_tokens is None else self._tokens[kl_tokens.key][1],
            precision_bytes=self.precision_bytes,
        )

    def _batches(self, tokens: ArtifactRef) -> dict[str, Any]:
        sequences, length = self._tokens[tokens.key]
        return {"sequences": sequences, "length": length, "micro_batch": self.prepared.config.micro_batch}
