"""lm-eval's tasks on a model in memory, one at a time: what is finished is kept."""

import logging
from collections.abc import Callable
from pathlib import Path
from threading import RLock
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from transformers import PreTrainedModel

from lsp_core.durable import DamagedFileError, read_checked, write_durably
from storage.digest import canonical_json, digest_bytes, digest_file
from tasks.caching import Source, Work
from tasks.models import ModelSource, load_tokenizer

TASKS = "tasks"
HARNESS = RLock()  # lm-eval seeds the process's random generators and draws from them: threads take turns
Metrics = dict[str, dict[str, float]]  # by task, and for a group of tasks its members, by metric
log = logging.getLogger(__name__)


class TaskFolder(Source):
    """A local folder of lm-eval task files; the digest covers them."""

    folder: str

    def facts(self) -> dict[str, Any]:
        return {"name": self.folder}

    def current_digest(self) -> str:
        return _digest_tasks(Path(self.folder))


def find_task_folder(folder: Path | None) -> TaskFolder | None:
    """Returns the folder of local lm-eval tasks with its content digested.

    Errors: ``ValueError`` if it does not exist.
    """
    if folder is None:
        return None
    if not folder.is_dir():
        raise ValueError(f"evaluation.task_folder={str(folder)!r}: there is no such folder")
    return TaskFolder(folder=str(folder.resolve()), digest=_digest_tasks(folder.resolve()))


def _digest_tasks(folder: Path) -> str:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return digest_bytes(
        canonical_json({path.relative_to(folder).as_posix(): digest_file(path) for path in files}).encode()
    )


def run_tasks(
    work: Work,
    model: PreTrainedModel,
    source: ModelSource,
    tasks: list[str],
    folder: TaskFolder | None,
    limit: int | None,
) -> Metrics:
    """Returns the zero-shot metrics of each lm-eval task; ``acc`` is plain accuracy.

    Those of a task that an earlier attempt, or a part, has finished are taken.
    """
    kept = {name: _read(work, name, folder, limit) for name in tasks}
    left = [name for name, metrics in kept.items() if metrics is None]
    if left:
        evaluation = _evaluation(work, model, source, left, folder, limit)
        with work.progress() as progress:
            for done, name in enumerate(left, len(tasks) - len(left) + 1):
                metrics = kept[name] = evaluation(name)
                progress(done, len(tasks))
                _keep(work, name, metrics, folder, limit)
    found: Metrics = {}
    for metrics in kept.values():
        found |= metrics or {}
    return found


def _evaluation(
    work: Work,
    model: PreTrainedModel,
    source: ModelSource,
    tasks: list[str],
    folder: TaskFolder | None,
    limit: int | None,
) -> Callable[[str], Metrics]:
    """Returns what evaluates one of ``tasks``. Errors: ``ValueError`` if lm-eval does not know them all."""
    from lm_eval import simple_evaluate  # several seconds to import
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    known = TaskManager(include_path=None if folder is None else folder.folder)
    unknown = [name for name in tasks if name not in known.all_tasks]
    if unknown:
        raise ValueError(
            f"evaluation.tasks: lm-eval knows no {', '.join(unknown)}: list its tasks with `lm-eval ls tasks`"
        )
    wrapped = HFLM(
        pretrained=model,
        tokenizer=load_tokenizer(source.own_tokenizer),
        batch_size=work.runtime.task_batch_size,
        device=str(model.device),
    )

    def evaluate(task: str) -> Metrics:
        with HARNESS:
            results = simple_evaluate(
                model=wrapped, tasks=[task], num_fewshot=0, limit=limit, task_manager=known, bootstrap_iters=0
            )
        return {
            name: {
                metric.split(",")[0]: value
                for metric, value in metrics.items()
                if isinstance(value, float) and "stderr" not in metric
            }
            for name, metrics in results["results"].items()
        }

    return evaluate


def is_kept(work: Work, task: str, folder: TaskFolder | None, limit: int | None) -> bool:
    """Returns whether ``task`` was finished by an earlier attempt, or by a part."""
    return _read(work, task, folder, limit) is not None


def _keep(work: Work, task: str, metrics: Metrics, folder: TaskFolder | None, limit: int | None) -> None:
    if folder is not None and folder.current_digest() != folder.digest:
        return  # the stage raises it
    file = f"{TASKS}/{quote(task, safe='')}/{uuid4().hex}.safetensors"  # that no other writer has
    write_durably(work.scratch / file, {}, {"metrics": metrics, **_origin(folder, limit)})
    work.keep(file)


def _read(work: Work, task: str, folder: TaskFolder | None, limit: int | None) -> Metrics | None:
    """Returns the metrics of ``task`` if they are kept, of these files and so many questions."""
    for file in sorted((work.scratch / TASKS / quote(task, safe="")).glob("*.safetensors")):
        try:
            fields = read_checked(file).fields
        except (FileNotFoundError, DamagedFileError) as error:
            log.warning("%s: the task %s may be run again", error, task)
            continue
        metrics: Metrics = fields.pop("metrics")
        if fields == _origin(folder, limit):
            return metrics
    return None


def _origin(folder: TaskFolder | None, limit: int | None) -> dict[str, Any]:
    return {"folder": None if folder is None else folder.digest, "limit": limit}
