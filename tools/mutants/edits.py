"""Edits of one source file, one place at a time."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

EXCHANGED = {
    one: other
    for names in (
        ("q_proj", "k_proj", "v_proj"),
        ("gate_proj", "up_proj", "down_proj"),
        ("gate_up_proj", "down_proj"),
        ("q_norm", "k_norm"),
        ("q_layernorm", "k_layernorm"),
        ("linear_fc1", "linear_fc2"),
        ("input_layernorm", "post_attention_layernorm"),
        ("q_a_proj", "q_b_proj"),
        ("w1", "w3", "w2"),
        ("enorm", "hnorm"),
        ("in_proj_qkvz", "in_proj_ba"),
        ("A_log", "dt_bias"),
        ("embed_tokens", "lm_head"),
    )
    for one, other in zip(names, (*names[1:], names[0]), strict=True)
}
"""Names, and each the other that takes its place."""
ATTRIBUTES = {
    one: other
    for names in (
        ("heads", "groups"),
        ("hidden", "vocab"),
        ("keys", "values"),
        ("key_dim", "value_dim"),
        ("at", "first"),
        ("count", "step"),
        ("start", "last"),
        ("tensor", "index"),
        ("shape", "axis"),
        ("gain", "plus"),
    )
    for one, other in zip(names, (*names[1:], names[0]), strict=True)
}
"""Attributes of sizes, rows and weights, exchanged likewise."""
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "*",
    ast.Pow: "*",
}
COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
COMMUTATIVE = {
    *("max", "min", "gcd", "np.maximum", "np.minimum", "set", "frozenset"),
    *("intersect", "intersect_ranges", "_intersect", "intersect_all"),
}
NAME = re.compile(r"[\w.{}]+")


class Mutant(NamedTuple):
    """One edit of a file: `edit` names it, uniquely within the function `within`; `lines` is the range that it changes."""

    file: Path
    within: str
    edit: str
    lines: range
    source: bytes

    @property
    def name(self) -> str:
        return f"{file_name(self.file)}: {self.within}: {self.edit}"


class _Edit(NamedTuple):
    text: str
    node: ast.expr | ast.stmt
    start: int
    end: int
    new: str


def file_name(file: Path) -> str:
    """Return the name of a file with that of its folder."""
    return f"{file.parent.name}/{file.name}"


def mutants(file: Path) -> Iterator[Mutant]:
    """Yield every edit of a file.

    Args:
        file: Python source.

    Returns:
        Edits in the order of the source. Docstrings, messages of errors, annotations, decorators and imports stay as they are.
    """
    source = file.read_bytes()
    names = Counter[tuple[str, str]]()
    finder = _Finder(source)
    for within, edit in finder.module():
        names[within, edit.text] += 1
        again = names[within, edit.text]
        lines = range(edit.node.lineno, (edit.node.end_lineno or edit.node.lineno) + 1)
        changed = source[: edit.start] + edit.new.encode() + source[edit.end :]
        yield Mutant(file, within, edit.text + (f" ({again})" if again > 1 else ""), lines, changed)


class _Finder:
    """Finder of the edits of a source, each with the function that contains it."""

    def __init__(self, source: bytes) -> None:
        self._source, self._starts = source, [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def module(self) -> Iterator[tuple[str, _Edit]]:
        yield from self._inside(ast.parse(self._source), "module")

    def _inside(self, node: ast.AST, within: str) -> Iterator[tuple[str, _Edit]]:
        for inner in ast.iter_child_nodes(node):
            yield from self._node(inner, within)

    def _node(self, node: ast.AST, within: str) -> Iterator[tuple[str, _Edit]]:
        """The edits of a node, then those of the nodes in it."""
        match node:
            case ast.Import() | ast.ImportFrom() | ast.arg() | ast.Raise() | ast.Assert():
                if isinstance(node, ast.Raise):
                    yield within, self._edit("raise dropped", node, "pass")
                return
            case ast.Expr(value=ast.Constant()):
                return
            case ast.FunctionDef() | ast.ClassDef():
                name = node.name if within == "module" else f"{within}.{node.name}"
                if isinstance(node, ast.FunctionDef):
                    yield from self._inside(node.args, name)
                for statement in node.body:
                    yield from self._node(statement, name)
                return
            case ast.AnnAssign():
                if node.value and not (isinstance(node.annotation, ast.Name) and node.annotation.id == "TypeAlias"):
                    yield from self._node(node.value, within)
                return
            case ast.Call(func=ast.Name(id="TypeVar")):
                return
            case ast.Subscript(value=ast.Name(id="Literal" | "dict" | "list" | "tuple" | "frozenset" | "Mapping" | "Callable")):
                return
            case ast.JoinedStr():  # Python 3.11 gives no positions inside
                yield from ((within, edit) for edit in self._string(node))
                return
            case ast.expr() | ast.stmt():
                yield from ((within, edit) for edit in self._edits(node))
        for inner in ast.iter_child_nodes(node):
            yield from self._node(inner, within)
            if isinstance(inner, ast.comprehension):
                for test in inner.ifs:
                    yield within, self._negated(test)

    def _edits(self, node: ast.expr | ast.stmt) -> Iterator[_Edit]:
        match node:
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Assign(targets=[ast.Subscript()]):
                yield self._edit(f"dropped: {self._text(node)}", node, "pass")
            case ast.If(test=test) | ast.While(test=test):
                yield self._negated(test)
            case ast.IfExp(test=test, body=body, orelse=other):
                yield self._negated(test)
                yield self._edit(f"always {self._text(body)}", node, f"({self._text(body)})")
                yield self._edit(f"always {self._text(other)}", node, f"({self._text(other)})")
            case ast.Constant(value=bool() | int() | float()):
                yield from self._number(node)
            case ast.Constant(value=str()):
                yield from self._string(node)
            case ast.Attribute(value=value, attr=name) if name in ATTRIBUTES:
                new = f"{self._text(value)}.{ATTRIBUTES[name]}"
                yield self._edit(f"{self._text(node)} → {new}", node, new)
            case ast.Call():
                yield from self._call(node)
            case ast.Dict():
                yield from self._dict(node)
            case ast.Tuple(ctx=ast.Load(), elts=items) | ast.List(ctx=ast.Load(), elts=items):
                yield from self._swapped(items)
                for item, following in pairwise(items):
                    if _kind(item) == _kind(following) and _kind(item) in ("text", "tuple"):
                        new, end = f"{self._text(following)},", self._past_comma(self._span(following)[1])
                        yield self._edit(f"dropped: {self._text(item)}", item, new, end=end)
            case ast.BinOp() | ast.BoolOp() | ast.Compare() | ast.UnaryOp(op=ast.Not()):
                yield from self._operator(node)

    def _operator(self, node: ast.expr) -> Iterator[_Edit]:
        match node:
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                yield self._edit(f"dropped: | {self._text(right)}", node, f"({self._text(left)})")
                yield self._edit(f"dropped: {self._text(left)} |", node, f"({self._text(right)})")
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                new = f"({self._text(left)}) {OPERATORS[type(op)]} ({self._text(right)})"
                yield self._edit(f"{self._text(node)} → {new}", node, f"({new})")
            case ast.BoolOp(values=values):
                for value in values:
                    if isinstance(value, ast.Constant):
                        continue
                    rest = [f"({self._text(other)})" for other in values if other is not value]
                    joint = " and " if isinstance(node.op, ast.And) else " or "
                    yield self._edit(f"dropped: {self._text(value)} in {self._text(node)}", node, f"({joint.join(rest)})")
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                new = f"({self._text(left)}) {COMPARISONS[type(op)]} ({self._text(right)})"
                yield self._edit(f"{self._text(node)} → {new}", node, f"({new})")
            case ast.UnaryOp(operand=operand):
                yield self._edit(f"not dropped: {self._text(operand)}", node, f"({self._text(operand)})")

    def _number(self, node: ast.Constant) -> Iterator[_Edit]:
        value = node.value
        if isinstance(value, bool):
            yield self._edit(f"{value} → {not value}", node, repr(not value))
        elif isinstance(value, int):
            yield self._edit(f"{value} → {value + 1}", node, repr(value + 1))
        elif isinstance(value, float):
            other = 1.0 - value if value in (0.0, 1.0) else value * 2
            yield self._edit(f"{value} → {other}", node, repr(other))

    def _string(self, node: ast.expr) -> Iterator[_Edit]:
        text = self._text(node)
        quote = text.find('"')
        if quote < 0 or not NAME.fullmatch(inner := text[quote + 1 : -1]):
            return
        for word in EXCHANGED:
            if re.search(rf"(?<![a-z]){word}(?![a-z])", inner):
                new = re.sub(rf"(?<![a-z]){word}(?![a-z])", EXCHANGED[word], inner)
                yield self._edit(f"{inner} → {new}", node, f'{text[: quote + 1]}{new}"')
        yield self._edit(f"{inner} renamed", node, f'{text[: quote + 1]}{inner}_x"')

    def _call(self, node: ast.Call) -> Iterator[_Edit]:
        text = self._text(node.func)
        if text in ("isinstance", "refuse", "zip"):
            return
        if text not in COMMUTATIVE:
            yield from self._swapped([argument for argument in node.args if not isinstance(argument, ast.Starred)])
        for keyword in node.keywords:
            start, end = self._keyword(keyword)
            if keyword.arg == "transpose" or isinstance(keyword.value, ast.BoolOp):
                continue
            if not isinstance(keyword.value, ast.Constant) or not isinstance(keyword.value.value, bool):
                dropped = self._source[start:end].decode()
                yield self._edit(f"dropped: {dropped} of {text}", keyword.value, "", start=start, end=self._past_comma(end))
        flat = text in ("whole", "joined") and len(node.args) == 2
        if text in ("whole", "Weight", "joined") and not flat and all(keyword.arg != "transpose" for keyword in node.keywords):
            weight = self._text(node)
            yield self._edit(f"transposed: {weight}", node, f"__import__('dataclasses').replace({weight}, transpose=True)")

    def _dict(self, node: ast.Dict) -> Iterator[_Edit]:
        for key, value in zip(node.keys, node.values, strict=True):
            end = self._past_comma(self._span(value)[1])
            start = self._span(key)[0] if key else self._span(value)[0] - 2
            yield self._edit(f"dropped: {self._source[start:end].decode()}", value, "", start=start, end=end)
        yield from self._swapped([value for key, value in zip(node.keys, node.values, strict=True) if key])

    def _swapped(self, items: list[ast.expr]) -> Iterator[_Edit]:
        """Yield edits that exchange neighbours."""
        for one, other in pairwise(items):
            calls = isinstance(one, ast.Call) and len(items) > 4  # a list of families, whose order has no effect
            if calls or isinstance(one, ast.Starred) or _kind(one) != _kind(other) or self._text(one) == self._text(other):
                continue
            (start, middle), (after, end) = self._span(one), self._span(other)
            new = self._text(other) + self._source[middle:after].decode() + self._text(one)
            yield self._edit(f"exchanged: {self._text(one)} and {self._text(other)}", one, new, start=start, end=end)

    def _negated(self, test: ast.expr) -> _Edit:
        text = self._text(test)
        return self._edit(f"not: {text}", test, f"(not ({text}))")

    def _edit(self, text: str, node: ast.expr | ast.stmt, new: str, *, start: int | None = None, end: int | None = None) -> _Edit:
        first, last = self._span(node)
        short = re.sub(r"\s+", " ", text)
        return _Edit(short, node, first if start is None else start, last if end is None else end, new)

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        end_line, end_column = node.end_lineno or 0, node.end_col_offset or 0
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[end_line - 1] + end_column

    def _text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self._span(node)
        return self._source[start:end].decode()

    def _keyword(self, node: ast.keyword) -> tuple[int, int]:
        return self._starts[node.lineno - 1] + node.col_offset, self._span(node.value)[1]

    def _past_comma(self, end: int) -> int:
        """Return the position after a following comma, or `end` without one."""
        found = re.compile(rb"\s*,").match(self._source, end)
        return found.end() if found else end


def _kind(node: ast.expr) -> str:
    """Return the kind of an expression: it is exchanged only with one of the same kind."""
    match node:
        case ast.Constant(value=str()) | ast.JoinedStr():
            return "text"
        case ast.Tuple() | ast.List():
            return "tuple"
        case ast.Name(id="config" | "size" | "delta" | "table"):
            return node.id
        case ast.Starred() | ast.Dict() | ast.DictComp() | ast.Lambda():
            return type(node).__name__
        case _:
            return "value"
