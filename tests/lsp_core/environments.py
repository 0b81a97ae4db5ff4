"""A second environment that holds only named distributions and what they require, at the versions installed here.

Nothing is downloaded or copied: its files are links to those that pip recorded for each distribution. No path of the
first environment is on its ``sys.path``, so nothing else can be imported.
"""

import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement


def required(names: list[str]) -> dict[str, Distribution]:
    """Returns the distributions of these names and all that they require without extras, as far as it is installed."""
    found: dict[str, Distribution] = {}
    while names:
        name = names.pop().lower().replace("_", "-")
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue
        wanted = [Requirement(line) for line in found[name].requires or ()]
        names += [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def make_environment(folder: Path, names: list[str]) -> tuple[Path, set[str]]:
    """Returns the interpreter of a new environment in ``folder`` and the distributions that it holds."""
    venv.create(folder, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    chosen = required(names)
    for each in chosen.values():
        for file in each.files or ():
            if ".." in file.parts:  # a command
                continue
            link = packages / file
            link.parent.mkdir(parents=True, exist_ok=True)
            source = Path(str(each.locate_file(file)))
            if source.exists() and not link.exists():
                link.symlink_to(source)
    return folder / "bin" / "python", set(chosen)
