"""Stages: functions whose output is kept in the store under a key made of everything that can change it.

The key is computed before the Prefect task is called, so that an input that cannot be hashed raises. Whether the task
is a hit is the store's word, not Prefect's: where the store has the artifact, Prefect's own record is written to match,
and the run shows as ``Cached``; where it has not, the record is overwritten.
"""

import errno
import fcntl
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HTTPError, RepositoryNotFoundError
from prefect import task
from prefect.cache_policies import CachePolicy
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.filesystems import LocalFileSystem
from prefect.results import ResultStore
from prefect.serializers import JSONSerializer
from prefect.tasks import Task
from pydantic import BaseModel, ConfigDict

from storage.digest import stage_key
from storage.store import ArtifactRef, Store
from tasks.progress import Progress
from tasks.versions import recorded_version

log = logging.getLogger(__name__)

Arguments = dict[str, Any]
RETRY_DELAYS = [2.0, 20.0]  # seconds


class Source(BaseModel):
    """Something outside the store that a stage reads; ``digest`` stands for its content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str


class Runtime(BaseModel):
    """Settings that change speed and memory but not the result, and are therefore in no key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str = "cpu"
    micro_batch: int = 4
    task_batch_size: int = 8


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a stage's function is given beside its inputs and settings.

    ``output``: an empty folder, published as the artifact when the function returns; ``scratch``: a folder that
    survives a kill, for work that a second run continues.
    """

    store: Store
    label: str
    output: Path
    scratch: Path
    runtime: Runtime

    def folder(self, ref: ArtifactRef) -> Path:
        """Returns the folder with the files of ``ref``."""
        return self.store.local(ref)

    def progress(self) -> Progress:
        """Returns a progress display for this stage."""
        return Progress(self.label)

    def keep(self) -> None:
        """Makes what ``scratch`` holds now outlive this machine; call it whenever more work is worth keeping."""


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    """What became of one stage in one run: ``state`` is ``Completed`` or ``Cached``."""

    name: str
    label: str
    key: str
    state: str
    seconds: float


class StoreDecides(CachePolicy):
    """The key that the caller computed; it never depends on the run or on the code's text."""

    def compute_key(
        self, task_ctx: TaskRunContext, inputs: dict[str, Any], flow_parameters: dict[str, Any], **kwargs: Any
    ) -> str:
        key: str = inputs["key"]
        return key


def may_pass(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """Whether a failure may pass by itself: an input/output error of the store or the hub, never a wrong value."""
    error = state.data
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return False
    lasting = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, RepositoryNotFoundError)
    return isinstance(error, (OSError, HTTPError)) and not isinstance(error, lasting)


class Stage:
    """One stage: a function of references and settings that fills ``Work.output``, its version, and its Prefect task.

    Arguments that hold references are the inputs, all others the settings; both make the key. ``version`` rises with
    every change of the function, or of what it calls, that changes its output.
    """

    def __init__(self, function: Callable[..., None], version: int, name: str | None = None) -> None:
        self.name = name or function.__name__
        self.version = version
        self.function = function
        self.__doc__ = function.__doc__

        def body(
            key: str,
            label: str,
            store_uri: str,
            runtime: Runtime,
            inputs: Arguments,
            settings: Arguments,
            hints: Arguments,
        ) -> ArtifactRef:
            return self._compute(Store(store_uri), key, label, runtime, inputs, settings, hints)

        body.__doc__ = function.__doc__
        self.task = task(
            body,
            name=self.name,
            task_run_name="{label}",
            version=str(version),
            cache_policy=StoreDecides(),
            persist_result=True,
            result_serializer="json",
            cache_result_in_memory=False,
            retries=len(RETRY_DELAYS),
            retry_delay_seconds=RETRY_DELAYS,
            retry_condition_fn=may_pass,
        )

    def key(self, inputs: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
        """Returns the key of this stage for these inputs and settings.

        Errors: ``TypeError`` naming the setting that is not plain JSON.
        """
        return stage_key(self.name, self.version, _digests(inputs), settings)

    def _compute(
        self,
        store: Store,
        key: str,
        label: str,
        runtime: Runtime,
        inputs: Arguments,
        settings: Arguments,
        hints: Arguments,
    ) -> ArtifactRef:
        scratch = store.work_folder(key)
        with _alone(scratch.with_name(scratch.name + ".lock")):
            made_meanwhile = store.find(self.name, key)
            if made_meanwhile is not None:
                return made_meanwhile
            scratch.mkdir(parents=True, exist_ok=True)
            output = scratch / "output"
            shutil.rmtree(output, ignore_errors=True)
            output.mkdir()
            started = time.monotonic()
            work = Work(store=store, label=label, output=output, scratch=scratch, runtime=runtime)
            self.function(work, **inputs, **settings, **hints)
            ref = store.publish(
                self.name,
                key,
                output,
                inputs=_digests(inputs),
                settings=settings,
                version=self.version,
                seconds=time.monotonic() - started,
            )
            store.clear_work(key)
            return ref


def stage(*, name: str | None = None) -> Callable[[Callable[..., None]], Stage]:
    """Makes a ``Stage`` of a function ``(work, *, inputs and settings) -> None``, named as the function or ``name``.

    Its version is the one on record in ``versions.json``.
    """
    return lambda function: Stage(function, recorded_version(function), name)


@dataclass(kw_only=True)
class Stages:
    """Runs stages against one store and records what became of each."""

    store: Store
    runtime: Runtime
    records: list[StageRecord] = field(default_factory=list)
    _refs: dict[str, ArtifactRef] = field(default_factory=dict)

    def run(self, stage: Stage, label: str = "", /, *, hints: Arguments | None = None, **arguments: Any) -> ArtifactRef:
        """Runs ``stage``, or takes its artifact from the store; returns the reference. A second call does nothing.

        ``label`` tells two runs of one stage apart; ``hints`` are arguments that cannot change the result, and are in
        no key. Errors: whatever the stage raises.
        """
        hints = hints or {}
        signature(stage.function).bind(None, **arguments, **hints)
        inputs = {name: value for name, value in arguments.items() if _holds_reference(value)}
        settings = {name: value for name, value in arguments.items() if name not in inputs}
        key = stage.key(inputs, settings)
        if key in self._refs:
            return self._refs[key]
        label = f"{stage.name} {label}".strip()
        started = time.monotonic()
        found = self.store.find(stage.name, key)
        results = self._results()
        if found is not None:
            results.write(found, key=key)
        state = stage.task.with_options(refresh_cache=found is None, result_storage=self._results_folder())(
            key, label, self.store.uri, self.runtime, inputs, settings, hints, return_state=True
        )
        ref = state.result(raise_on_failure=True)
        assert isinstance(ref, ArtifactRef)
        seconds = round(time.monotonic() - started, 2)
        self.records.append(StageRecord(name=stage.name, label=label, key=key, state=state.name, seconds=seconds))
        log.info("%s: %s", label, "cached" if state.name == "Cached" else f"{seconds:.1f} s")
        self._refs[key] = ref
        return ref

    def _results_folder(self) -> Path:
        return self.store.work_folder("results").parent.parent / "results"

    def _results(self) -> ResultStore:
        return ResultStore(
            result_storage=LocalFileSystem(basepath=str(self._results_folder())),
            serializer=JSONSerializer(),
            cache_result_in_memory=False,
        )


def _references(value: Any, path: str) -> Iterator[tuple[str, ArtifactRef | Source]]:
    if isinstance(value, (ArtifactRef, Source)):
        yield path, value
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _references(item, f"{path}.{index}")


def _holds_reference(value: Any) -> bool:
    return next(_references(value, ""), None) is not None


def _digests(inputs: Mapping[str, Any]) -> dict[str, str]:
    for name, value in inputs.items():
        assert not isinstance(value, list) or all(isinstance(item, (ArtifactRef, Source)) for item in value), (
            f"{name} mixes"
        )
    return {path: ref.digest for name, value in inputs.items() for path, ref in _references(value, name)}


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Holds ``lock`` on this machine; a killed holder's lock is free at once."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another run of the same stage: %s", lock.stem)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
