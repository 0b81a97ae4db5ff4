"""Nothing that is read from a file or a store is ever run: the source holds no call that could do so."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("flows", "tasks", "lsp_core", "storage", "kernels")
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"torch.load", "eval", "exec", "yaml.load", "numpy.load", "np.load"}
FORBIDDEN_TRUE = {"trust_remote_code", "allow_pickle"}  # a literal True; the configuration may say so


def dangers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            if ast.unparse(node.func) in FORBIDDEN_CALLS:
                yield ast.unparse(node.func)
            for keyword in node.keywords:
                is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                if keyword.arg in FORBIDDEN_TRUE and is_true:
                    yield f"{keyword.arg}=True"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_source_runs_what_it_reads(package: str) -> None:
    found = {
        str(path.relative_to(ROOT)): list(dangers(ast.parse(path.read_text(encoding="utf-8"))))
        for path in (ROOT / package).rglob("*.py")
    }
    assert found
    assert {path: calls for path, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "code", ["import pickle", "from joblib import load", "torch.load(f)", "eval(s)", "f(trust_remote_code=True)"]
)
def test_the_check_sees_what_it_looks_for(code: str) -> None:
    assert list(dangers(ast.parse(code)))
