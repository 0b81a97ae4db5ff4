"""What the store knows of an artifact beside its files: a manifest, which carries a digest of its own.

Everything read here came from a file that anyone may have changed, so names are checked before they become paths.
"""

import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from storage.digest import canonical_json, digest_bytes, digest_listing

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=128)]  # of a folder or a file


def check_relative(name: str) -> str:
    """Returns ``name`` if it is a relative path that stays where it starts. Errors: ``ValueError``."""
    parts = PurePosixPath(name).parts
    if "/".join(parts) != name or not parts or ".." in parts or "\\" in name or "\0" in name:
        raise ValueError(f"the file name {name!r} leads out of its folder")
    return name


class Record(BaseModel):
    """Immutable JSON with no field that is not listed."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ArtifactRef(Record):
    """What tasks pass instead of tensors: ``key`` says what made it, ``digest`` what it holds."""

    kind: Name
    key: Name
    uri: str
    digest: Name
    num_bytes: int


class FileFacts(Record):
    """One file of a payload; ``size`` in bytes."""

    sha256: str
    size: int


class InputRecord(Record):
    """One input of a stage: an artifact by ``kind`` and ``key``, or something outside the store by its ``facts``."""

    digest: str
    kind: Name | None = None
    key: Name | None = None
    facts: dict[str, Any] = {}


class RunName(Record):
    """The run that wrote an artifact."""

    id: Name
    name: str


class Lineage(Record):
    """Where an artifact comes from; ``stage`` is the function, ``seconds`` the time it took.

    ``hints``: artifacts that were read and cannot have changed the result.
    """

    stage: str
    version: int
    inputs: dict[str, InputRecord]
    hints: dict[str, InputRecord] = {}
    settings: dict[str, Any]
    packages: dict[str, str]
    device: str
    run: RunName | None
    seconds: float


class Manifest(Record):
    """Everything about one artifact but its files."""

    kind: Name
    key: Name
    digest: Name
    num_bytes: int
    files: dict[Annotated[str, AfterValidator(check_relative)], FileFacts]
    created: str
    lineage: Lineage

    def to_json(self) -> bytes:
        """Returns the manifest's file content, with the digest that ``from_json`` checks."""
        content = self.model_dump(mode="json")
        sealed = content | {"manifest_digest": _seal(content)}
        return json.dumps(sealed, indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes, kind: str, key: str) -> Self:
        """Returns the manifest of ``kind`` and ``key``. Errors: ``ValueError`` where the content is not that."""
        content = json.loads(data)
        if not isinstance(content, dict) or content.pop("manifest_digest", None) != _seal(content):
            raise ValueError("its content does not match its digest")
        manifest = cls.model_validate(content)
        if manifest.to_json() != data:
            raise ValueError("it is not as it was written")
        if manifest.digest != digest_listing({name: (file.sha256, file.size) for name, file in manifest.files.items()}):
            raise ValueError("its digest is not that of its files")
        if (manifest.kind, manifest.key) != (kind, key):
            raise ValueError(f"it is that of {manifest.kind} {manifest.key[:12]}")
        return manifest


def _seal(content: Mapping[str, Any]) -> str:
    return digest_bytes(canonical_json(content).encode())
