"""evaluate: perplexity, joint divergence and lm-eval tasks of a dense, an untrained or a trained compressed model."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lsp_core.inputs import inputs_of
from lsp_core.modeling import load_compressed
from storage.digest import canonical_json, digest_bytes, digest_file
from storage.grid import tokens_shape
from storage.manifest import ArtifactRef
from tasks.allocate import read_removed
from tasks.artifacts import read_bases, read_json, read_tokens, write_json
from tasks.caching import Parts, Share, Source, Work, stage
from tasks.features import evaluate_features
from tasks.measure import open_sensitivity
from tasks.merge import merge_initial
from tasks.models import LOADING, ModelSource, load_model, load_tokenizer
from tasks.perplexity import keep_sums, measure_perplexity, read_sums
from tasks.shares import contiguous

EVALUATION = "evaluation.json"
LOSSES = "losses"
LEAST_BATCHES = 4  # micro-batches of a share


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


def shared_windows(
    work: Work, workers: int, *, model: ModelSource, tokens: ArtifactRef, **_subject: Any
) -> list[Share]:
    """Returns the test windows of a language model in shares of whole micro-batches, one a worker.

    A share loads the model, and merges an untrained one: it is of several micro-batches, or there is none.
    """
    if not model.gives_text:
        return []
    windows, size = tokens_shape(work.folder(tokens))[0], work.runtime.micro_batch
    batches = -(-windows // size)
    cut = contiguous(batches, min(workers, batches // LEAST_BATCHES), lambda start, stop: stop - start)
    return [[share.start * size, min(share.stop * size, windows)] for share in cut]


def evaluate_share(
    work: Work,
    share: Share,
    *,
    model: ModelSource,
    tokens: ArtifactRef,
    checkpoint: ArtifactRef | None = None,
    bases: ArtifactRef | None = None,
    allocation: ArtifactRef | None = None,
    **_further: Any,
) -> None:
    """Sums the losses of the windows ``share[0]`` to ``share[1]`` - 1 and keeps the sums of their micro-batches."""
    subject = _load(work, model, checkpoint)
    if bases is not None and allocation is not None:
        merge_initial(work, subject, bases, allocation)
    windows, file = read_tokens(work, tokens), f"{LOSSES}/{share[0]}-{share[1]}.safetensors"
    with work.progress() as progress:
        keep = partial(work.keep, file)
        keep_sums(work.scratch / file, subject, windows, range(*share), work.runtime.micro_batch, progress, keep)


@stage(parts=Parts(plan=shared_windows, run=evaluate_share))
def evaluate(
    work: Work,
    *,
    model: ModelSource,
    tokens: ArtifactRef,
    checkpoint: ArtifactRef | None = None,
    bases: ArtifactRef | None = None,
    allocation: ArtifactRef | None = None,
    kl_tokens: ArtifactRef | None = None,
    prompt: str | None = None,
    prompt_tokens: int = 0,
    tasks: list[str] | None = None,
    task_folder: TaskFolder | None = None,
    task_limit: int | None = None,
    harness: str | None = None,
    dense: ArtifactRef | None = None,
    labelled: bool = False,
    transfer: list[ArtifactRef] | None = None,
    transfer_names: list[str] | None = None,
) -> None:
    """Publishes a language model's perplexity, its continuation of a prompt and task accuracies; else of its features.

    Of the merged ``checkpoint``, of the untrained model (NoLSP) that ``bases`` and ``allocation`` give, or of the dense
    model. With ``kl_tokens``, also the KL, in nats per token, of that allocation as a whole. ``harness`` is lm-eval's
    version, there to be keyed. The data of a hub task, and files outside the
    task folder that a task names, are not pinned. ``dense``, ``labelled`` and ``transfer``, two sets for each of
    ``transfer_names``: as ``evaluate_features`` needs them.
    """
    result: dict[str, Any] = {}
    subject = _load(work, model, checkpoint)
    if bases is not None and allocation is not None:
        if kl_tokens is not None:
            result["kl_joint"] = _joint_kl(work, subject, bases, allocation, kl_tokens)
        merge_initial(work, subject, bases, allocation)
    result["parameters"] = sum(p.numel() for p in subject.parameters())
    if model.gives_text:
        windows = read_tokens(work, tokens)
        with work.progress() as progress:
            known = read_sums(work.scratch / LOSSES, work.runtime.micro_batch)
            perplexity = measure_perplexity(subject, windows, work.runtime.micro_batch, progress, known)
        result |= {"perplexity": perplexity, "tokens": windows.numel(), "windows": len(windows)}
    else:
        sets = zip(transfer_names or (), (transfer or [])[::2], (transfer or [])[1::2], strict=True)
        result |= evaluate_features(work, subject, tokens, dense=dense, labelled=labelled, transfer=list(sets))
    if prompt is not None:
        result["continuation"] = continue_prompt(subject, load_tokenizer(model.own_tokenizer), prompt, prompt_tokens)
    if tasks:
        result["tasks"] = run_tasks(work, subject, model, tasks, task_folder, task_limit)
    write_json(work.output / EVALUATION, result)


def _load(work: Work, model: ModelSource, checkpoint: ArtifactRef | None) -> PreTrainedModel:
    """Returns the merged ``checkpoint``, or the dense model where there is none."""
    if checkpoint is None:
        return load_model(model, work.runtime.device)
    with LOADING:
        return load_compressed(work.folder(checkpoint)).model.to(work.runtime.device)


def _joint_kl(
    work: Work, model: PreTrainedModel, bases: ArtifactRef, allocation: ArtifactRef, tokens: ArtifactRef
) -> float:
    units, tensors = read_bases(work, bases)
    return open_sensitivity(work, model, units, tensors, tokens).joint(read_removed(work, allocation))


def read_evaluation(work: Work, evaluation: ArtifactRef) -> dict[str, Any]:
    result: dict[str, Any] = read_json(work.folder(evaluation) / EVALUATION)
    return result


def continue_prompt(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, count: int) -> str:
    """Returns the ``count`` most likely tokens after ``prompt``, chosen one by one.

    Of an encoder-decoder, which reads the prompt as a whole, the most likely ones of its decoder.
    """
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]], device=model.device)
    name, read, start = "input_ids", {}, inputs_of(model).decoder_start
    if start is not None:
        name, read, ids = "decoder_input_ids", {"input_ids": ids}, ids.new_full((1, 1), start)
    with torch.inference_mode():
        for _ in range(count):
            following = model(**read, **{name: ids}, use_cache=False).logits[:, -1].argmax(-1)
            ids = torch.cat([ids, following[:, None]], dim=1)
    text: str = tokenizer.decode(ids[0, -count:])
    return text


def run_tasks(
    work: Work,
    model: PreTrainedModel,
    source: ModelSource,
    tasks: list[str],
    folder: TaskFolder | None,
    limit: int | None,
) -> dict[str, dict[str, float]]:
    """Returns the zero-shot metrics of each lm-eval task; ``acc`` is plain accuracy."""
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
    results = simple_evaluate(
        model=wrapped, tasks=tasks, num_fewshot=0, limit=limit, task_manager=known, bootstrap_iters=0
    )
    return {
        name: {
            metric.split(",")[0]: value
            for metric, value in metrics.items()
            if isinstance(value, float) and "stderr" not in metric
        }
        for name, metrics in results["results"].items()
    }
