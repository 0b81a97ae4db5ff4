"""The licence of a base model: what its card says, or the file beside its weights."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tasks.model_files import CARD, LICENCE_PATTERNS, matching

log = logging.getLogger(__name__)

UNKNOWN = "unknown"  # as the hub spells it, like the next
OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class Licence:
    """A licence, as a model card's front matter names one.

    ``identifier``: one of the hub's, "other" for one that has a ``name`` or a ``link``, "unknown" for none;
    ``source``: where it was found, None where nowhere; ``files``: its texts.
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
    files = tuple(matching(folder, LICENCE_PATTERNS))
    stated = _front_matter(folder / CARD)
    if stated.get("license"):
        found = {field: stated.get(field) for field in ("license_name", "license_link")}
        name, link = (None if value is None else str(value) for value in found.values())
        given = stated["license"]
        identifier = [str(one) for one in given] if isinstance(given, list) else str(given)
        return Licence(identifier=identifier, name=name, link=link, source=CARD, files=files)
    if files:
        return Licence(identifier=OTHER, name=None, link=files[0].name, source=files[0].name, files=files)
    return Licence(identifier=UNKNOWN, name=None, link=None, source=None, files=())


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
