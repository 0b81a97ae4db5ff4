"""What the source of this project's own stages covers."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.sources import INFRASTRUCTURE, REPOSITORY, ROOTS, Sources, source_digest


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a copy of our packages, every file printed anew from its syntax tree."""
    folder = tmp_path_factory.mktemp("copy")
    for package in ("tasks", "lsp_core", "storage", "kernels/lsp_kernels"):
        target = folder / Path(package).name
        shutil.copytree(REPOSITORY / package, target, ignore=shutil.ignore_patterns("__pycache__"))
        for path in target.rglob("*.py"):
            path.write_text(ast.unparse(ast.parse(path.read_text(encoding="utf-8"))), encoding="utf-8")
    return folder


def digests(roots: tuple[Path, ...]) -> dict[str, str]:
    sources = Sources(roots)
    return {stage: source_digest(sources.covered(stage)) for stage in sources.stages()}


def stages_that_change_with(copy: Path, file: str, function: str) -> set[str]:
    """Returns the stages whose digest another body of ``function`` in ``file`` changes."""
    path = copy / file
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    found.body.append(ast.parse("raise NotImplementedError").body[0])
    before = digests((copy,))
    try:
        path.write_text(ast.unparse(tree), encoding="utf-8")
        after = digests((copy,))
    finally:
        path.write_text(text, encoding="utf-8")
    return {stage.removeprefix("tasks.") for stage in before if before[stage] != after[stage]}


def test_printing_all_our_source_anew_changes_no_digest(copy: Path) -> None:
    assert digests((copy,)) == digests(ROOTS)


ALLOCATING = {"allocate.allocate", "allocate.allocate_like", "within.allocate_within", "curve.curve"}


def test_the_allocator_changes_what_allocates_and_nothing_else(copy: Path) -> None:
    assert stages_that_change_with(copy, "lsp_core/allocation.py", "greedy") == ALLOCATING


def test_the_orthonormalization_changes_training_and_merging(copy: Path) -> None:
    changed = stages_that_change_with(copy, "lsp_core/orthogonal.py", "orthonormalize")
    assert {"train.train", "merge.merge"} <= changed
    assert changed.isdisjoint({"calibrate.calibrate", "gather.gather", "allocate.allocate", "report.report"})


def test_what_training_covers() -> None:
    covered = set(Sources().covered("tasks.train.train"))
    assert {"lsp_core.orthogonal.orthonormalize", "lsp_core.training_settings.TrainingSettings"} <= covered
    assert {"storage.tensors.load_tensors", "tasks.models.load_model", "tasks.allocate.read_removed"} <= covered
    assert not [name for name in covered if name.startswith(("lsp_core.allocation.", "lsp_core.basis.", "tasks.text."))]
    assert not [name for name in covered if name.rpartition(".")[0] in INFRASTRUCTURE]


def test_infrastructure_names_modules_that_exist() -> None:
    stems = [REPOSITORY / name.replace(".", "/") for name in INFRASTRUCTURE]
    assert not [
        stem for stem in stems if not stem.with_suffix(".py").is_file() and not (stem / "__init__.py").is_file()
    ]


def test_the_digests_do_not_depend_on_the_order_of_sets() -> None:
    program = "from tasks.sources import *; s = Sources(); print([(x, list(s.covered(x).items())) for x in s.stages()])"
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(REPOSITORY)},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(texts) == 1
