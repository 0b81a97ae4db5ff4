"""The files of a model's folder: found on the disk or the hub, refused if quantized, digested by their parts."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download

from storage.digest import canonical_json, digest_bytes
from tasks.hub import commit_of
from tasks.processors import PROCESSOR_FILES

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
CARD = "README.md"
# with the card for people alone: in no digest; in any case, which globs and the hub tell apart
LICENCE_PATTERNS = ("[Ll][Ii][Cc][Ee][Nn][SsCc][Ee]*", "[Cc][Oo][Pp][Yy][Ii][Nn][Gg]*")
TERMS_PATTERNS = ("[Nn][Oo][Tt][Ii][Cc][Ee]*", "[Uu][Ss][Ee]_[Pp][Oo][Ll][Ii][Cc][Yy]*")  # that go with a licence


def locate(name_or_path: str, revision: str | None, *, partly: bool) -> tuple[Path, str | None]:
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
        raise ValueError(
            f"model.name_or_path={name_or_path!r}: there is no such folder on this machine; name one that is, or a hub "
            "id"
        )
    commit = commit_of("model", name_or_path, revision)
    small = [*(i for _, i in WEIGHTS), *TOKENIZER_PATTERNS, *CONFIG_FILES, *PROCESSOR_FILES, *CODE_PATTERNS]
    small += [CARD, *LICENCE_PATTERNS, *TERMS_PATTERNS]
    folder = Path(snapshot_download(name_or_path, revision=commit, allow_patterns=small))
    if (folder / "config.json").is_file():
        refuse_quantized(folder)  # before its weights are downloaded
    if not partly:  # what was downloaded before is linked into the same folder
        folder = Path(snapshot_download(name_or_path, revision=commit, allow_patterns=[*small, SHARD_PATTERNS[0]]))
        if weight_files(folder)[1]:
            folder = Path(snapshot_download(name_or_path, revision=commit, allow_patterns=[*small, SHARD_PATTERNS[1]]))
    log.info("%s is at commit %s", name_or_path, commit)
    return folder, commit


def refuse_quantized(folder: Path) -> None:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{path} does not read as JSON: copy it there again") from None
    of_text = config.get("text_config") or {}
    found = config.get("quantization_config") or config.get("compression_config") or of_text.get("quantization_config")
    if found:
        older = "bitsandbytes" if any("load_in_" in name for name in found) else "a method that it does not name"
        raise ValueError(
            f"{path}: the weights are quantized ({found.get('quant_method', older)}): use the unquantized checkpoint, "
            "and quantize the merged result afterwards if wanted"
        )


def weight_files(folder: Path) -> tuple[list[Path], list[str]]:
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


def digest_parts(
    folder: Path, weights: list[Path], dtype: str, task: str, trust_remote_code: bool, digest: Callable[[Path], str]
) -> dict[str, str]:
    """Returns the parts of the digest, all but what the model reads with."""
    return {
        "config": digest_files(folder, matching(folder, CONFIG_FILES), digest),
        "weights": digest_files(folder, weights, digest),
        "code": digest_files(folder, code_files(folder, trust_remote_code), digest),
        "dtype": dtype,
        "task": task,
    }


def tokenizer_digest(folder: Path, trust_remote_code: bool, digest: Callable[[Path], str]) -> str:
    config = folder / "config.json"  # it may choose the tokenizer's class
    code = code_files(folder, trust_remote_code)
    return digest_files(folder, [*matching(folder, TOKENIZER_PATTERNS), config, *code], digest)


def code_files(folder: Path, trust_remote_code: bool) -> list[Path]:
    return matching(folder, CODE_PATTERNS) if trust_remote_code else []


def matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def digest_files(folder: Path, files: list[Path], digest: Callable[[Path], str]) -> str:
    digests = {path.relative_to(folder).as_posix(): digest(path) for path in files}
    return digest_bytes(canonical_json(digests).encode())
