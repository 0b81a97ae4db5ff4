"""Shares of a stage's work, done by the workers of a Prefect task runner before the stage itself runs.

A share, called a part, is a task of its own, submitted from the flow: tasks within tasks would be lost with their
parent. It keeps what it does in the stage's work folder, from where the stage goes on as after a kill. So a part that
fails, or whose worker dies, costs nothing but its own rows, and an error that would come again is raised by the stage.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from importlib import import_module
from threading import Event
from types import TracebackType
from typing import Any, Self, get_type_hints

import torch
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.futures import PrefectFuture
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.task_runners import TaskRunner
from pydantic import TypeAdapter
from transformers.utils.logging import disable_progress_bar

from storage.faults import first_line
from storage.store import Store
from storage.work import OUTPUT
from tasks.caching import Arguments, Runtime, Share, Stage, Work, alone
from tasks.places import open_store

log = logging.getLogger(__name__)

PUBLISHED = "another run has published the stage"
Runner = TaskRunner[PrefectFuture[Any]]
_ended: ContextVar[Event | None] = ContextVar("ended", default=None)  # of the workers that share this process


class PartEnded(Exception):  # noqa: N818  (no error)
    """Ends a part whose flow is at its end, or whose stage was published meanwhile."""


class WorkersUnavailable(ValueError):  # noqa: N818  (a state of the workers)
    """Workers that cannot be started or reached."""


class Workers:
    """``count`` workers, of the task runner that ``make()`` hands out; it starts when there is work to share out.

    Use it in a ``with`` block inside a flow.
    """

    def __init__(self, count: int, make: Callable[[], AbstractContextManager[Runner]]) -> None:
        self.count = count
        self._make = make
        self._runner: Runner | None = None
        self._end = Event()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._stack.close()

    def share_out(
        self,
        stage: Stage,
        store: Store,
        key: str,
        label: str,
        place: str,
        runtime: Runtime,
        arguments: Arguments,
        timeout_seconds: float | None = None,
    ) -> None:
        """Has the work of ``stage`` that can be shared out done and kept, as far as the parts come.

        One run of a machine at a time: another waits, and finds the work done. What goes wrong in a part is said in the
        log. Errors: ``WorkersUnavailable`` if parts cannot be handed out.
        """
        parts = stage.parts
        if parts is None or self.count == 1:
            return
        kept = store.work(key)
        with alone(kept, label):
            if store.find(stage.name, key) is not None or kept.is_finished():
                return
            kept.fetch()
            try:
                work = Work(store=store, label=label, output=kept.path / OUTPUT, scratch=kept.path, runtime=runtime)
                shares = parts.plan(work, self.count, **arguments)
            except Exception as error:  # the stage raises it in its turn, if it still comes
                log.warning("%s is not shared out: %s", label, first_line(error))
                return
            if len(shares) < 2:
                return
            kept.keep()
            common = {"stage": _name_of(stage), "key": key, "place": place, "verify": store.verify}
            common |= {"runtime": runtime.model_dump(mode="json"), "arguments": _plain(stage, arguments)}
            common["threads"] = torch.get_num_threads()
            log.info("%s: %d parts, %d workers", label, len(shares), self.count)
            futures = {}
            for index, share in enumerate(shares):
                name = f"{label} part {index + 1} of {len(shares)}"
                parameters = {**common, "label": name, "share": share, "index": index}
                futures[name] = self._submit(_task_of(stage, timeout_seconds), parameters)
            for name, future in futures.items():
                try:
                    future.result()
                except Exception as error:  # as the worker, or the runner that lost it, raised it
                    log.warning("%s failed (%s): the stage does what is left of it", name, first_line(error))

    def _submit(self, part: Any, parameters: dict[str, Any]) -> PrefectFuture[Any]:
        ended = _ended.set(self._end)
        try:
            if self._runner is None:
                self._runner = self._stack.enter_context(self._make())
            # what runs elsewhere is to report to the server of this flow, be it a temporary one
            server = str(get_client(sync_client=True).api_url)
            with temporary_settings({PREFECT_API_URL: server}):
                return self._runner.submit(part, parameters)
        except Exception as error:  # as Dask, Ray or Prefect says it
            raise WorkersUnavailable(
                f"the workers cannot be started or reached ({first_line(error)}): see that what workers.address names "
                "runs, and that this machine reaches it, or drop it; what is finished is kept"
            ) from error
        finally:
            _ended.reset(ended)


def run_part(
    stage: str,
    key: str,
    label: str,
    place: str,
    verify: bool,
    runtime: dict[str, Any],
    arguments: dict[str, Any],
    share: Share,
    index: int,
    threads: int,
) -> None:
    """Does one share of a stage's work and keeps it; every argument is plain JSON.

    ``threads``: of torch, as in the flow, for their number decides in which order numbers are added.
    """
    disable_progress_bar()
    module, _, name = stage.rpartition(".")
    made: Stage = getattr(import_module(module), name)
    assert made.parts is not None
    store = open_store(place, verify=verify)
    kept = store.work(key)
    end = _ended.get()

    def check() -> None:
        if end is not None and end.is_set():
            raise PartEnded("the run is at its end")
        if not kept.path.exists():
            raise PartEnded(PUBLISHED)

    work = Work(
        store=store,
        label=label,
        output=kept.path / OUTPUT,
        scratch=kept.path,
        runtime=on_own_device(Runtime.model_validate(runtime), index),
        kept=kept,
        check=check,
    )
    try:
        if store.find(made.name, key) is not None:  # while the part waited for a worker
            raise PartEnded(PUBLISHED)
        kept.fetch()
        with _threads(threads):
            check()
            made.parts.run(work, share, **_typed(made, arguments))
    except PartEnded as ended:
        log.info("%s: ends early: %s", label, ended)
    except Exception:
        if store.find(made.name, key) is None:
            raise
        log.info("%s: ends early: %s", label, PUBLISHED)


def on_own_device(runtime: Runtime, index: int) -> Runtime:
    """Returns ``runtime`` with, of several GPUs that this process sees, the one of part number ``index``."""
    count = torch.cuda.device_count() if runtime.device == "cuda" else 1
    return runtime if count < 2 else runtime.model_copy(update={"device": f"cuda:{index % count}"})


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _task_of(stage: Stage, timeout_seconds: float | None) -> Any:
    return task(
        run_part,
        name=f"{stage.name} part",
        task_run_name="{label}",
        version=str(stage.version),
        cache_policy=NO_CACHE,
        persist_result=False,
        timeout_seconds=timeout_seconds,
    )


def _name_of(stage: Stage) -> str:
    """Returns where a worker finds ``stage``."""
    module, name = stage.function.__module__, stage.function.__name__
    assert getattr(import_module(module), name) is stage
    return f"{module}.{name}"


def _plain(stage: Stage, arguments: Arguments) -> dict[str, Any]:
    hints = get_type_hints(stage.function)
    return {name: TypeAdapter(hints[name]).dump_python(value, mode="json") for name, value in arguments.items()}


def _typed(stage: Stage, plain: dict[str, Any]) -> Arguments:
    hints = get_type_hints(stage.function)
    return {name: TypeAdapter(hints[name]).validate_python(value) for name, value in plain.items()}
