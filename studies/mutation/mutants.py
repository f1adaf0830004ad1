"""Finds small edits that break a promise of a source file, and writes all of them into one copy.

A mutant is one edit inside a function: a turned comparison, a lost statement, a constant that is
off by one. The instrumented copy holds every mutant behind ``hit(number)``, which says whether that
mutant is the active one, so that a process changes mutants without importing anything again.

    if time_s <= limit_s:                  # becomes
    if (time_s < limit_s) if hit(7) else (time_s <= limit_s):

What runs at import (constants, defaults, class bodies), assertions, annotations and the texts of
errors are left alone. A study of other edits derives its own class from `Instrumenter`.
"""

import ast
import copy
import dataclasses
import pathlib
from collections.abc import Iterator

HIT = "_hit_"
"""Name of the function in instrumented files that says whether a mutant is active."""

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitXor: ast.BitAnd,
}
_TEXT_ONLY = ("__repr__", "__str__")
"""Functions whose results only people read."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One edit of a source file."""

    number: int
    path: str
    """The file, relative to the package."""
    line: int
    function: str
    before: str
    after: str
    occurrence: int
    """How many edits of the function with the same texts stand before this one."""

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """Identifies the edit after lines have moved."""
        return self.path, self.function, self.before, self.after, self.occurrence

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.function}: {self.before} -> {self.after}"


def instrument(
    source: pathlib.Path, path: str, first: int, edits: type["Instrumenter"]
) -> tuple[str, list[Mutant]]:
    """Returns the instrumented text of a file, and its mutants, numbered from `first`.

    Args:
        source: The file.
        path: Its name in mutants.
        first: Number of its first mutant.
        edits: What is edited.
    """
    tree = ast.parse(source.read_text(encoding="utf-8"))
    instrumenter = edits(path, first)
    instrumenter.visit(tree)
    start = 1 if ast.get_docstring(tree) is not None else 0
    tree.body.insert(start, ast.parse(f"from paceline.mutants_ import hit as {HIT}").body[0])
    return ast.unparse(ast.fix_missing_locations(tree)), instrumenter.mutants


class Instrumenter(ast.NodeTransformer):
    """Writes edits of functions into a tree, each behind a call of `HIT`.

    Args:
        path: Name of the file in mutants.
        first: Number of its first mutant.
    """

    def __init__(self, path: str, first: int) -> None:
        self._path, self._first = path, first
        self._names: list[str] = []
        self._num_functions = 0
        self.mutants: list[Mutant] = []

    def _active(self, node: ast.AST, before: str, after: str) -> ast.expr:
        """Adds a mutant; returns the expression that says whether it is active."""
        number = self._first + len(self.mutants)
        where = getattr(node, "lineno", 0)
        function = ".".join(self._names)
        texts = function, before, after
        same = sum((each.function, each.before, each.after) == texts for each in self.mutants)
        self.mutants.append(Mutant(number, self._path, where, *texts, same))
        return ast.Call(ast.Name(HIT, ast.Load()), [ast.Constant(number)], [])

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._names.append(node.name)
        node.body = [self.visit(each) for each in node.body]
        self._names.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name in _TEXT_ONLY:
            return node
        self._names.append(node.name)
        self._num_functions += 1
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        node.body = node.body[: len(node.body) - len(body)] + [self.visit(each) for each in body]
        self._num_functions -= 1
        self._names.pop()
        return node

    def lost(self, node: ast.stmt, *, descend: bool = True) -> ast.AST:
        """Returns a statement that is left out while its mutant is active."""
        if not self._num_functions or _only_speaks(node):
            return node
        active = self._active(node, ast.unparse(node), "pass")
        if descend:
            self.generic_visit(node)
        return ast.If(ast.UnaryOp(ast.Not(), active), [node], [])

    def replaced(self, node: ast.expr, changed: ast.expr) -> ast.AST:
        """Returns an expression that is another one while its mutant is active."""
        if not self._num_functions:
            return node
        plain = copy.deepcopy(node)
        self.generic_visit(node)
        return self.choice(plain, node, changed)

    def choice(self, plain: ast.expr, original: ast.expr, changed: ast.expr) -> ast.expr:
        """Returns the choice between an expression, whose parts may be edited, and another one."""
        active = self._active(plain, ast.unparse(plain), ast.unparse(changed))
        return ast.IfExp(active, changed, original)


class Promises(Instrumenter):
    """Turns comparisons and conditions around, changes constants, and loses statements."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_match_case(self, node: ast.match_case) -> ast.AST:
        node.body = [self.visit(each) for each in node.body]
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        is_for_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return node if is_for_types else self._conditional(node)

    def visit_While(self, node: ast.While) -> ast.AST:
        return self._conditional(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        return self._conditional(node)

    def _conditional(self, node: ast.If | ast.While | ast.IfExp) -> ast.AST:
        """Turns a test that is no comparison around; comparisons are turned around themselves."""
        plain = copy.deepcopy(node.test)
        self.generic_visit(node)
        if self._num_functions and isinstance(plain, (ast.Name, ast.Attribute, ast.Call)):
            node.test = self.choice(plain, node.test, ast.UnaryOp(ast.Not(), plain))
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        changed = copy.deepcopy(node)
        for index, operator in enumerate(changed.ops):
            changed.ops[index] = _COMPARISONS[type(operator)]()
        return self.replaced(node, changed)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        changed = copy.deepcopy(node)
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return self.replaced(node, changed)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        if isinstance(node.op, ast.Not):
            return self.replaced(node, copy.deepcopy(node.operand))
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        is_text = any(_is_text(each) for each in (node.left, node.right))
        if is_text or type(node.op) not in _ARITHMETIC:
            return self.generic_visit(node)
        changed = copy.deepcopy(node)
        changed.op = _ARITHMETIC[type(node.op)]()
        return self.replaced(node, changed)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool):
            return self.replaced(node, ast.Constant(not node.value))
        if isinstance(node.value, int):
            return self.replaced(node, ast.Constant(node.value + 1))
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return self.lost(node) if isinstance(node.value, ast.Call) else self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        # A name that is never bound would fail at once; an attribute or an item keeps its value.
        keeps = all(isinstance(each, (ast.Attribute, ast.Subscript)) for each in node.targets)
        is_initial = bool(self._names) and self._names[-1] == "__init__"
        return self.lost(node) if keeps and not is_initial else self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        return self.lost(node)

    def visit_Delete(self, node: ast.Delete) -> ast.AST:
        return self.lost(node)

    def visit_Continue(self, node: ast.Continue) -> ast.AST:
        return self.lost(node)

    def visit_Break(self, node: ast.Break) -> ast.AST:
        return self.lost(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return self.lost(node, descend=False)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _only_speaks(node: ast.stmt) -> bool:
    """Returns whether a statement only prints to the standard error stream or warns."""
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith(
        ("sys.stderr.write(", "warnings.warn(", "print(")
    )


def source_files(package: pathlib.Path, room: str) -> Iterator[pathlib.Path]:
    """Yields the files of a room, which is a folder or a module of the package.

    Args:
        package: Directory of the package.
        room: Such as ``checkpoint`` or ``data/sampling``.
    """
    folder = package / room
    yield from sorted(folder.rglob("*.py")) if folder.is_dir() else [package / f"{room}.py"]
