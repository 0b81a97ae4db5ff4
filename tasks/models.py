"""The model to compress: found and digested once, loaded by each stage that runs it."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from threading import RLock
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_logging

from lsp_core.inputs import PIXELS
from lsp_core.offload import offloaded
from storage.digest import canonical_json, digest_bytes, digest_file
from storage.remembered import DigestMemory
from tasks.caching import Runtime, Source
from tasks.model_files import (
    VOCABULARY_PATTERNS,
    digest_parts,
    locate,
    matching,
    refuse_quantized,
    tokenizer_digest,
    weight_files,
)
from tasks.processors import ProcessorSource, find_processor

log = logging.getLogger(__name__)

ModelTask = Literal["causal-lm", "seq2seq-lm", "image-classification", "encoder"]
AUTO: dict[ModelTask, Any] = {
    "causal-lm": AutoModelForCausalLM,
    "seq2seq-lm": AutoModelForSeq2SeqLM,
    "image-classification": AutoModelForImageClassification,
    "encoder": AutoModel,
}
HEADS: dict[ModelTask, Any] = {  # transformers' own lists: model_type -> class names
    "causal-lm": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq-lm": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image-classification": MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
LOADING = RLock()  # transformers sets defaults of the whole process while it loads a model
POOLING = "add_pooling_layer"  # of encoders whose pooler is no part of every checkpoint


class TokenizerSource(Source):
    """A tokenizer in a local ``folder``; the digest covers its files."""

    folder: str
    trust_remote_code: bool = False

    def current_digest(self) -> str:
        return tokenizer_digest(Path(self.folder), self.trust_remote_code, DigestMemory().digest)


class ModelSource(Source):
    """A model in a local ``folder``.

    The digest covers ``parts``: the digests of config, weights, tokenizer or image processor and trusted code, the
    dtype to compute in and the task. ``name`` is what the user gave, ``revision`` the commit a hub id was resolved to;
    ``task``: which of transformers' heads it is loaded with. A model that reads images has a ``processor``, the others
    a ``tokenizer``.
    """

    name: str
    folder: str
    revision: str | None
    dtype: str
    parts: dict[str, str]
    num_bytes: int
    trust_remote_code: bool = False
    task: ModelTask
    tokenizer: TokenizerSource | None
    processor: ProcessorSource | None

    @property
    def gives_text(self) -> bool:
        """Whether it is a language model."""
        return self.task in ("causal-lm", "seq2seq-lm")

    @property
    def own_tokenizer(self) -> TokenizerSource:
        """Its tokenizer. Errors: ``ValueError`` for a model that reads images."""
        if self.tokenizer is None:
            raise ValueError(f"{self.name} reads images: it has no tokenizer")
        return self.tokenizer

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def facts(self) -> dict[str, Any]:
        return {"name": self.name, "revision": self.revision, **self.parts}

    def current_digest(self) -> str:
        weights, _ = weight_files(Path(self.folder))
        folder, memory = Path(self.folder), DigestMemory()
        reader = self.tokenizer or self.processor
        assert reader is not None
        parts = digest_parts(folder, weights, self.dtype, self.task, self.trust_remote_code, memory.digest)
        parts[_reader_name(self.processor)] = reader.current_digest()
        return digest_bytes(canonical_json(parts).encode())


def find_model(
    name_or_path: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    task: str = "auto",
    device: str = "cpu",
    trust_remote_code: bool = False,
    digest: Callable[[Path], str] = digest_file,
    partly: bool = False,
) -> ModelSource:
    """Returns the model in a local folder, or downloads a hub id and returns that, with its content digested.

    ``digest``: what a file's digest is taken from. ``partly``: a config is enough, nothing large is downloaded, and
    what is not there is named in ``lacks``. Errors: ``ValueError`` if there is no such model, if it is quantized, or if
    the folder lacks config, weights or tokenizer.
    """
    folder, commit = locate(name_or_path, revision, partly=partly)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json: it is not a model folder")
    refuse_quantized(folder)
    weights, missing = weight_files(folder)
    if missing and not partly:
        raise ValueError(f"{folder} holds no {', '.join(missing)}: copy the weights there or name another folder")
    config = _config(folder, trust_remote_code)
    chosen = _resolve_task(config, task)
    _check_task(name_or_path, config, chosen)
    images = _reads_images(config, chosen)
    tokenizer, processor = _reader(folder, name_or_path, trust_remote_code, digest, images=images, partly=partly)
    resolved = _resolve_dtype(folder, dtype, device)
    parts = digest_parts(folder, weights, resolved, chosen, trust_remote_code, digest)
    parts[_reader_name(processor)] = (tokenizer or processor).digest  # type: ignore[union-attr]
    return ModelSource(
        name=name_or_path,
        folder=str(folder),
        revision=commit,
        dtype=resolved,
        parts=parts,
        num_bytes=sum(path.stat().st_size for path in weights),
        trust_remote_code=trust_remote_code,
        task=chosen,
        digest=digest_bytes(canonical_json(parts).encode()),
        lacks=f"the weights of {name_or_path} are there" if missing else None,
        tokenizer=tokenizer,
        processor=processor,
    )


def _reader(
    folder: Path, name: str, trust_remote_code: bool, digest: Callable[[Path], str], *, images: bool, partly: bool
) -> tuple[TokenizerSource | None, ProcessorSource | None]:
    """Returns the tokenizer of a model that reads text, or the image processor of one that reads images."""
    if images:
        return None, find_processor(folder, digest=digest, partly=partly)
    has_tokenizer = bool(matching(folder, VOCABULARY_PATTERNS))
    if not has_tokenizer and not partly:
        raise ValueError(f"{folder} holds no tokenizer (tokenizer.json, ...): save the model's tokenizer there")
    tokenizer = TokenizerSource(
        folder=str(folder),
        digest=tokenizer_digest(folder, trust_remote_code, digest),
        trust_remote_code=trust_remote_code,
        lacks=None if has_tokenizer else f"the tokenizer of {name} is there",
    )
    return tokenizer, None


def _reader_name(processor: ProcessorSource | None) -> str:
    return "tokenizer" if processor is None else "processor"


def _reads_images(config: PreTrainedConfig, task: ModelTask) -> bool:
    architecture = AUTO[task]._model_mapping.get(type(config), None)
    architecture = architecture[0] if isinstance(architecture, tuple) else architecture
    return getattr(architecture, "main_input_name", None) == PIXELS


def _resolve_task(config: PreTrainedConfig, task: str) -> ModelTask:
    """Returns the task that ``auto`` stands for, by the class that the checkpoint names, or ``task`` itself."""
    for known in get_args(ModelTask):
        if task == known:
            return known
    named = (config.architectures or [None])[0]
    for known, names in HEADS.items():
        classes = {name for value in names.values() for name in (value if isinstance(value, tuple) else (value,))}
        if named in classes or (named is None and config.model_type in names):
            return known
    return "encoder"


def _check_task(name: str, config: PreTrainedConfig, task: ModelTask) -> None:
    """Errors: ``ValueError`` for a model that has no such head, or that reads the tokens which it is to predict."""
    named = (config.architectures or [None])[0]
    remedy = f"leave model.task at auto, which is {_resolve_task(config, 'auto')} here"
    if task == "encoder" and config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder without a head: set model.task to seq2seq-lm")
    has_code = bool(getattr(config, "auto_map", None))
    if not has_code and type(config) not in AUTO[task]._model_mapping:
        raise ValueError(f"model.task={task}: there is no such head for {name}, a {config.model_type}: {remedy}")
    if task == "causal-lm" and named in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values():
        raise ValueError(f"model.task={task}: {name}, a {named}, reads the tokens that it predicts: {remedy}")


def load_model(source: ModelSource, device: str = "cpu", *, offload: bool = False) -> PreTrainedModel:
    """Returns the model, in evaluation mode, on ``device``, every parameter frozen.

    With ``offload`` in host memory, to be used inside ``placed``.
    Errors: ``ValueError`` if the checkpoint cannot be read, if it lacks a weight that the model needs or holds it in
    another shape, or if a weight is NaN or infinite.
    """
    try:
        with LOADING, _silent():
            model, info = _load(source)
            has_option = POOLING in signature(type(model).__init__).parameters
            if source.task == "encoder" and info["missing_keys"] and has_option:
                model, info = _load(source, **{POOLING: False})
    except SafetensorError as error:
        raise ValueError(f"{source.folder}: the weights cannot be read ({error}): copy them there again") from None
    missing = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if missing:
        raise ValueError(
            f"{source.folder}: the checkpoint lacks weights that {type(model).__name__} needs: {', '.join(missing[:5])}"
        )
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ValueError(
                f"{source.folder}: weight {name} holds a NaN or an infinity: the checkpoint is broken, get it again"
            )
        parameter.requires_grad_(False)
    moved: PreTrainedModel = model.eval().to("cpu" if offload else device)
    return moved


@contextmanager
def placed(model: PreTrainedModel, runtime: Runtime) -> Iterator[torch.device | None]:
    """Has ``model`` run on the runtime's device, with offload one block at a time; yields where all else waits then.

    That is None without offload: everything stays on the device.
    """
    if not runtime.offload:
        yield None
        return
    with offloaded(model, runtime.device):
        yield torch.device("cpu")


@contextmanager
def _silent() -> Iterator[None]:
    """Silences transformers' report of weights that do not fit: ``load_model`` refuses them by name."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def _load(source: ModelSource, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    loaded: tuple[PreTrainedModel, dict[str, Any]] = AUTO[source.task].from_pretrained(
        source.folder,
        dtype=source.torch_dtype,
        trust_remote_code=source.trust_remote_code,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # listed in info, and refused with their names
        **options,
    )
    return loaded


def load_tokenizer(source: TokenizerSource) -> PreTrainedTokenizerBase:
    """Returns the tokenizer."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        source.folder, trust_remote_code=source.trust_remote_code
    )
    return tokenizer


def load_skeleton(source: ModelSource) -> PreTrainedModel:
    """Returns the model on the meta device: its layers and shapes, without a weight."""
    with torch.device("meta"):
        model: PreTrainedModel = AUTO[source.task].from_config(
            _config(Path(source.folder), source.trust_remote_code), trust_remote_code=source.trust_remote_code
        )
    return model


def _config(folder: Path, trust_remote_code: bool) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return config


def check_positions(source: ModelSource, skeleton: PreTrainedModel, sequence_length: int, setting: str) -> None:
    """Errors: ``ValueError`` if ``sequence_length`` exceeds the model's positions."""
    limit = getattr(skeleton.config.get_text_config(), "max_position_embeddings", None)
    for module in skeleton.modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings == limit and module.padding_idx is not None:
            limit -= module.padding_idx + 1  # these are counted from behind the padding's
            break
    if limit is not None and skeleton.config.is_encoder_decoder:
        limit *= 2  # half of a sequence each
    if limit is not None and sequence_length > limit:
        raise ValueError(
            f"{setting}={sequence_length} exceeds the {limit} positions of {source.name}: lower it to {limit} or less"
        )


def resolve_device(name: str) -> str:
    """Returns the device that ``auto`` stands for, or ``name`` itself.

    Errors: ``ValueError`` if this machine has no such device.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if accelerator is None else accelerator.type
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device={name!r} cannot be used here ({str(error).splitlines()[0]}): use cpu or auto"
        ) from None
    return name


def resolve_precision(precision: str, device: str) -> str:
    """Returns the dtype that ``auto`` stands for on ``device``, or ``precision`` itself; says what it picked."""
    if precision == "auto":
        precision = "float32" if device.startswith("mps") else "float64"
        log.info("precision auto: %s on %s", precision, device)
    return precision


def _resolve_dtype(folder: Path, dtype: str, device: str) -> str:
    if dtype != "auto":
        return dtype
    if torch.device(device).type == "cpu":
        return "float32"
    config = json.loads((folder / "config.json").read_text())
    stored: str = config.get("dtype") or config.get("torch_dtype") or "float32"
    return "bfloat16" if stored == "float16" else stored  # float16's range loses the gradients of a mean over tokens
