"""The stages that evaluate a language model by itself, dense or compressed."""

import json
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flows.evaluate_config import EvaluateConfig
from flows.prepared import Runner
from flows.sources import TextEvaluationConfig
from lsp_core.modeling_lsp import CLASSES, LSPConfig, class_name
from storage.manifest import ArtifactRef
from storage.remembered import DigestMemory
from tasks.caching import Runtime
from tasks.calibrate import calibrate_test
from tasks.evaluate import evaluate
from tasks.models import AUTO, ModelSource, check_positions, find_model, load_skeleton, resolve_device
from tasks.text import find_text
from tasks.zero_shot import TaskFolder, find_task_folder


def text_settings(
    chosen: TextEvaluationConfig, model: ModelSource, task_folder: TaskFolder | None, *, further: bool = True
) -> dict[str, Any]:
    """Returns what the evaluation of a language model covers beside its perplexity; what has no effect is not said.

    ``further``: False leaves the perplexity alone.
    """
    if not further:
        return {}
    settings: dict[str, Any] = {"prompt": chosen.prompt}
    if chosen.prompt is not None:
        settings["prompt_tokens"] = chosen.prompt_tokens
    if chosen.tasks and model.task == "causal-lm":
        settings |= {"tasks": list(chosen.tasks), "task_limit": chosen.task_limit, "harness": version("lm_eval")}
        settings["task_folder"] = task_folder
    return settings


def find_evaluated(config: EvaluateConfig) -> tuple[ModelSource, Runtime]:
    """Returns the model of ``config`` and what it is run with.

    Errors: ``ValueError`` if there is no such model, if it is no language model, or if its positions are too few.
    """
    device = resolve_device(config.device)
    find = partial(find_model, device=device, digest=partial(DigestMemory().digest, verify=config.verify))
    model = find(**config.model.model_dump())
    base = json.loads((Path(model.folder) / "config.json").read_text())
    if base.get("model_type") == LSPConfig.model_type and config.model.task == "auto":
        loader = CLASSES[class_name(base["base_architecture"])]._auto_class
        (task,) = [task for task, auto in AUTO.items() if auto.__name__ == loader]
        model = find(**config.model.model_dump() | {"task": task})
    if not model.gives_text:
        raise ValueError(
            f"{model.name} is no language model: `python -m flows compress` evaluates others beside the dense model"
        )
    check_positions(model, load_skeleton(model), config.length, "evaluation.sequence_length")
    return model, Runtime(
        device=device,
        micro_batch=config.micro_batch,
        task_batch_size=config.evaluation.task_batch_size,
        offload=config.offload,
    )


def describe_evaluation(stages: Runner, config: EvaluateConfig, model: ModelSource) -> ArtifactRef:
    """Describes the stages of an evaluation to ``stages``; returns the evaluation.

    Errors: ``ValueError`` if the text or the folder of tasks is not there.
    """
    chosen = config.evaluation
    text = find_text(**chosen.text.model_dump(), digest=partial(DigestMemory().digest, verify=config.verify))
    tokens = stages.run(
        calibrate_test,
        "test",
        text=text,
        tokenizer=model.own_tokenizer,
        length=config.length,
        max_tokens=chosen.max_tokens,
        bos=chosen.bos,
    )
    settings = text_settings(chosen, model, find_task_folder(chosen.task_folder))
    return stages.run(evaluate, model=model, tokens=tokens, **settings)
