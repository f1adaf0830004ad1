"""Tests that the reference lists every public name, and that every argument is documented."""

import ast
import functools
import importlib.util
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "paceline"

specification = importlib.util.spec_from_file_location(
    "reference", ROOT / "scripts" / "reference.py"
)
assert specification is not None
assert specification.loader is not None
reference = importlib.util.module_from_spec(specification)
specification.loader.exec_module(reference)

Definition = ast.ClassDef | ast.FunctionDef


@functools.cache
def _module(name: str) -> ast.Module:
    path = PACKAGE.joinpath(*name.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _is_stub(definition: Definition) -> bool:
    return any("overload" in ast.unparse(decorator) for decorator in definition.decorator_list)


def _definition(module: str, name: str) -> Definition | None:
    """Returns a class or function, following imports; None for any other name."""
    for node in _module(module).body:
        is_here = isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
        if is_here and not _is_stub(node):
            return node
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _definition(node.module, alias.name)
    return None


def _arguments(function: ast.FunctionDef) -> list[str]:
    taken = function.args
    every = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs]
    every += [argument for argument in (taken.vararg, taken.kwarg) if argument is not None]
    return [
        argument.arg
        for argument in every
        if argument.arg not in ("self", "cls") and not argument.arg.startswith("_")
    ]


def _unexplained(function: ast.FunctionDef, text: str) -> list[str]:
    """Returns the arguments that a docstring does not mention."""
    return [
        name for name in _arguments(function) if f"{name}:" not in text and f"`{name}`" not in text
    ]


def _fields_without_text(definition: ast.ClassDef, text: str) -> list[str]:
    """Returns the fields of a dataclass or struct that have no documentation."""
    body = definition.body
    return [
        node.target.id
        for index, node in enumerate(body)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not node.target.id.startswith("_")
        and f"{node.target.id}:" not in text
        and f"`{node.target.id}`" not in text
        and not (
            index + 1 < len(body)
            and isinstance(following := body[index + 1], ast.Expr)
            and isinstance(following.value, ast.Constant)
        )
    ]


def _gaps(definition: Definition) -> list[str]:
    text = ast.get_docstring(definition)
    if text is None:
        return [definition.name]
    if isinstance(definition, ast.FunctionDef):
        return [f"{definition.name}({name})" for name in _unexplained(definition, text)]
    gaps = [f"{definition.name}.{name}" for name in _fields_without_text(definition, text)]
    for node in definition.body:
        if not isinstance(node, ast.FunctionDef) or _is_stub(node):
            continue
        own = ast.get_docstring(node) or ""
        if node.name == "__init__":
            gaps += [f"{definition.name}({name})" for name in _unexplained(node, text + own)]
        elif not node.name.startswith("_"):
            called = f"{definition.name}.{node.name}"
            gaps += [f"{called}({name})" for name in _unexplained(node, own)]
            gaps += [] if own else [called]
    return gaps


def test_the_reference_lists_what_is_exported() -> None:
    for name, text in reference.tables().items():
        committed = (reference.TABLES / name).read_text(encoding="utf-8")
        assert committed == text, f"{name} is out of date; run scripts/reference.py"


@pytest.mark.parametrize("room", reference.exports())
def test_public_names_are_documented_to_the_last_argument(room: str) -> None:
    _, names = reference.exports()[room]
    found = [_definition(room, name) for name in names]
    gaps = [gap for definition in found if definition is not None for gap in _gaps(definition)]
    assert not gaps
