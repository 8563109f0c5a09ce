"""Digests of code: what evidence is keyed by.

A measurement stays true while comments, docstrings and formatting change, and stops being true when anything else that
the kernel runs changes. So a kernel's digest covers the syntax trees of its module, of its model's constants, and of
every module of the package that those import.
"""

import ast
import hashlib
import posixpath
from collections.abc import Mapping
from functools import lru_cache

DIGEST_LENGTH = 12


def kernel_digest(files: Mapping[str, str], model: str, kernel: str, *, package: str = "dspark_kernels") -> str:
    """The digest of one kernel of one model.

    Args:
        files: Python source by path below the source root, at least of the kernel and what it imports.
        model: The model's folder name.
        kernel: The kernel's module name.
        package: The top package.

    Returns:
        12 hexadecimal digits.
    """
    folder = f"{package}/{model}"
    return code_digest(
        {name: files[name] for name in imported(files, (f"{folder}/{kernel}.py", f"{folder}/config.py"))}
    )


def imported(files: Mapping[str, str], starts: tuple[str, ...]) -> tuple[str, ...]:
    """The given modules and all that they import by relative imports, transitively, in alphabetical order.

    A package's `__init__` counts only when something is imported from the package itself: the models' ones are registries.
    """
    found: set[str] = set()
    waiting = list(starts)
    while waiting:
        name = waiting.pop()
        if name in found or name not in files:
            continue
        found.add(name)
        for level, module, names in _relative_imports(files[name]):
            waiting += _targets(files, name, level, module, names)
    return tuple(sorted(found))


def code_digest(files: Mapping[str, str]) -> str:
    """12 hexadecimal digits over the syntax of Python files, without comments, docstrings and formatting.

    The folder of the model is not part of it, only the modules' own names, so that a digest says what runs.
    """
    parts = [f"{posixpath.basename(name)} {_syntax_digest(text)}\n" for name, text in sorted(files.items())]
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:DIGEST_LENGTH]


@lru_cache(maxsize=1024)
def _syntax_digest(text: str) -> str:
    return hashlib.sha256(_canonical(_without_docstrings(ast.parse(text))).encode()).hexdigest()


@lru_cache(maxsize=1024)
def _relative_imports(text: str) -> tuple[tuple[int, str, tuple[str, ...]], ...]:
    """(level, module, names) of every relative import in a text."""
    return tuple(
        (node.level, node.module or "", tuple(alias.name for alias in node.names))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.level
    )


def _targets(files: Mapping[str, str], importer: str, level: int, module: str, names: tuple[str, ...]) -> list[str]:
    """The files that one relative import loads: a module, or the modules that it names inside a package."""
    folder = posixpath.dirname(importer)
    for _ in range(level - 1):
        folder = posixpath.dirname(folder)
    base = posixpath.join(folder, *module.split(".")).rstrip("/")
    if f"{base}.py" in files:
        return [f"{base}.py"]
    inner = [f"{base}/{name}.py" for name in names]
    return [name if name in files else f"{base}/__init__.py" for name in inner]


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            # A string that stands alone is a docstring or a note; neither does anything.
            node.body = [item for item in node.body if not _is_text(item)]
    return tree


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _canonical(node: object) -> str:
    """A syntax tree as text, the same for every Python version.

    `ast.dump` is not: some versions print empty fields, and 3.12 leaves empty strings inside f-strings.
    """
    if isinstance(node, ast.JoinedStr):
        return f"JoinedStr({','.join(_canonical(item) for item in node.values if not _is_empty_text(item))})"
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
        text = ",".join(f"{name}={_canonical(value)}" for name, value in fields if name != "kind")
        return f"{type(node).__name__}({text})"
    if isinstance(node, list):
        return f"[{','.join(map(_canonical, node))}]"
    return repr(node)


def _is_empty_text(node: object) -> bool:
    return isinstance(node, ast.Constant) and node.value == ""
