"""The model to compress: found and digested once, loaded by each stage that runs it."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from storage.digest import canonical_json, digest_bytes, digest_file
from storage.remembered import DigestMemory
from tasks.caching import Source
from tasks.hub import commit_of

log = logging.getLogger(__name__)

WEIGHTS = (("model.safetensors", "model.safetensors.index.json"), ("pytorch_model.bin", "pytorch_model.bin.index.json"))
SHARD_PATTERNS = ("*.safetensors", "pytorch_model*.bin")  # of the two, to be downloaded
VOCABULARY_PATTERNS = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "*.codes", "*.tokenizer")
TOKENIZER_PATTERNS = (
    *VOCABULARY_PATTERNS,
    "special_tokens_map.json",
    "added_tokens.json",
    "byte_maps.json",
    "emoji.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
)
CONFIG_FILES = ("config.json", "generation_config.json")
CODE_PATTERNS = ("*.py",)


class TokenizerSource(Source):
    """A tokenizer in a local ``folder``; the digest covers its files."""

    folder: str
    trust_remote_code: bool = False

    def current_digest(self) -> str:
        return _tokenizer_digest(Path(self.folder), self.trust_remote_code, DigestMemory().digest)


class ModelSource(Source):
    """A model in a local ``folder``.

    The digest covers ``parts``: the digests of config, weights, tokenizer and trusted code, and the dtype to compute
    in. ``name`` is what the user gave, ``revision`` the commit a hub id was resolved to.
    """

    name: str
    folder: str
    revision: str | None
    dtype: str
    parts: dict[str, str]
    num_bytes: int
    trust_remote_code: bool = False
    tokenizer: TokenizerSource

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def facts(self) -> dict[str, Any]:
        return {"name": self.name, "revision": self.revision, **self.parts}

    def current_digest(self) -> str:
        weights, _ = _weights(Path(self.folder))
        parts = _parts(Path(self.folder), weights, self.dtype, self.trust_remote_code, DigestMemory().digest)
        return digest_bytes(canonical_json(parts).encode())


def find_model(
    name_or_path: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    trust_remote_code: bool = False,
    digest: Callable[[Path], str] = digest_file,
    partly: bool = False,
) -> ModelSource:
    """Returns the model in a local folder, or downloads a hub id and returns that, with its content digested.

    ``digest``: what a file's digest is taken from. ``partly``: a config is enough, nothing large is downloaded, and
    what is not there is named in ``lacks``. Errors: ``ValueError`` if there is no such model, or if the folder lacks
    config, weights or tokenizer.
    """
    folder, commit = _locate(name_or_path, revision, partly=partly)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json: it is not a model folder")
    weights, missing = _weights(folder)
    if missing and not partly:
        raise ValueError(f"{folder} holds no {', '.join(missing)}: copy the weights there or name another folder")
    has_tokenizer = bool(_files(folder, VOCABULARY_PATTERNS))
    if not has_tokenizer and not partly:
        raise ValueError(f"{folder} holds no tokenizer (tokenizer.json, ...): save the model's tokenizer there")
    resolved = _resolve_dtype(folder, dtype, device)
    parts = _parts(folder, weights, resolved, trust_remote_code, digest)
    return ModelSource(
        name=name_or_path,
        folder=str(folder),
        revision=commit,
        dtype=resolved,
        parts=parts,
        num_bytes=sum(path.stat().st_size for path in weights),
        trust_remote_code=trust_remote_code,
        digest=digest_bytes(canonical_json(parts).encode()),
        lacks=f"the weights of {name_or_path} are there" if missing else None,
        tokenizer=TokenizerSource(
            folder=str(folder),
            digest=parts["tokenizer"],
            trust_remote_code=trust_remote_code,
            lacks=None if has_tokenizer else f"the tokenizer of {name_or_path} is there",
        ),
    )


def load_model(source: ModelSource, device: str = "cpu") -> PreTrainedModel:
    """Returns the model, in evaluation mode, on ``device``, every parameter frozen.

    Errors: ``ValueError`` if the checkpoint cannot be read, if it lacks a weight that the model needs or holds it in
    another shape, or if a weight is NaN or infinite.
    """
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            source.folder,
            dtype=source.torch_dtype,
            trust_remote_code=source.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # listed in info, and refused below with their names
        )
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
    moved: PreTrainedModel = model.eval().to(device)
    return moved


def load_tokenizer(source: TokenizerSource) -> PreTrainedTokenizerBase:
    """Returns the tokenizer."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        source.folder, trust_remote_code=source.trust_remote_code
    )
    return tokenizer


def load_skeleton(source: ModelSource) -> PreTrainedModel:
    """Returns the model on the meta device: its layers and shapes, without a weight."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            _config(source), trust_remote_code=source.trust_remote_code
        )
    return model


def _config(source: ModelSource) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.from_pretrained(source.folder, trust_remote_code=source.trust_remote_code)
    return config


def check_positions(source: ModelSource, sequence_length: int, setting: str) -> None:
    """Errors: ``ValueError`` if ``sequence_length`` exceeds the model's positions."""
    limit = getattr(_config(source).get_text_config(), "max_position_embeddings", None)
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


def _locate(name_or_path: str, revision: str | None, *, partly: bool) -> tuple[Path, str | None]:
    folder = Path(name_or_path).expanduser()
    if partly and folder.name == "config.json" and folder.is_file():
        folder = folder.parent
    if folder.is_dir():
        if revision is not None:
            raise ValueError(
                f"model.revision={revision!r} belongs to a hub id, but {name_or_path} is a local folder: drop it"
            )
        return folder.resolve(), None
    if folder.is_absolute() or name_or_path.startswith(".") or name_or_path.count("/") > 1:
        raise ValueError(f"model.name_or_path={name_or_path!r}: there is no such folder")
    commit = commit_of("model", name_or_path, revision)
    small = [*(index for _, index in WEIGHTS), *TOKENIZER_PATTERNS, *CONFIG_FILES, *CODE_PATTERNS]
    folder = Path(snapshot_download(name_or_path, revision=commit, allow_patterns=small))
    if not partly:  # what was downloaded before is linked into the same folder
        folder = Path(snapshot_download(name_or_path, revision=commit, allow_patterns=[*small, SHARD_PATTERNS[0]]))
        if _weights(folder)[1]:
            folder = Path(snapshot_download(name_or_path, revision=commit, allow_patterns=[*small, SHARD_PATTERNS[1]]))
    log.info("%s is at commit %s", name_or_path, commit)
    return folder, commit


def _weights(folder: Path) -> tuple[list[Path], list[str]]:
    """Returns the files that the weights are loaded from, an index included, and the names of those not there.

    Errors: ``ValueError`` for an index that does not read or names files outside the folder.
    """
    for single, index in WEIGHTS:
        if (folder / single).is_file():
            return [folder / single], []
        if (folder / index).is_file():
            try:
                names = sorted(set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values()))
            except (ValueError, KeyError, AttributeError, TypeError):
                raise ValueError(f"{folder / index} is no index of weights: copy it there again") from None
            for name in names:
                if not isinstance(name, str) or Path(name).name != name:
                    raise ValueError(f"{folder / index} names the file {name!r}, which is not right in that folder")
            return (
                [folder / index, *(folder / name for name in names if (folder / name).is_file())],
                [name for name in names if not (folder / name).is_file()],
            )
    return [], [" or ".join(single for single, _ in WEIGHTS)]


def _parts(
    folder: Path, weights: list[Path], dtype: str, trust_remote_code: bool, digest: Callable[[Path], str]
) -> dict[str, str]:
    return {
        "config": _digest(folder, _files(folder, CONFIG_FILES), digest),
        "weights": _digest(folder, weights, digest),
        "tokenizer": _tokenizer_digest(folder, trust_remote_code, digest),
        "code": _digest(folder, _code(folder, trust_remote_code), digest),
        "dtype": dtype,
    }


def _tokenizer_digest(folder: Path, trust_remote_code: bool, digest: Callable[[Path], str]) -> str:
    config = folder / "config.json"  # it may choose the tokenizer's class
    code = _code(folder, trust_remote_code)
    return _digest(folder, [*_files(folder, TOKENIZER_PATTERNS), config, *code], digest)


def _code(folder: Path, trust_remote_code: bool) -> list[Path]:
    return _files(folder, CODE_PATTERNS) if trust_remote_code else []


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _digest(folder: Path, files: list[Path], digest: Callable[[Path], str]) -> str:
    digests = {path.relative_to(folder).as_posix(): digest(path) for path in files}
    return digest_bytes(canonical_json(digests).encode())


def _resolve_dtype(folder: Path, dtype: str, device: str) -> str:
    if dtype != "auto":
        return dtype
    if torch.device(device).type == "cpu":
        return "float32"
    config = json.loads((folder / "config.json").read_text())
    stored: str = config.get("dtype") or config.get("torch_dtype") or "float32"
    return "bfloat16" if stored == "float16" else stored  # float16's range loses the gradients of a mean over tokens
