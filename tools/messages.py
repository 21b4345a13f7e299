"""Write docs/reference/messages.txt: every text that the command, a log, an exception or a refusal can print; a test compares.

python -m tools.messages

Read the list's diff aloud: would a colleague say it? A message says what happened, then what to do. "expected …, got …" is for a
value that was given. `{…}` is a value, with a name of its expression. An event of a log is a name with fields.
"""

import ast
import re
from collections.abc import Iterator

from tools.docstrings import ROOT, sources

LIST = ROOT / "docs" / "reference" / "messages.txt"
_HEAD = "Every text that the command, a log, an exception or a refusal can print. Made by `make docs-messages`."
_LOGS = ("_log", "logger", "_logger", "log")
_FEWEST_WORDS = 3
_WORD = re.compile(r"(?<![\w{<])[A-Za-z][a-z'-]+(?![\w}(])")
_TYPES = re.compile(r"\b(tuple|list|dict|Iterable|Iterator|Mapping|Callable|ndarray|AsyncIterator)\[|torch\.\w+ \|")


def messages(tree: ast.Module) -> Iterator[str]:
    """Yield the messages of a module in their order."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)} - set(_helps(tree))
    found = dict[tuple[int, int], str]()
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if id(node) in docstrings and isinstance(node, ast.Constant):
            continue
        if isinstance(node, ast.Call) and (event := _event(node)):
            found[node.lineno, node.col_offset] = event
        if (text := _text(node)) is None:
            nodes += ast.iter_child_nodes(node)
            continue
        if _is_prose(text) and isinstance(node, ast.expr):
            found[node.lineno, node.col_offset] = text
        nodes += [each.value for each in ast.walk(node) if isinstance(each, ast.FormattedValue)]
    yield from dict.fromkeys(found[place] for place in sorted(found))


def _helps(tree: ast.Module) -> Iterator[int]:
    """Yield the ids of docstrings that a command prints as its help."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not any("command(" in ast.unparse(each) for each in node.decorator_list):
            continue
        if isinstance(node.body[0], ast.Expr):
            yield id(node.body[0].value)


def _text(node: ast.AST) -> str | None:
    """Return the text of a literal; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_part(part) for part in node.values)
    return None


def _part(node: ast.expr) -> str:
    if not isinstance(node, ast.FormattedValue):
        return str(getattr(node, "value", ""))
    found = [each for each in ast.walk(node.value) if isinstance(each, ast.Attribute | ast.Name)]
    name = "…" if not found else found[0].attr if isinstance(found[0], ast.Attribute) else found[0].id
    return f"{{{name}}}"


def _event(call: ast.Call) -> str:
    """Return the event of a call of structlog, with its fields; empty for any other call."""
    function = call.func
    if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id in _LOGS):
        return ""
    if not (call.args and isinstance(call.args[0], ast.Constant) and re.fullmatch(r"[a-z_]+", str(call.args[0].value))):
        return ""
    fields = " ".join(f"{keyword.arg}=…" for keyword in call.keywords if keyword.arg)
    return f"[{function.attr}] {call.args[0].value} {fields}".rstrip()


def _is_prose(text: str) -> bool:
    """Whether people read it: some words with spaces between them, and no annotation."""
    return len(_WORD.findall(text)) >= _FEWEST_WORDS and " " in text.strip() and not _TYPES.search(text)


def page() -> str:
    """Return the text of the list."""
    parts = [_HEAD]
    for path in sources():
        if found := list(messages(ast.parse(path.read_text()))):
            name = str(path.relative_to(ROOT)).replace("/resharder/", "/", 1)
            parts.append("\n".join([f"== {name}", *(" ".join(text.split()) for text in found)]))
    return "\n\n".join([*parts, ""])


if __name__ == "__main__":
    LIST.parent.mkdir(exist_ok=True)
    LIST.write_text(page())
    print(LIST)
