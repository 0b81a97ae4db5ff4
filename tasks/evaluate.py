"""evaluate: perplexity, joint divergence and lm-eval tasks of a dense, an untrained or a trained compressed model."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lsp_core.inputs import inputs_of
from lsp_core.losses import sum_losses
from lsp_core.modeling import load_compressed
from lsp_core.sensitivity import Sensitivity
from storage.grid import tokens_shape
from storage.manifest import ArtifactRef
from tasks.allocate import read_removed
from tasks.artifacts import read_bases, read_json, read_tokens, write_json
from tasks.caching import Parts, Share, Work, stage
from tasks.examples import read_examples
from tasks.features import evaluate_features
from tasks.merge import merge_initial
from tasks.models import LOADING, ModelSource, load_model, load_tokenizer, placed
from tasks.shares import contiguous
from tasks.sums import Sums, keep_sums, mean_of, read_sums
from tasks.zero_shot import HARNESS, TaskFolder, is_kept, run_tasks

EVALUATION = "evaluation.json"
LOSSES, DIVERGENCES = "losses", "divergences"
LEAST_BATCHES = 4  # micro-batches of a share


def shared_evaluation(
    work: Work,
    workers: int,
    *,
    model: ModelSource,
    tokens: ArtifactRef,
    kl_tokens: ArtifactRef | None = None,
    tasks: list[str] | None = None,
    task_folder: TaskFolder | None = None,
    task_limit: int | None = None,
    **_subject: Any,
) -> list[Share]:
    """Returns what is left of a language model's evaluation in shares of pieces: a part of all windows, or a task.

    A share loads the model, and merges an untrained one: its windows are several micro-batches.
    """
    if not model.gives_text:
        return []
    cuts = [("kl", _cut(work, kl_tokens, workers, DIVERGENCES)), ("loss", _cut(work, tokens, workers, LOSSES))]
    parts = [[[kind, *cut[part]] for kind, cut in cuts if part < len(cut)] for part in range(workers)]
    left = [name for name in tasks or () if not is_kept(work, name, task_folder, task_limit)]
    return [*filter(None, parts), *([["task", name]] for name in left)]


def _cut(work: Work, tokens: ArtifactRef | None, workers: int, folder: str) -> list[list[int]]:
    """Returns the windows of ``tokens`` in ranges for at most so many workers, cut between micro-batches.

    Without the ranges whose sums are all kept in ``folder``.
    """
    if tokens is None:
        return []
    windows, size = tokens_shape(work.folder(tokens))[0], work.runtime.micro_batch
    batches, known = -(-windows // size), read_sums(work.scratch / folder, size)
    cut = contiguous(batches, min(workers, batches // LEAST_BATCHES), lambda start, stop: stop - start)
    left = [share for share in cut if any(batch * size not in known for batch in share)]
    return [[share.start * size, min(share.stop * size, windows)] for share in left]


def evaluate_share(
    work: Work,
    share: Share,
    *,
    model: ModelSource,
    tokens: ArtifactRef,
    checkpoint: ArtifactRef | None = None,
    bases: ArtifactRef | None = None,
    allocation: ArtifactRef | None = None,
    kl_tokens: ArtifactRef | None = None,
    tasks: list[str] | None = None,
    task_folder: TaskFolder | None = None,
    task_limit: int | None = None,
    **_further: Any,
) -> None:
    """Does the pieces of ``share`` and keeps what they give: sums of micro-batches, figures of lm-eval tasks."""
    pieces = {kind: place for kind, *place in share}
    with HARNESS if "task" in pieces else nullcontext():  # who waits for it holds no model
        subject = _load(work, model, checkpoint)
        if bases is not None and allocation is not None:
            if "kl" in pieces and kl_tokens is not None:
                _joint_sums(work, subject, bases, allocation, kl_tokens, range(*pieces["kl"]))
            if pieces.keys() == {"kl"}:
                return
            merge_initial(work, subject, bases, allocation)
        with placed(subject, work.runtime):
            if "loss" in pieces:
                _loss_sums(work, subject, read_tokens(work, tokens), range(*pieces["loss"]))
            if "task" in pieces:
                run_tasks(work, subject, model, pieces["task"], task_folder, task_limit)


@stage(parts=Parts(plan=shared_evaluation, run=evaluate_share))
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
            result["kl_joint"] = mean_of(_joint_sums(work, subject, bases, allocation, kl_tokens))
        merge_initial(work, subject, bases, allocation)
    result["parameters"] = sum(p.numel() for p in subject.parameters())
    with placed(subject, work.runtime):
        if model.gives_text:
            windows = read_tokens(work, tokens)
            perplexity = math.exp(mean_of(_loss_sums(work, subject, windows)))
            result |= {"perplexity": perplexity, "tokens": windows.numel(), "windows": len(windows)}
        else:
            sets = zip(transfer_names or (), (transfer or [])[::2], (transfer or [])[1::2], strict=True)
            result |= evaluate_features(work, subject, tokens, dense=dense, labelled=labelled, transfer=list(sets))
        if prompt is not None:
            tokenizer = load_tokenizer(model.own_tokenizer)
            result["continuation"] = continue_prompt(subject, tokenizer, prompt, prompt_tokens)
        if tasks:
            result["tasks"] = run_tasks(work, subject, model, tasks, task_folder, task_limit)
    write_json(work.output / EVALUATION, result)


def _load(work: Work, model: ModelSource, checkpoint: ArtifactRef | None) -> PreTrainedModel:
    """Returns the merged ``checkpoint``, or the dense model where there is none; to be used inside ``placed``."""
    runtime = work.runtime
    if checkpoint is None:
        return load_model(model, runtime.device, offload=runtime.offload)
    with LOADING:
        return load_compressed(work.folder(checkpoint)).model.to("cpu" if runtime.offload else runtime.device)


def _loss_sums(work: Work, model: PreTrainedModel, windows: Tensor, share: range | None = None) -> Sums:
    def compute(batches: list[range], take: Callable[[float, int], None]) -> None:
        for batch in batches:
            take(*sum_losses(model, windows, batch))

    with work.progress() as progress:
        return keep_sums(work, LOSSES, share or range(len(windows)), compute, progress)


def _joint_sums(
    work: Work,
    model: PreTrainedModel,
    bases: ArtifactRef,
    allocation: ArtifactRef,
    tokens: ArtifactRef,
    share: range | None = None,
) -> Sums:
    """Returns the sums of the allocation's KL as a whole."""
    units, tensors = read_bases(work, bases)
    removed, examples = read_removed(work, allocation), read_examples(work, tokens, model)

    def compute(batches: list[range], take: Callable[[float, int], None]) -> None:
        first, last, count = batches[0].start, batches[-1].stop, sum(map(len, batches))
        gaps = count < last - first
        chosen = examples.values[[i for batch in batches for i in batch]] if gaps else examples.values[first:last]
        options: dict[str, Any] = {"micro_batch": work.runtime.micro_batch, "inputs": examples.inputs}
        with placed(model, work.runtime) as home:
            Sensitivity(model, units, tensors, chosen, home=home, **options).joint_sums(removed, take)

    with work.progress() as progress:
        return keep_sums(work, DIVERGENCES, share or range(len(examples.values)), compute, progress)


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
