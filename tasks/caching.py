"""Stages: functions whose output is kept in the store under a key made of everything that can change it."""

import logging
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict

from storage.digest import stage_key
from storage.faults import full, is_full
from storage.manifest import ArtifactRef, FileFacts, InputRecord, Lineage, RunName
from storage.store import Store, digest_output
from storage.work import FINISHED, OUTPUT, WorkFolder
from tasks.progress import Progress
from tasks.versions import recorded_version

log = logging.getLogger(__name__)

Arguments = dict[str, Any]
Share = list[Any]  # of a stage's work, as plain JSON
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "zarr", "numpy", "datasets", "lm-eval", "prefect")


class Source(BaseModel):
    """Something outside the store that a stage reads; ``digest`` stands for its content.

    ``lacks`` says what has to happen before a stage can read it; until then it can only be planned with.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str
    lacks: str | None = None

    def facts(self) -> dict[str, Any]:
        """Returns what a manifest tells of it, for people and to explain a miss."""
        return {}

    def current_digest(self) -> str:
        """Returns the digest of its content as it is now."""
        return self.digest


class Launch(BaseModel):
    """On how many processes the projectors are trained, and how these find each other."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_processes: int = 1
    num_nodes: int = 1
    rendezvous_endpoint: str | None = None
    sharding: Literal["replicated", "sharded"] = "replicated"
    max_restarts: int = 3


class Runtime(BaseModel):
    """Settings that change speed and memory but not the result, and are therefore in no key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str = "cpu"
    micro_batch: int = 4
    task_batch_size: int = 8
    offload: bool = False
    launch: Launch = Launch()


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a stage's function is given beside its inputs and settings.

    ``output``: an empty folder, published as the artifact when the function returns; ``scratch``: a folder that
    survives a kill, for work that a second run continues; ``check``: raises at a step of the progress to end the work.
    """

    store: Store
    label: str
    output: Path
    scratch: Path
    runtime: Runtime
    kept: WorkFolder | None = None
    check: Callable[[], None] | None = None

    def folder(self, ref: ArtifactRef) -> Path:
        """Returns the folder with the files of ``ref``."""
        return self.store.local(ref)

    def progress(self) -> Progress:
        """Returns a progress display for this stage."""
        return Progress(self.label, check=self.check)

    def keep(self, *below: str) -> None:
        """Makes what ``scratch`` holds now, or its folders and files ``below``, outlive this machine.

        Call it whenever more work is worth keeping; a part names what it alone writes.
        """
        if self.kept is not None:
            self.kept.keep(*below)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """How a stage's work is shared out.

    ``plan(work, workers, **arguments)`` returns the shares, none where there is nothing to gain, and makes in
    ``work.scratch`` what they have in common; ``run(work, share, **arguments)`` does one of them and keeps it there.
    """

    plan: Callable[..., list[Share]]
    run: Callable[..., None]


class Stage:
    """One stage: a function of references and settings that fills ``Work.output``, and its version.

    Arguments that hold references are the inputs, all others the settings; both make the key. ``version`` rises with
    every change of the function, or of what it calls, that changes its output. ``parts``: how its work is shared out,
    None where it is not.
    """

    def __init__(
        self, function: Callable[..., None], version: int, name: str | None = None, parts: Parts | None = None
    ) -> None:
        self.name = name or function.__name__
        self.parts = parts
        self.version = version
        self.function = function
        self.__doc__ = function.__doc__

    def key(self, inputs: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
        """Returns the key of this stage for these inputs and settings.

        Errors: ``TypeError`` naming the setting that is not plain JSON.
        """
        digests = {path: ref.digest for path, ref in references(inputs)}
        return stage_key(self.name, self.version, digests, settings)

    def compute(
        self,
        store: Store,
        key: str,
        label: str,
        runtime: Runtime,
        inputs: Arguments,
        settings: Arguments,
        hints: Arguments,
        run: RunName | None,
        shared_seconds: float = 0.0,
    ) -> ArtifactRef:
        """Computes and publishes the artifact of ``key``, from where an earlier attempt left off; returns it.

        ``shared_seconds``: that workers have spent on it, as a clock saw it. One process of a machine at a time; what
        another made meanwhile is taken. Errors: whatever the function raises.
        """
        kept = store.work(key)
        with alone(kept, label):
            made_meanwhile = store.find(self.name, key)
            if made_meanwhile is not None:
                kept.clear()
                return made_meanwhile
            kept.fetch()
            started = time.monotonic()
            digested = _finished_before(kept.path, label)
            if digested is None:
                output = kept.path / OUTPUT
                shutil.rmtree(output, ignore_errors=True)
                output.mkdir()
                work = Work(store=store, label=label, output=output, scratch=kept.path, runtime=runtime, kept=kept)
                try:
                    self.function(work, **inputs, **settings, **hints)
                    _check_sources(inputs, kept)
                    digested = digest_output(output)
                except Exception as error:
                    if is_full(error):
                        raise full(str(kept.path), label) from error
                    raise
                output.rename(_finished(kept.path, digested[0]))
            lineage = Lineage(
                stage=self.function.__name__,
                version=self.version,
                inputs=input_records(inputs),
                hints=input_records({name: hint for name, hint in hints.items() if isinstance(hint, ArtifactRef)}),
                settings=settings,
                packages=_package_versions(),
                device=runtime.device,
                run=run,
                seconds=round(shared_seconds + time.monotonic() - started, 3),
            )
            ref = store.publish_digested(self.name, key, _finished(kept.path, digested[0]), digested, lineage)
            kept.clear()
            return ref


def stage(*, name: str | None = None, parts: Parts | None = None) -> Callable[[Callable[..., None]], Stage]:
    """Makes a ``Stage`` of a function ``(work, *, inputs and settings) -> None``, named as the function or ``name``.

    Its version is the one on record in ``versions.json``.
    """
    return lambda function: Stage(function, recorded_version(function), name, parts)


def split(arguments: Arguments) -> tuple[Arguments, Arguments]:
    """Returns the inputs and the settings among a stage's arguments."""
    inputs = {name: value for name, value in arguments.items() if next(_references(value, name), None) is not None}
    return inputs, {name: value for name, value in arguments.items() if name not in inputs}


def references(inputs: Mapping[str, Any]) -> Iterator[tuple[str, ArtifactRef | Source]]:
    """Yields every reference in ``inputs`` with its place, as ``dense`` or ``merges.1``."""
    for name, value in inputs.items():
        assert not isinstance(value, list) or all(isinstance(item, (ArtifactRef, Source)) for item in value), (
            f"{name} mixes references and settings"
        )
        yield from _references(value, name)


def input_records(inputs: Mapping[str, Any]) -> dict[str, InputRecord]:
    """Returns what a manifest says of a stage's inputs."""
    return {
        path: InputRecord(digest=ref.digest, kind=ref.kind, key=ref.key)
        if isinstance(ref, ArtifactRef)
        else InputRecord(digest=ref.digest, facts=ref.facts())
        for path, ref in references(inputs)
    }


def _references(value: Any, path: str) -> Iterator[tuple[str, ArtifactRef | Source]]:
    if isinstance(value, (ArtifactRef, Source)):
        yield path, value
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _references(item, f"{path}.{index}")


def _check_sources(inputs: Mapping[str, Any], kept: WorkFolder) -> None:
    """Errors: ``ValueError`` if a source is not what the key says; what was computed of it is dropped."""
    for name, ref in references(inputs):
        if isinstance(ref, Source) and ref.current_digest() != ref.digest:
            kept.clear()
            raise ValueError(f"{name} has changed on disk since this run began: run the same command again")


def _finished(scratch: Path, digest: str) -> Path:
    """Returns the folder of what is computed and not yet published: such a publication is tried again as it is."""
    return scratch / f"{FINISHED}{digest}"


def _finished_before(scratch: Path, label: str) -> tuple[str, dict[str, FileFacts]] | None:
    """Returns what an earlier attempt finished and did not publish, digested; None without that."""
    for folder in scratch.glob(f"{FINISHED}*"):
        digested = digest_output(folder)
        if folder == _finished(scratch, digested[0]):
            return digested
        log.warning("%s: what an earlier attempt finished is damaged: it is computed again", label)
        shutil.rmtree(folder)
    return None


@contextmanager
def alone(kept: WorkFolder, label: str) -> Iterator[None]:
    """Holds the lock of one key's work on this machine; a killed holder's is free at once."""
    path = _lock_of(kept)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        log.info("%s: waiting for another run that computes the same", label)
        lock.acquire()
    try:
        yield
        path.unlink(missing_ok=True)  # who waits for it takes the next one
    finally:
        lock.release()


def clear_left(store: Store, key: str) -> None:
    """Deletes the work of an artifact that is published, left by a run that was killed just then."""
    kept = store.work(key)
    lock = _lock_of(kept)
    if not kept.path.exists() and not lock.exists():
        return
    try:
        with FileLock(lock).acquire(blocking=False):
            kept.clear()
            lock.unlink(missing_ok=True)
    except Timeout:  # it is being computed again
        return


def _lock_of(kept: WorkFolder) -> Path:
    return kept.path.with_name(kept.path.name + ".lock")


def _package_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
