"""``python -m flows plan``: what a run would take from the store, what it would compute, why, and at what cost.

The graph is described to a ``Planner`` instead of to Prefect. Nothing is computed, no weight is loaded beyond what
digesting a file that was not digested before needs, and the store is only read.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from inspect import signature
from textwrap import shorten
from typing import Any, Protocol

from rich.filesize import decimal

from flows.config import CompressConfig
from flows.estimates import Estimates
from flows.graph import build
from flows.prepared import Runner, prepare
from lsp_core.shapes import Cost
from storage.manifest import ArtifactRef
from storage.store import Store
from tasks.caching import Arguments, Source, Stage, references, split
from tasks.places import open_store
from tasks.rates import Rates, device_memory, device_rates, seconds
from tasks.reasons import begun, why

GIB = 2**30
CANNOT_FIT = 3  # exit status
SHOWN = 72  # characters of a reason in the table; the JSON has all
NOTES = (
    "peak: memory of each device, weights and tensors (on a CPU without the interpreter's own); train: all epochs, an "
    "early stop takes less, and the work of several processes is divided evenly; ranks not yet allocated are taken as "
    "uniform; lm-eval tasks, linear probes and downloads are not counted"
)


class Expected(ArtifactRef):
    """The artifact of a stage that has not run; ``awaits`` is what has to happen before its digest is known."""

    awaits: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One stage: ``state`` is hit, miss or unknown; the figures are None for a hit.

    ``peak_bytes`` is that of one device, of which the stage has ``processes``.
    """

    label: str
    key: str | None
    state: str
    reason: str
    read_bytes: int | None = None
    written_bytes: int | None = None
    flops: float | None = None
    seconds: float | None = None
    peak_bytes: int | None = None
    processes: int = 1
    fits: bool = True


class Estimator(Protocol):
    """What says what a stage costs."""

    def note(self, stage: Stage, key: str, arguments: Arguments, found: ArtifactRef | None) -> None:
        """Takes note of a stage that the graph describes."""
        ...

    def cost(self, stage: Stage, key: str, arguments: Arguments) -> Cost:
        """Returns what a stage that is not in the store costs."""
        ...


class NoEstimates:
    """Says nothing of costs, and costs no time."""

    def note(self, stage: Stage, key: str, arguments: Arguments, found: ArtifactRef | None) -> None: ...

    def cost(self, stage: Stage, key: str, arguments: Arguments) -> Cost:
        return Cost()


@dataclass(kw_only=True)
class Planner:
    """Records what would become of each stage that the graph describes."""

    store: Store
    estimates: Estimator
    costs: list[tuple[Step, Cost | None]] = field(default_factory=list)
    asked: dict[str, tuple[Stage, str, Arguments]] = field(default_factory=dict)  # of each label
    _refs: dict[str, ArtifactRef] = field(default_factory=dict)

    def run(self, stage: Stage, label: str = "", /, *, hints: Arguments | None = None, **arguments: Any) -> ArtifactRef:
        """Returns the artifact in the store, or a stand-in for the one that a run would make."""
        signature(stage.function).bind(None, **arguments, **(hints or {}))
        inputs, settings = split(arguments)
        key = stage.key(inputs, settings)  # of stand-ins where an input is one: it tells equal stages, no more
        if key in self._refs:
            return self._refs[key]
        label = f"{stage.name} {label}".strip()
        awaits = tuple(dict.fromkeys(_awaited(inputs)))
        found = None if awaits else self.store.find(stage.name, key)
        everything = {**arguments, **(hints or {})}
        self.estimates.note(stage, key, everything, found)
        ref: ArtifactRef
        if found is not None:
            step, cost, ref = Step(label=label, key=key, state="hit", reason=""), None, found
        else:
            cost = self.estimates.cost(stage, key, everything)
            self.asked[label] = stage, key, everything
            if awaits:
                step = Step(label=label, key=None, state="unknown", reason=f"unknown until {', '.join(awaits)}")
            else:
                reason = why(self.store, stage, inputs, settings) + begun(self.store, key)
                step = Step(label=label, key=key, state="miss", reason=reason)
            ref = Expected(
                kind=stage.name, key=key, uri="", digest=key, num_bytes=cost.written_bytes, awaits=awaits or (label,)
            )
        self.costs.append((step, cost))
        self._refs[key] = ref
        return ref


def states(store: Store, describe: Callable[[Runner], object]) -> list[Step]:
    """Returns what would become of each stage that ``describe`` describes, without its costs."""
    planner = Planner(store=store, estimates=NoEstimates())
    describe(planner)
    return [step for step, _ in planner.costs]


def plan(config: CompressConfig, *, device_gib: float | None = None, remeasure: bool = False) -> dict[str, Any]:
    """Returns the steps of a run, their cost on this device, and whether they fit into its memory.

    ``device_gib``: its memory, none: as found; ``remeasure``: its rates, even if they are on record.
    Errors: as ``prepare``.
    """
    prepared = prepare(config, partly=True)
    store = open_store(config.store, verify=config.verify, writable=False)
    estimates = Estimates(prepared, store)
    planner = Planner(store=store, estimates=estimates)
    build(planner, prepared)
    memory = device_memory(prepared.device) if device_gib is None else round(device_gib * GIB)
    due = any(cost is not None for _, cost in planner.costs)
    width = prepared.skeleton.config.get_text_config().hidden_size
    dtype = prepared.model.torch_dtype
    rates = device_rates(prepared.device, dtype, width=width, remeasure=remeasure) if due else None
    steps = [_costed(step, cost, rates, memory) for step, cost in planner.costs]
    remedies = [estimates.remedy(*planner.asked[step.label], memory) for step in steps if not step.fits]
    return {
        "model": config.model.name_or_path,
        "parameters": prepared.skeleton.num_parameters(),
        "store": store.uri,
        "device": prepared.device,
        "device_gib": memory / GIB,
        "rates": None if rates is None else asdict(rates),
        "fits": all(step.fits for step in steps),
        "remedies": list(dict.fromkeys(filter(None, remedies))),
        "seconds": sum(step.seconds or 0.0 for step in steps),
        "flops": sum(step.flops or 0.0 for step in steps),
        "read_bytes": sum(step.read_bytes or 0 for step in steps),
        "written_bytes": sum(step.written_bytes or 0 for step in steps),
        "peak_bytes": max((step.peak_bytes or 0 for step in steps), default=0),
        "stages": [asdict(step) for step in steps],
    }


def print_plan(content: dict[str, Any], *, as_json: bool) -> None:
    """Prints a plan as JSON, or as a table for people."""
    if as_json:
        print(json.dumps(content))
        return
    for line in plan_lines(content):
        print(line)


def plan_lines(content: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of a plan for people."""
    yield f"{content['model']}: {content['parameters']:,} parameters; store {content['store']}"
    yield ""
    width = max(len(step["label"]) for step in content["stages"])
    yield f"{'stage':{width}}  {'state':7} {'reads':>9} {'writes':>9} {'GFLOP':>9} {'time':>9} {'peak':>9}  why"
    for step in content["stages"]:
        reason = shorten(step["reason"], SHOWN, placeholder=" ...")
        yield f"{step['label']:{width}}  {step['state']:7} {_figures(step)}  {reason}".rstrip()
    states = [step["state"] for step in content["stages"]]
    counted = ", ".join(f"{states.count(state)} {state}" for state in ("hit", "miss", "unknown"))
    yield f"{'at most':{width}}  {'':7} {_figures(content)}  {counted}"
    yield ""
    memory = f"{content['device']} with {content['device_gib']:.1f} GiB"
    if content["rates"] is None:
        yield f"Everything is in the store; a run on {memory} computes nothing."
        return
    rates = content["rates"]
    yield f"{memory}: {rate_line(rates)}"
    yield NOTES + "."
    if not content["fits"]:
        large = [step["label"] for step in content["stages"] if not step["fits"]]
        remedies = [*content["remedies"], "lower micro_batch or calibration.sequence_length"]
        yield (
            f"DOES NOT FIT: {', '.join(large)}: {'; '.join(remedies)}; or use a device with "
            f"{content['peak_bytes'] / GIB:.1f} GiB."
        )


def rate_line(rates: dict[str, Any]) -> str:
    """Returns the sentence that states the rates which the times rest on."""
    speeds = {name: value for name, value in rates.items() if name.endswith("_per_second")}
    shown = ", ".join(f"{value:.3g} {name.removesuffix('_per_second')}/s" for name, value in speeds.items())
    return f"times by the rates measured on {rates['measured']} on {rates['device']}: {shown}; --remeasure renews them."


def _awaited(inputs: Arguments) -> Iterator[str]:
    for _, ref in references(inputs):
        if isinstance(ref, Expected):
            yield from ref.awaits
        elif isinstance(ref, Source) and ref.lacks is not None:
            yield ref.lacks


def _costed(step: Step, cost: Cost | None, rates: Rates | None, memory: int) -> Step:
    if cost is None or rates is None:
        return step
    return Step(
        label=step.label,
        key=step.key,
        state=step.state,
        reason=step.reason,
        read_bytes=cost.read_bytes,
        written_bytes=cost.written_bytes,
        flops=cost.flops + cost.head_flops + cost.flops64 + cost.solver_flops,
        seconds=seconds(cost, rates) / cost.processes,
        peak_bytes=cost.peak_bytes,
        processes=cost.processes,
        fits=cost.peak_bytes <= memory,
    )


def _figures(step: dict[str, Any]) -> str:
    if step["read_bytes"] is None:
        return " ".join(f"{'-':>9}" for _ in range(5))
    texts = [decimal(step["read_bytes"]), decimal(step["written_bytes"]), f"{step['flops'] / 1e9:.3g}"]
    texts += [_duration(step["seconds"]), f"{step['peak_bytes'] / GIB:.2f} GiB"]
    return " ".join(f"{text:>9}" for text in texts)


def _duration(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value / 60:.0f} min" if value < 6000 else f"{value / 3600:.1f} h"
