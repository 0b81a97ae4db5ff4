"""The licence of a base model: what its card says, or the file beside its weights."""

import logging
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import yaml

from tasks.model_files import CARD, LICENCE_PATTERNS, TERMS_PATTERNS, matching

log = logging.getLogger(__name__)

UNKNOWN = "unknown"  # as the hub spells it, like the next
OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class Licence:
    """A licence, as a model card's front matter names one.

    ``identifier``: one of the hub's, "other" for one that has a ``name`` or a ``link``, "unknown" for none;
    ``link``: http, https, or the name of one of ``files``, its texts and the notices and policies that go with it;
    ``source``: where it was found, None where nowhere.
    """

    identifier: str | list[str]
    name: str | None
    link: str | None
    source: str | None
    files: tuple[Path, ...]

    @property
    def front_matter(self) -> dict[str, Any]:
        """Returns what the front matter of a card says of it."""
        fields = {"license": self.identifier, "license_name": self.name, "license_link": self.link}
        return {field: value for field, value in fields.items() if value is not None}


def find_licence(folder: Path) -> Licence:
    """Returns the licence of the model in ``folder``: its card's word, else a file, which is not interpreted."""
    texts = matching(folder, LICENCE_PATTERNS)
    files = tuple(sorted({*texts, *matching(folder, TERMS_PATTERNS)}))
    stated = _front_matter(folder / CARD)
    identifier = _strings(stated.get("license"))
    if identifier:
        name, link = (_strings(stated.get(field)) for field in ("license_name", "license_link"))
        return Licence(
            identifier=identifier,
            name=name if isinstance(name, str) else None,
            link=_safe_link(link, files) if isinstance(link, str) else None,
            source=CARD,
            files=files,
        )
    if texts:
        return Licence(identifier=OTHER, name=None, link=texts[0].name, source=texts[0].name, files=files)
    return Licence(identifier=UNKNOWN, name=None, link=None, source=None, files=files)


def _strings(value: object) -> str | list[str] | None:
    """Returns a string, or the strings of a list, each as one line; None for anything else and for empty ones."""
    if isinstance(value, list):
        return [line for one in value if isinstance(one, str) and (line := " ".join(one.split()))] or None
    return " ".join(value.split()) or None if isinstance(value, str) else None


def _safe_link(link: str, files: tuple[Path, ...]) -> str | None:
    """Returns a link to the web, or the name of one of ``files``; None for a link to anything else."""
    try:
        parts = urlsplit(link)
    except ValueError:  # brackets that are no address
        return None
    if parts.scheme in ("http", "https") and parts.netloc:
        return link
    name = str(PurePosixPath(link))
    return name if name in {path.name for path in files} else None


def _front_matter(card: Path) -> dict[str, Any]:
    """Returns the YAML between the first two lines of dashes; nothing where there is none, or none that reads."""
    if not card.is_file():
        return {}
    lines = card.read_text(encoding="utf-8", errors="replace").removeprefix("\ufeff").splitlines()
    if not lines or lines[0].rstrip() != "---":
        return {}
    ends = [number for number, line in enumerate(lines[1:], 1) if line.rstrip() == "---"]
    try:
        content = yaml.safe_load("\n".join(lines[1 : ends[0]])) if ends else None
    except yaml.YAMLError:
        log.warning("%s: its front matter is no YAML: the licence is not read from it", card)
        return {}
    return content if isinstance(content, dict) else {}
