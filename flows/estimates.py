"""What each stage of the graph costs: its arguments, put in the terms of ``lsp_core.costs``."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flows.prepared import Prepared
from lsp_core.allocation import find_limits, largest_uniform_ratio, uniform_parameters
from lsp_core.costs import (
    allocate_cost,
    bases_cost,
    calibrate_cost,
    evaluate_cost,
    fisher_cost,
    gather_cost,
    images_cost,
    joint_cost,
    measure_cost,
    merge_cost,
    select_cost,
)
from lsp_core.decode_cache import full_cache_shapes
from lsp_core.decode_settings import LATENT, MADE_READY, TUNED
from lsp_core.decode_step import COPY_BYTES, COPY_RUNS, WARM_STEPS
from lsp_core.shapes import Cost, shapes_of
from lsp_core.training_costs import teacher_cost, train_cost
from storage.digest import canonical_json
from storage.grid import tokens_shape
from storage.manifest import ArtifactRef
from storage.store import Store
from tasks.allocate import ALLOCATION, allocate, allocate_like
from tasks.artifacts import read_json
from tasks.bases import bases
from tasks.caching import Arguments, Stage
from tasks.calibrate import calibrate, calibrate_test
from tasks.decode import decode, settings_of
from tasks.evaluate import evaluate
from tasks.fisher import fisher
from tasks.gather import gather
from tasks.images import calibrate_images, count_images
from tasks.labelled import calibrate_labelled
from tasks.measure import measure
from tasks.merge import merge
from tasks.report import report
from tasks.select import select
from tasks.text import TextOrigin, text_bytes
from tasks.train import teacher, train
from tasks.within import MEASUREMENTS, allocate_within

BYTES_PER_TOKEN = 4  # of text, roughly; no more is known before it is tokenized
DOCUMENT_TOKENS = 100  # of a document that an encoder reads: about a paragraph
HUB_TEXT_BYTES = 2_000_000  # taken for a hub dataset, whose size is not known here
HUB_IMAGES = 10_000  # likewise, where it has no cap
REPORT_BYTES = 500_000
BANDWIDTH = {"cpu": 1e10, "cuda": 1e12}  # bytes a second that a decode step reads, roughly
OFFLOADED = (gather, bases, measure, allocate_within, teacher, evaluate)
PROCESSES = (2, 4, 8, 16, 32, 64)  # tried where a training does not fit
COMPILE_SECONDS = 120  # of one tuned arm at one context, roughly


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
        self.offload = prepared.config.offload
        self.precision_bytes = torch.finfo(getattr(torch, prepared.precision)).bits // 8
        self._removed: dict[str, Mapping[str, int]] = {}  # by the key of an allocation, a training or a merge
        self._tokens: dict[str, tuple[int, int]] = {}  # sequences and length by the key of token blocks
        self._known: dict[str, Cost] = {}  # by the arguments that they were figured from
        self._costs: dict[Stage, Callable[[Arguments, str], Cost]] = {
            calibrate: self._calibrate,
            calibrate_test: self._calibrate,
            calibrate_labelled: self._calibrate,
            calibrate_images: self._calibrate_images,
            gather: self._gather,
            bases: self._bases,
            measure: self._measure,
            fisher: self._fisher,
            allocate: self._allocate,
            allocate_like: self._allocate,
            allocate_within: self._allocate_within,
            teacher: self._teacher,
            train: self._train,
            select: self._select,
            merge: self._merge,
            evaluate: self._evaluate,
            decode: self._decode,
            report: lambda _, __: Cost(written_bytes=REPORT_BYTES),
        }

    def cost(self, stage: Stage, key: str, arguments: Arguments) -> Cost:
        """Returns what it costs to compute ``stage``."""
        return self._costs[stage](arguments, key)

    def remedy(self, stage: Stage, key: str, arguments: Arguments, memory: int) -> str | None:
        """Returns the setting that makes ``stage`` fit into ``memory`` bytes a device, None where there is none."""
        config = self.prepared.config
        if stage in OFFLOADED and not (config.offload or self.shapes.on_host):
            other = self._supposing({"offload": True})
            return "set offload: true" if other.cost(stage, key, arguments).peak_bytes <= memory else None
        if stage is not train:
            return None
        most, *fewer = reversed(PROCESSES)
        if not self._shards_fit(most, key, arguments, memory):
            return None
        count = next((count for count in reversed(fewer) if self._shards_fit(count, key, arguments, memory)), most)
        return f"set training.sharding: sharded and training.num_processes: {count}"

    def _shards_fit(self, count: int, key: str, arguments: Arguments, memory: int) -> bool:
        changed = {"num_processes": count, "num_nodes": 1, "sharding": "sharded"}
        training = self.prepared.config.training.model_copy(update=changed)
        return self._supposing({"training": training}).cost(train, key, arguments).peak_bytes <= memory

    def _supposing(self, changed: Mapping[str, Any]) -> "Estimates":
        """Returns the estimates of the same stages under other settings."""
        config = self.prepared.config.model_copy(update=dict(changed))
        other = Estimates(replace(self.prepared, config=config), self.store)
        other._removed, other._tokens = self._removed, self._tokens
        return other

    def note(self, stage: Stage, key: str, arguments: Arguments, found: ArtifactRef | None) -> None:
        """Keeps what later stages' costs depend on: ranks, and numbers of tokens."""
        if stage is calibrate_images:
            self._tokens[key] = self._expected_images(arguments), self.shapes.positions
        elif stage is calibrate_labelled:
            self._tokens[key] = self._expected_tokens(arguments)
        elif stage in (calibrate, calibrate_test):
            self._tokens[key] = self._expected_tokens(arguments) if found is None else tokens_shape(self._folder(found))
        elif stage in (allocate, allocate_like, allocate_within):
            if found is None:
                self._removed[key] = self._expected_ranks(stage, arguments)
            else:
                self._removed[key] = read_json(self._folder(found) / ALLOCATION)["removed"]
        elif stage is train:
            self._removed[key] = self._removed[arguments["allocation"].key]
        elif stage is select:
            self._removed[key] = self._removed[arguments["trainings"][0].key]
        elif stage is merge:
            self._removed[key] = self._removed[arguments["projectors"].key]

    def _expected_ranks(self, stage: Stage, arguments: Arguments) -> Mapping[str, int]:
        """Uniform ranks; where a divergence decides the ratio, at half of the largest."""
        if stage is allocate_like:
            return self._removed[arguments["allocation"].key]
        units = self.prepared.units
        limits = find_limits(units, arguments.get("min_rank", {}), arguments.get("keep_dense", []))
        ratio = arguments.get("ratio", largest_uniform_ratio(units, limits) / 2)
        return uniform_parameters(units, ratio, limits=limits).removed

    def _folder(self, ref: ArtifactRef) -> Path:
        return self.store.local(ref)

    def _expected_tokens(self, arguments: Arguments) -> tuple[int, int]:
        length = arguments["length"]
        if "take" in arguments:
            return sum(_listed(arguments["take"])), length
        tokens = self._text_bytes(arguments["text"]) // BYTES_PER_TOKEN
        tokens = min(tokens, arguments.get("max_tokens") or tokens)
        filled = length if arguments.get("packing") != "documents" else min(length, DOCUMENT_TOKENS)
        return max(1, tokens // filled), length

    def _expected_images(self, arguments: Arguments) -> int:
        if arguments["take"] is not None:
            return int(arguments["take"])
        return sum(
            count_images(origin, arguments["part"]) or origin.cap or HUB_IMAGES for origin in arguments["images"]
        )

    def _calibrate_images(self, _: Arguments, key: str) -> Cost:
        return images_cost(self.shapes, images=self._tokens[key][0])

    def _text_bytes(self, text: TextOrigin) -> int:
        return text_bytes(text) if text.path is not None else HUB_TEXT_BYTES

    def _calibrate(self, arguments: Arguments, key: str) -> Cost:
        sequences, length = self._tokens[key]
        sizes = [self._text_bytes(text) for text in _listed(arguments["text"])]
        if "pool" in arguments:  # text is read until there are that many windows
            pools = _listed(arguments["pool"])
            sizes = [min(size, pool * length * BYTES_PER_TOKEN) for size, pool in zip(sizes, pools, strict=True)]
        return calibrate_cost(sequences=sequences, length=length, text_bytes=sum(sizes))

    def _gather(self, arguments: Arguments, _: str) -> Cost:
        batches = self._batches(arguments["tokens"])
        batches["sequences"] = min(batches["sequences"], arguments.get("sequences", batches["sequences"]))
        return self._once(gather_cost, **batches, precision_bytes=self.precision_bytes, offload=self.offload)

    def _bases(self, arguments: Arguments, _: str) -> Cost:
        return self._once(
            bases_cost, precision_bytes=self.precision_bytes, init=arguments["init"], offload=self.offload
        )

    def _measure(self, arguments: Arguments, _: str) -> Cost:
        return self._once(
            measure_cost,
            points=arguments["points"],
            **self._batches(arguments["tokens"]),
            precision_bytes=self.precision_bytes,
            offload=self.offload,
        )

    def _fisher(self, arguments: Arguments, _: str) -> Cost:
        tokens = self._batches(arguments["tokens"])
        return self._once(
            fisher_cost,
            points=arguments["points"],
            sequences=tokens["sequences"],
            length=tokens["length"],
            precision_bytes=self.precision_bytes,
        )

    def _allocate_within(self, arguments: Arguments, key: str) -> Cost:
        return self._once(
            joint_cost,
            removed=self._removed[key],
            measurements=MEASUREMENTS,
            **self._batches(arguments["tokens"]),
            precision_bytes=self.precision_bytes,
            offload=self.offload,
        )

    def _allocate(self, _: Arguments, __: str) -> Cost:
        return allocate_cost(self.prepared.units, points=self.prepared.points)

    def _teacher(self, arguments: Arguments, _: str) -> Cost:
        return teacher_cost(self.shapes, **self._batches(arguments["tokens"]), offload=self.offload)

    def _train(self, arguments: Arguments, key: str) -> Cost:
        settings = self.prepared.config.training
        return self._once(
            train_cost,
            removed=self._removed[key],
            **self._batches(arguments["tokens"]),
            epochs=arguments["epochs"],
            batch_sequences=settings.batch_sequences,
            epoch_sequences=settings.epoch_sequences,
            validation_sequences=self._tokens[arguments["validation"].key][0],
            modulation_epochs=settings.modulation_epochs,
            dropout=settings.dropout,
            precision_bytes=self.precision_bytes,
            objective=arguments["objective"],
            teacher_kept=arguments["dense_outputs"] is not None,
            processes=settings.num_processes * settings.num_nodes,
            sharded=settings.sharding == "sharded",
        )

    def _select(self, _: Arguments, key: str) -> Cost:
        return select_cost(self.shapes, self.prepared.units, self._removed[key])

    def _merge(self, _: Arguments, key: str) -> Cost:
        return self._once(merge_cost, removed=self._removed[key], precision_bytes=self.precision_bytes)

    def _decode(self, arguments: Arguments, _: str) -> Cost:
        """Counts every arm as dense: a step reads the weights and the cache, which takes longer than its FLOPs.

        The peak: the weights, on a GPU also the copies that four arms make of theirs, the full-width cache and two
        with latents, each at most as large, or in their place the two ends of the copy that bandwidth is measured by.
        """
        names = ("contexts", "batch", "dtype", "tuned")
        settings = settings_of("", **{name: arguments[name] for name in names}, device=self.prepared.device)
        kind = torch.device(settings.place).type
        measurable = [arm for arm in settings.arms if not arm.endswith(TUNED) or kind == "cuda"]
        tuned = sum(arm.endswith(TUNED) and arm.removesuffix(TUNED) not in LATENT for arm in measurable)
        arms = len(measurable) - (len(LATENT) if tuned else 0)
        caches = [self._cache_bytes(arguments["batch"], context) for context in arguments["contexts"]]
        steps = arms * (settings.rounds * settings.tokens + WARM_STEPS + 1)
        read = sum(self.shapes.weight_bytes + cache for cache in caches) * steps
        copied = 2 * COPY_BYTES[kind] * (COPY_RUNS * len(caches))
        compiling = COMPILE_SECONDS * tuned * len(caches)
        return Cost(
            flops=2.0 * self.shapes.parameters * steps * arguments["batch"] * len(caches),
            peak_bytes=self.shapes.weight_bytes * (1 if kind == "cpu" else 1 + len(MADE_READY))
            + max(3 * max(caches), 2 * COPY_BYTES[kind]),
            written_bytes=REPORT_BYTES,
            more_seconds=(read + copied) / BANDWIDTH[kind] + compiling,
        )

    def _cache_bytes(self, batch: int, context: int) -> int:
        shapes = full_cache_shapes(self.prepared.skeleton.config, batch, context)
        return sum(shape.numel() for shape in shapes) * self.shapes.dtype.itemsize

    def _evaluate(self, arguments: Arguments, _: str) -> Cost:
        merged, allocation = arguments.get("checkpoint"), arguments.get("allocation")
        source = merged or allocation
        kl_tokens = arguments.get("kl_tokens")
        return self._once(
            evaluate_cost,
            **self._batches(arguments["tokens"]),
            removed=None if source is None else self._removed[source.key],
            checkpoint=merged is not None,
            kl_sequences=0 if kl_tokens is None else self._tokens[kl_tokens.key][0],
            kl_length=self.prepared.config.test_length if kl_tokens is None else self._tokens[kl_tokens.key][1],
            precision_bytes=self.precision_bytes,
            offload=self.offload,
        )

    def _once(self, figure: Callable[..., Cost], **arguments: Any) -> Cost:
        """Returns a cost of this model's units, figured once for equal arguments: a dry run takes seconds."""
        known = canonical_json([figure.__name__, arguments])
        if known not in self._known:
            self._known[known] = figure(self.shapes, self.prepared.units, **arguments)
        return self._known[known]

    def _batches(self, tokens: ArtifactRef) -> dict[str, Any]:
        sequences, length = self._tokens[tokens.key]
        return {"sequences": sequences, "length": length, "micro_batch": self.prepared.config.micro_batch}


def _listed(value: Any) -> list[Any]:
    """Returns what a mix of texts has for each, or the one value of a single text."""
    return value if isinstance(value, list) else [value]
