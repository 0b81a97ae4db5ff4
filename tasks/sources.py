"""The source that a stage's output depends on, definition by definition, read from the syntax trees.

The closure starts at the stage's function and follows every name that a definition uses, wherever in our packages it
is defined: functions, whole classes, constants. A module used as a value counts whole, and so do the statements of
every imported module that are no definitions. Nothing is imported or run.

What it cannot see: what is found by a name made at run time (``getattr`` with a string, ``importlib``); a function or
subclass that a decorator registers and that nobody names; an effect hidden in the value of a module-level assignment;
data files; other people's packages. A local variable called like something of its module counts as a use of that.
The rest of an imported module counts only where it is used, so that a change of one definition spares the stages that
need another.
"""

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from storage.digest import canonical_json, digest_bytes
from tasks.syntax import STATEMENTS, Functions, Module, chain_of, imports_in, normal_form, parse_module, references

REPOSITORY = Path(__file__).parents[1]
ROOTS = (REPOSITORY, REPOSITORY / "kernels")  # the folders that our packages lie in
STAGES = "tasks"
DECORATOR = "tasks.caching.stage"
INFRASTRUCTURE = (
    # when a stage runs, where its output is kept and what is shown meanwhile, never what is in it
    "tasks.caching",
    "tasks.launch",
    "tasks.places",
    "tasks.progress",
    "tasks.reasons",
    "tasks.running",
    "tasks.shares",
    "tasks.versions",
    "lsp_core",  # the package alone, not what is in it: makes transformers know our classes
    # how files and manifests are kept, found again and freed; what is in them is made by storage.grid and
    # storage.tensors, which count
    "storage.digest",
    "storage.faults",
    "storage.files",
    "storage.manifest",
    "storage.places",
    "storage.remembered",
    "storage.runs",
    "storage.store",
    "storage.upkeep",
    "storage.work",
)
Item = tuple[str, str]  # module, name


@dataclass(frozen=True, kw_only=True)
class Definition:
    """The digest of one definition, and the items that it uses."""

    digest: str
    uses: frozenset[Item]


class Sources:
    """Our source as it is now below ``roots``; each file is read once."""

    def __init__(self, roots: Sequence[Path] = ROOTS) -> None:
        self._roots = tuple(roots)
        self._modules: dict[str, Module | None] = {}
        self._definitions: dict[Item, Definition] = {}

    def stages(self) -> list[str]:
        """Returns the qualified names of the functions that ``@stage()`` decorates, sorted."""
        return sorted(
            f"{module.name}.{name}"
            for module in self._below(STAGES)
            for name, statements in module.definitions.items()
            for statement in statements
            if isinstance(statement, Functions)
            and statement.name == name
            and any(self._makes_stage(module, decorator) for decorator in statement.decorator_list)
        )

    def covered(self, function: str) -> dict[str, str]:
        """Returns the digest of each definition that ``function``, such as ``tasks.train.train``, depends on, by name.

        Errors: ``ValueError`` if there is no such function, ``SyntaxError`` for a file that does not parse.
        """
        name, _, attribute = function.rpartition(".")
        module = self._module(name)
        if module is None or attribute not in module.definitions:
            folders = ", ".join(map(str, self._roots))
            raise ValueError(f"{function}: there is no such definition below {folders}")
        pending, seen, digests = [(name, attribute)], set[Item](), dict[str, str]()
        while pending:
            item = pending.pop()
            if item in seen:
                continue
            seen.add(item)
            definition = self._definition(*item)
            if definition.digest:
                digests[".".join(item)] = definition.digest
            pending.extend(definition.uses)
        return dict(sorted(digests.items()))

    def _definition(self, module_name: str, name: str) -> Definition:
        if (module_name, name) not in self._definitions:
            self._definitions[module_name, name] = self._read_definition(module_name, name)
        return self._definitions[module_name, name]

    def _read_definition(self, module_name: str, name: str) -> Definition:
        module = self._module(module_name)
        assert module is not None
        statements = module.definitions.get(name, [])
        local, _, imported = imports_in(module, statements)
        uses: set[Item] = {(module_name, STATEMENTS)}
        meanings: dict[str, list[str]] = {}
        for root, attributes in references(statements):
            paths = [".".join([path, *attributes]) for path in local.get(root, [])]
            found = {item for path in paths for item in self._resolve(path)}
            found |= set(self._bound(module, root, attributes))
            uses |= {item for item in found if isinstance(item, tuple)}
            outside = paths or root in module.imports or root not in module.definitions
            if found and outside:  # the same text means something else where an import changed
                meanings[".".join([root, *attributes])] = sorted(
                    {".".join(item) if isinstance(item, tuple) else item for item in found}
                )
        for path in [*imported, *(module.imported if name == STATEMENTS else ())]:
            uses |= {(imported_module, STATEMENTS) for imported_module in self._run_by_import(path)}
        form = {"statements": [normal_form(statement) for statement in statements], "names": meanings}
        digest = digest_bytes(canonical_json(form).encode()) if statements else ""
        return Definition(digest=digest, uses=frozenset(uses))

    def _resolve(self, path: str, passed: frozenset[str] = frozenset()) -> Iterator[Item | str]:
        """Yields the items that a dotted path stands for, or the path itself where it leaves what is followed."""
        if path in passed:  # modules that import from each other
            return
        passed |= {path}
        first, *rest = path.split(".")
        module = self._module(first)
        while module is not None:
            below = rest and self._module(f"{module.name}.{rest[0]}") is not None
            if module.name in INFRASTRUCTURE and not below:
                break
            if not rest:
                yield from self._whole(module)
                return
            name, *rest = rest
            bound = list(self._bound(module, name, rest, passed))
            yield from bound
            submodule = self._module(f"{module.name}.{name}")
            if submodule is None:
                if not bound:
                    yield from self._whole(module)
                return
            if bound and not rest:
                return
            module = submodule
        yield path

    def _bound(
        self, module: Module, name: str, attributes: Iterable[str], passed: frozenset[str] = frozenset()
    ) -> Iterator[Item | str]:
        """Yields what ``name`` is in ``module``: its definition there, or what an import makes it."""
        if name in module.definitions:
            yield module.name, name
        for path in module.imports.get(name, []):
            yield from self._resolve(".".join([path, *attributes]), passed)
        if name not in module.definitions and name not in module.imports:
            for star in module.stars:
                source = self._module(star)
                if source is not None and star not in INFRASTRUCTURE and star not in passed:
                    yield from self._bound(source, name, attributes, passed | {star})

    def _whole(self, module: Module) -> Iterator[Item]:
        for part in self._below(module.name):
            if part.name not in INFRASTRUCTURE:
                yield from ((part.name, name) for name in [STATEMENTS, *part.definitions])

    def _run_by_import(self, path: str) -> Iterator[str]:
        """Yields the followed modules that importing ``path`` runs: it and its packages, as far as they are ours."""
        parts = path.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            if name not in INFRASTRUCTURE and self._module(name) is not None:
                yield name

    def _makes_stage(self, module: Module, decorator: ast.expr) -> bool:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        root, attributes = chain_of(called) or ("", ())
        return DECORATOR in self._bound(module, root, attributes)

    def _below(self, name: str) -> Iterator[Module]:
        """Yields the module and, of a package, every module in it."""
        relative = Path(*name.split("."))
        names = {name}
        for root in self._roots:
            for path in (root / relative).rglob("*.py"):
                parts = path.relative_to(root).with_suffix("").parts
                names.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        for found in sorted(names):
            module = self._module(found)
            if module is not None:
                yield module

    def _module(self, name: str) -> Module | None:
        if name not in self._modules:
            self._modules[name] = self._read_module(name)
        return self._modules[name]

    def _read_module(self, name: str) -> Module | None:
        if not all(part.isidentifier() for part in name.split(".")):
            return None
        for root in self._roots:
            stem = root.joinpath(*name.split("."))
            for path, package in ((stem / "__init__.py", name), (stem.with_suffix(".py"), name.rpartition(".")[0])):
                if path.is_file():
                    return parse_module(path, name, package)
        return None


def source_digest(covered: dict[str, str]) -> str:
    """Returns the one digest of what ``Sources.covered`` returned."""
    return digest_bytes(canonical_json(covered).encode())
