"""One source file as a syntax tree: the names its statements bind and use, and a form that no layout changes."""

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STATEMENTS = "<module>"  # in the place of a name: the statements of a module that are no definitions

Functions = ast.FunctionDef | ast.AsyncFunctionDef
InnerScopes = ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
UNSEEN_FIELDS = {"ctx", "kind", "type_comment", "type_ignores", "type_params"}  # follow from the rest, or mean nothing


@dataclass(kw_only=True)
class Module:
    """``definitions``: the statements that bind each name; ``imports``: the dotted paths that a name is imported from.

    ``stars``: the modules that all names are imported from; ``imported``: every path that importing this one imports.
    """

    name: str
    package: str
    definitions: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, list[str]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    imported: list[str] = field(default_factory=list)


def parse_module(path: Path, name: str, package: str) -> Module:
    """Returns the module ``name`` in ``package``, read from ``path``. Errors: ``SyntaxError``."""
    module = Module(name=name, package=package)
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    module.imports, module.stars, module.imported = imports_in(module, _outside_scopes(tree.body))
    for statement in tree.body:
        names = set(_names_bound(statement))
        if _acts(statement):
            names.add(STATEMENTS)
        for bound in names:
            module.definitions.setdefault(bound, []).append(statement)
    return module


def imports_in(module: Module, nodes: Iterable[ast.AST]) -> tuple[dict[str, list[str]], list[str], list[str]]:
    """Returns what the imports in ``nodes`` bind (name: dotted paths), the modules imported by star, and all paths."""
    bound: dict[str, list[str]] = {}
    stars, imported = [], []
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                path = alias.name if alias.asname else alias.name.partition(".")[0]
                bound.setdefault(alias.asname or path, []).append(path)
                imported.append(alias.name)
        elif isinstance(node, ast.ImportFrom):
            package = module.package.split(".")
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                if alias.name == "*":
                    stars.append(base)
                    imported.append(base)
                else:
                    bound.setdefault(alias.asname or alias.name, []).append(f"{base}.{alias.name}")
                    imported.append(f"{base}.{alias.name}")
    return bound, stars, imported


def _outside_scopes(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yields the import statements among ``nodes`` and in their blocks, not those in functions and classes."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, Functions | ast.ClassDef | ast.expr):
            yield from _outside_scopes(ast.iter_child_nodes(node))


def _names_bound(node: ast.AST) -> Iterator[str]:
    """Yields the names that a module-level statement binds, other than by a plain import."""
    if isinstance(node, Functions | ast.ClassDef):
        yield node.name
        for inner in ast.walk(node):
            if isinstance(inner, ast.Global):
                yield from inner.names
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest
    if isinstance(node, Functions | ast.ClassDef | InnerScopes):
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):  # in a block that decides what the name is
            yield from (alias.asname or alias.name.partition(".")[0] for alias in child.names)
        yield from _names_bound(child)


def _acts(statement: ast.stmt) -> bool:
    """Whether a module-level statement does more than bind names."""
    if isinstance(statement, ast.Import | ast.ImportFrom | Functions | ast.ClassDef | ast.Pass):
        return False
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        stored = (node for target in targets for node in ast.walk(target))
        return any(isinstance(node, ast.Attribute | ast.Subscript) for node in stored)
    inside = list(_statements_in(statement))
    return not inside or any(_acts(node) for node in inside)


def _statements_in(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            yield from _statements_in(child)


def references(statements: Iterable[ast.stmt]) -> set[tuple[str, tuple[str, ...]]]:
    """Returns the names that are read, each with the attributes that directly follow it."""
    found: set[tuple[str, tuple[str, ...]]] = set()

    def visit(node: ast.AST) -> None:
        chain = chain_of(node)
        if chain is not None:
            if not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)):
                found.add(chain)
            return
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):  # the one store that also reads
            found.add((node.target.id, ()))
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if annotation is not None:
                for quoted in _quoted(annotation):
                    visit(quoted)
        for child in ast.iter_child_nodes(node):
            visit(child)

    for statement in statements:
        visit(statement)
    return found


def chain_of(node: ast.AST) -> tuple[str, tuple[str, ...]] | None:
    """Returns ``a``, ``(b, c)`` for the expression ``a.b.c``, None for any that does not start at a name."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value
    return (node.id, tuple(reversed(attributes))) if isinstance(node, ast.Name) else None


def _quoted(annotation: ast.AST) -> Iterator[ast.expr]:
    """Yields the expressions that an annotation holds in quotation marks."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            yield ast.parse(annotation.value, mode="eval").body
        except SyntaxError:  # words, as in Annotated
            return
    chain = chain_of(annotation.value) if isinstance(annotation, ast.Subscript) else None
    if chain is None or "Literal" not in (chain[0], *chain[1]):
        for child in ast.iter_child_nodes(annotation):
            yield from _quoted(child)


def normal_form(node: Any) -> Any:
    """Returns a syntax tree as plain JSON that layout, comments, docstrings and the version of Python do not change."""
    if isinstance(node, ast.Constant):
        value = node.value
        return {"": "Constant", type(value).__name__: value if isinstance(value, str) else repr(value)}
    if isinstance(node, ast.JoinedStr):
        return {"": "JoinedStr", "values": _joined(node.values)}
    if isinstance(node, ast.AST):
        fields = {name: value for name, value in ast.iter_fields(node) if name not in UNSEEN_FIELDS}
        forms = {name: normal_form(value) for name, value in fields.items()}
        kept = {name: form for name, form in forms.items() if form is not None and form != []}
        if kept.get("format_spec") == {"": "JoinedStr", "values": []}:
            del kept["format_spec"]
        return {"": type(node).__name__, **kept}
    if isinstance(node, list):
        return [normal_form(item) for item in node if not _idle(item)]
    return node


def _joined(values: Sequence[ast.expr]) -> list[Any]:
    """Returns the parts of an f-string with neighbouring pieces of text in one, however the parser cut them."""
    parts: list[Any] = []
    for value in values:
        text = value.value if isinstance(value, ast.Constant) else None
        if not isinstance(text, str):
            parts.append(normal_form(value))
        elif parts and isinstance(parts[-1], str):
            parts[-1] += text
        elif text:
            parts.append(text)
    return parts


def _idle(node: Any) -> bool:
    """Whether a statement does nothing: ``pass``, a docstring, an ellipsis."""
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
