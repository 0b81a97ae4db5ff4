"""Running stages as Prefect tasks.

The key is computed before the Prefect task is called, so that an input that cannot be hashed raises. Whether the task
is a hit is the store's word, not Prefect's: where the store has the artifact, Prefect's own record is written to match,
and the run shows as ``Cached``; where it has not, no record is read or written, of a failure neither.

States: ``Cached``, ``Completed``, ``Failed``; ``TimedOut`` after the time that a stage may take. Only what may pass by
itself, an error of the store or the hub, is tried again.
"""

import logging
import time
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any
from uuid import uuid4

from huggingface_hub.errors import HTTPError, RepositoryNotFoundError
from prefect import task
from prefect.cache_policies import NO_CACHE, CachePolicy
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import FlowRunContext, TaskRunContext
from prefect.filesystems import LocalFileSystem, RemoteFileSystem
from prefect.results import ResultStore
from prefect.serializers import JSONSerializer
from prefect.task_engine import TaskRunTimeoutError
from prefect.tasks import Task

from storage import faults
from storage.faults import StoreUnavailable
from storage.manifest import ArtifactRef, RunName
from storage.runs import Needed, RunRecord, new_run, write_run
from storage.store import Store
from tasks.caching import Arguments, Runtime, Stage, clear_left, split
from tasks.fanout import Workers
from tasks.places import open_store, results_storage
from tasks.reasons import begun, why

log = logging.getLogger(__name__)

RETRY_DELAYS = [2.0, 20.0]  # seconds
PLAIN_JSON = JSONSerializer(object_encoder=None, object_decoder=None)  # the default imports the class that JSON names


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    """What became of one stage in one run: ``state`` is ``Completed`` or ``Cached``; ``reason`` says why it ran."""

    name: str
    label: str
    key: str
    state: str
    seconds: float
    reason: str | None


class StageTimeout(TimeoutError):  # noqa: N818  (as its state is named)
    """A stage that took longer than it may; the work that it has kept is gone on from."""


class StoreDecides(CachePolicy):
    """The key that the caller computed; it never depends on the run or on the code's text."""

    def compute_key(
        self, task_ctx: TaskRunContext, inputs: dict[str, Any], flow_parameters: dict[str, Any], **kwargs: Any
    ) -> str:
        return _result_key(inputs["key"])


def may_pass(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """Whether a failure may pass by itself: an error of the store or the hub, not a wrong value or too little time."""
    error = state.data
    if not isinstance(error, BaseException) or isinstance(error, (RepositoryNotFoundError, TaskRunTimeoutError)):
        return False
    return isinstance(error, (StoreUnavailable, HTTPError)) or faults.may_pass(error)


@dataclass(kw_only=True)
class Stages:
    """Runs stages against the store at ``place`` and records what became of each.

    ``timeout_minutes``: how long one attempt at a stage may take; None: as long as it does. ``workers``: who shares the
    work of stages that can be shared out; None: each stage does all of its own.
    """

    place: str
    runtime: Runtime
    verify: bool = False
    timeout_minutes: float | None = None
    workers: Workers | None = None
    records: list[StageRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store: Store = open_store(self.place, verify=self.verify)
        self.run_record: RunRecord = _this_run()
        self._refs: dict[str, ArtifactRef] = {}
        self._results = results_storage(self.place, self.store)

    def run(self, stage: Stage, label: str = "", /, *, hints: Arguments | None = None, **arguments: Any) -> ArtifactRef:
        """Runs ``stage``, or takes its artifact from the store; returns the reference. A second call does nothing.

        ``label`` tells two runs of one stage apart; ``hints`` are arguments that cannot change the result, and are in
        no key. Errors: whatever the stage raises; ``StageTimeout``.
        """
        hints = hints or {}
        signature(stage.function).bind(None, **arguments, **hints)
        inputs, settings = split(arguments)
        key = stage.key(inputs, settings)
        if key in self._refs:
            return self._refs[key]
        label = f"{stage.name} {label}".strip()
        started = time.monotonic()
        found = self.store.find(stage.name, key)
        self._need(stage.name, key, on_record=found is None)
        reason, shared_seconds = None, 0.0
        if found is None:
            reason = why(self.store, stage, inputs, settings, self.run_record.id) + begun(self.store, key)
            log.info("%s: computing (%s)", label, reason)
            if self.workers is not None:
                work = {**inputs, **settings, **hints}
                self.workers.share_out(stage, self.store, key, label, self.place, self.runtime, work, self._seconds())
            shared_seconds = time.monotonic() - started
        else:
            clear_left(self.store, key)
            self._write_result(found, key)
        state = self._task_of(stage, cached=found is not None)(
            key,
            label,
            self.place,
            self.verify,
            self.runtime,
            inputs,
            settings,
            hints,
            self._run_name(),
            shared_seconds,
            return_state=True,
        )
        if isinstance(state.data, TaskRunTimeoutError):
            raise StageTimeout(
                f"{label} took longer than stage_timeout_minutes={self.timeout_minutes:g}: its work is kept; raise the "
                "setting and run again, it goes on from there"
            )
        ref = ArtifactRef.model_validate(state.result(raise_on_failure=True))
        seconds = round(time.monotonic() - started, 2)
        self.records.append(
            StageRecord(name=stage.name, label=label, key=key, state=state.name, seconds=seconds, reason=reason)
        )
        log.info("%s: %s", label, "cached" if state.name == "Cached" else f"{seconds:.1f} s")
        self._refs[key] = ref
        return ref

    def close(self) -> None:
        """Puts on record that this run is at its end, and what it needed."""
        self.run_record = self.run_record.model_copy(update={"finished": True})
        write_run(self.store, self.run_record)

    def _task_of(self, stage: Stage, *, cached: bool) -> Task[..., Any]:
        """Returns ``stage`` as a task: one that reads Prefect's record, or one that computes and leaves none."""

        def body(
            key: str,
            label: str,
            place: str,
            verify: bool,
            runtime: Runtime,
            inputs: Arguments,
            settings: Arguments,
            hints: Arguments,
            run: RunName,
            shared_seconds: float,
        ) -> dict[str, Any]:
            store = open_store(place, verify=verify)
            made = stage.compute(store, key, label, runtime, inputs, settings, hints, run, shared_seconds)
            return made.model_dump()

        body.__doc__ = stage.__doc__
        return task(
            body,
            name=stage.name,
            task_run_name="{label}",
            version=str(stage.version),
            cache_policy=StoreDecides() if cached else NO_CACHE,
            persist_result=cached,
            refresh_cache=False,
            result_storage=self._results,
            result_serializer=PLAIN_JSON,
            cache_result_in_memory=False,
            timeout_seconds=self._seconds(),
            retries=len(RETRY_DELAYS),
            retry_delay_seconds=RETRY_DELAYS,
            retry_condition_fn=may_pass,
        )

    def _seconds(self) -> float | None:
        """Returns how long an attempt at a stage may take."""
        return None if self.timeout_minutes is None else 60 * self.timeout_minutes

    def _need(self, kind: str, key: str, *, on_record: bool) -> None:
        needs = (*self.run_record.needs, Needed(kind=kind, key=key))
        self.run_record = self.run_record.model_copy(update={"needs": needs})
        if on_record:  # before hours of work that gc must not touch
            write_run(self.store, self.run_record)

    def _run_name(self) -> RunName:
        return RunName(id=self.run_record.id, name=self.run_record.name)

    def _write_result(self, ref: ArtifactRef, key: str) -> None:
        """Writes Prefect's record of a result, whatever is there: a record that somebody else wrote is never read."""
        storage: Any = self._results
        if isinstance(storage, Path):
            storage = LocalFileSystem(basepath=str(storage))
        assert isinstance(storage, (LocalFileSystem, RemoteFileSystem))
        results = ResultStore(result_storage=storage, serializer=PLAIN_JSON, cache_result_in_memory=False)
        record = results.create_result_record(ref.model_dump(), key=_result_key(key))
        self.store.files.write(_result_key(key), record.serialize())


def _result_key(key: str) -> str:
    return f"results/{key}"


def _this_run() -> RunRecord:
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return new_run(uuid4().hex, "without a flow")
    return new_run(str(context.flow_run.id), context.flow_run.name)
