"""TOML files with positions: every error names file:line:column of the text that caused it.

`tomllib` parses and decides what is valid; the scanner below only answers where a key stands. When the scanner meets
something that it does not understand it stops, and an error without a known position falls back to the nearest parent
or to line 1.
"""

import bisect
import difflib
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, PydanticUndefinedAnnotation, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

Location = tuple[str | int, ...]
ModelT = TypeVar("ModelT", bound="Table")

MAX_FILE_BYTES = 1 << 20  # a spec is a few kilobytes; a larger file is a wrong file
MAX_SHOWN = 60  # characters of a wrong value that an error repeats
MISSING = "required key is missing"
SPELLINGS = {"bfloat16": "bf16", "float32": "fp32", "float": "fp32"}  # what data types are called elsewhere
NO_SPELLING = ("float16", "fp16", "half")  # look like a data type of this format, and are another one
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_POSITION = re.compile(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)$")


@dataclass(frozen=True, order=True)
class Problem:
    """One error in a file; prints like a compiler's."""

    file: str
    line: int
    column: int
    key: str
    message: str

    def __str__(self) -> str:
        key = f"{self.key}: " if self.key else ""
        return f"{self.file}:{self.line}:{self.column}: {key}{self.message}"


class InvalidFile(Exception):
    """A TOML file that cannot be used, with all of its problems in line order."""

    def __init__(self, problems: typing.Iterable[Problem]) -> None:
        self.problems = tuple(sorted(set(problems)))
        super().__init__("\n".join(map(str, self.problems)))


class Unavailable(Exception):
    """A rule asked for a field that has an error of its own, so the rule cannot be judged."""


class Table(BaseModel):
    """Base of every table of a file: frozen, without conversions, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    RULES: ClassVar[tuple[typing.Callable[[Any], Iterator[tuple[Location, str]]], ...]] = ()
    """Checks across fields; each yields (location, message) and may read any field of the table it is given."""

    HINTS: ClassVar[Mapping[str, str]] = {}
    """By key, what stands behind an error of its value: a unit, or what to write instead."""

    def check_rules(self) -> None:
        """Raise PydanticCustomError with every broken rule; for a `model_validator` of the top table."""
        broken = [problem for rule in self.RULES for problem in rule(self)]
        if broken:
            text = "; ".join(f"{dotted(where)}: {message}" for where, message in broken)
            raise PydanticCustomError("rules", "{text}", {"text": text, "broken": broken})


# Scanning


@dataclass(frozen=True)
class Marks:
    """Offsets of keys and array items in a TOML text, and the keys that it defines twice."""

    offsets: dict[Location, int]
    repeated: tuple[tuple[Location, int, int], ...]


class _Scanner:
    """Walks a TOML text and notes where each key starts. Strings and comments are skipped, values are not interpreted."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.offsets: dict[Location, int] = {}
        self.defined: set[Location] = set()
        self.repeated: list[tuple[Location, int, int]] = []
        self.items: dict[Location, int] = {}

    def document(self) -> None:
        table: Location = ()
        while self.skip_blank(newlines=True):
            if self.text.startswith("[[", self.at):
                start = self.at
                table = self.enter(self.key_after(2, "]]"), start, array=True)
            elif self.text[self.at] == "[":
                start = self.at
                table = self.enter(self.key_after(1, "]"), start, array=False)
            else:
                self.pair(table)

    def key_after(self, width: int, closing: str) -> list[tuple[str, int]]:
        self.at += width
        key = self.key()
        self.expect(closing)
        return key

    def enter(self, key: list[tuple[str, int]], start: int, *, array: bool) -> Location:
        """The location of a table header; arrays of tables count their items."""
        where: Location = ()
        for index, (name, _) in enumerate(key):
            where += (name,)
            last = index == len(key) - 1
            if last and array:
                self.items[where] = self.items.get(where, -1) + 1
                self.offsets.setdefault(where, start)
            if where in self.items:
                where += (self.items[where],)
            self.note(where, start, defines=last and not array)
        return where

    def pair(self, table: Location) -> None:
        where = table
        key = self.key()
        for index, (name, start) in enumerate(key):
            where += (name,)
            self.note(where, start, defines=index == len(key) - 1)
        self.expect("=")
        self.value(where)

    def note(self, where: Location, start: int, *, defines: bool) -> None:
        if defines and where in self.defined:
            self.repeated.append((where, self.offsets[where], start))
        if defines:
            self.defined.add(where)
        self.offsets.setdefault(where, start)

    def key(self) -> list[tuple[str, int]]:
        parts: list[tuple[str, int]] = []
        while True:
            self.skip_blank()
            start = self.at
            if self.text[start] in "\"'":
                self.string()
                name = tomllib.loads(f"k = {self.text[start : self.at]}")["k"]
            else:
                match = _BARE_KEY.match(self.text, start)
                if match is None:
                    raise ValueError(f"expected a key at offset {start}")
                name = match[0]
                self.at = match.end()
            parts.append((name, start))
            self.skip_blank()
            if self.text[self.at] != ".":
                return parts
            self.at += 1

    def value(self, where: Location) -> None:
        self.skip_blank()
        first = self.text[self.at]
        if first in "\"'":
            self.string()
        elif first == "[":
            self.at += 1
            index = 0
            while self.skip_blank(newlines=True) and self.text[self.at] != "]":
                self.offsets[(*where, index)] = self.at
                self.value((*where, index))
                index += 1
                self.separator("]")
            self.expect("]")
        elif first == "{":
            self.at += 1
            while self.skip_blank(newlines=True) and self.text[self.at] != "}":
                self.pair(where)
                self.separator("}")
            self.expect("}")
        else:
            end = re.compile(r"[,\]}#\n]").search(self.text, self.at)
            self.at = end.start() if end else len(self.text)

    def separator(self, closing: str) -> None:
        self.skip_blank(newlines=True)
        if self.text[self.at] != closing:
            self.expect(",")

    def string(self) -> None:
        quote = self.text[self.at]
        long = quote * 3
        if self.text.startswith(long, self.at):
            escape = r"\\.|" if quote == '"' else ""
            pattern = rf"{long}(?:{escape}.)*?{quote}{{3,5}}"
        else:
            pattern = r'"(?:\\.|[^"\\\n])*"' if quote == '"' else r"'[^'\n]*'"
        match = re.compile(pattern, re.DOTALL).match(self.text, self.at)
        if match is None:
            raise ValueError(f"unclosed string at offset {self.at}")
        self.at = match.end()

    def expect(self, token: str) -> None:
        self.skip_blank()
        if not self.text.startswith(token, self.at):
            raise ValueError(f"expected {token!r} at offset {self.at}")
        self.at += len(token)

    def skip_blank(self, *, newlines: bool = False) -> bool:
        """Skip spaces (and newlines and comments); False at the end of the text."""
        pattern = r"(?:[ \t\n]+|#[^\n]*)*" if newlines else r"[ \t]*"
        match = re.compile(pattern).match(self.text, self.at)
        assert match is not None  # both patterns match the empty string
        self.at = match.end()
        return self.at < len(self.text)


def scan(text: str) -> Marks:
    """Where the keys of a TOML text stand.

    Never raises: a text that the scanner cannot follow yields the marks up to that place.
    """
    scanner = _Scanner(text)
    try:
        scanner.document()
    except (ValueError, IndexError, KeyError, RecursionError):
        pass
    return Marks(scanner.offsets, tuple(scanner.repeated))


# Documents


@dataclass(frozen=True)
class Document:
    """A parsed TOML file: its values (arrays as tuples) and where they stand."""

    file: str
    text: str
    data: dict[str, Any]
    marks: Marks

    def position(self, where: Location) -> tuple[int, int]:
        """Line and column (from 1) of a key, of its nearest parent when it is absent, else of the file's start."""
        while where and where not in self.marks.offsets:
            where = where[:-1]
        return _line_column(self.text, self.marks.offsets[where]) if where else (1, 1)

    def problem(self, where: Location, message: str) -> Problem:
        """An error at a key."""
        return Problem(self.file, *self.position(where), dotted(where), message)


def read_document(path: Path, *, shown: str | None = None) -> Document:
    """Read and parse a TOML file.

    Args:
        path: The file.
        shown: How errors name it; default: `show_path(path)`.

    Raises:
        InvalidFile: Not readable, not UTF-8, empty, not TOML, or a key given twice.
    """
    file = shown if shown is not None else show_path(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidFile([Problem(file, 1, 1, "", f"cannot be read: {error.strerror or error}")]) from None
    return parse_document(raw, file)


def parse_document(raw: bytes, file: str) -> Document:
    """Parse the bytes of a TOML file that errors name `file`.

    Raises:
        InvalidFile: Not UTF-8, empty, not TOML, or a key given twice.
    """

    def refuse(message: str, line: int = 1, column: int = 1) -> InvalidFile:
        return InvalidFile([Problem(file, line, column, "", message)])

    if len(raw) > MAX_FILE_BYTES:
        raise refuse(f"expected a TOML file of at most {MAX_FILE_BYTES} bytes (got more)")
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise refuse(f"expected UTF-8 text (got byte 0x{raw[error.start]:02x} at offset {error.start})", line) from None
    if not text.strip():
        raise refuse("expected a TOML file (got an empty one)")
    marks = scan(text)
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise refuse("not valid TOML: nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, and Python's limit on the digits of an integer
        repeated = [
            Problem(file, *_line_column(text, second), dotted(where), f"defined twice (first on line {line})")
            for where, first, second in marks.repeated
            for line, _ in [_line_column(text, first)]
        ]
        if repeated:
            raise InvalidFile(repeated) from None
        message, line, column = _toml_error(error, text)
        raise refuse(f"not valid TOML: {message}", line, column) from None
    return Document(file, text, _freeze(data), marks)


def show_path(path: Path) -> str:
    """A path as errors print it: relative to the working directory when it is below it."""
    absolute = path.absolute()
    try:
        return absolute.relative_to(Path.cwd()).as_posix()
    except ValueError:
        return absolute.as_posix()


def validate(document: Document, model: type[ModelT]) -> ModelT:
    """Check a document against a table model, fields and rules together.

    Raises:
        InvalidFile: With every problem found. Rules that read a field with an error of its own are not judged.
    """
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        details = error.errors(include_url=False)
    problems: list[Problem] = []
    bad: set[Location] = set()
    guesses: set[Location] = set()
    for detail in details:
        where = tuple(detail["loc"])
        if detail["type"] == "rules":
            problems += [document.problem(*broken) for broken in detail["ctx"]["broken"]]
            continue
        bad.add(where)
        if detail["type"] == "extra_forbidden":
            known = _known_keys(model, where[:-1])
            close = _close(str(where[-1]), known)
            if close:
                guesses.add((*where[:-1], close))
            hint = f"; did you mean {close}?" if close else f"; known keys: {', '.join(known)}"
            problems.append(document.problem(where, f"unknown key{hint}"))
    for detail in details:
        where = tuple(detail["loc"])
        # A misspelt required key is one mistake: its absence is not reported beside it.
        if detail["type"] in ("rules", "extra_forbidden", "default_factory_not_called"):
            continue
        if detail["type"] == "missing" and where in guesses:
            continue
        problems.append(document.problem(where, describe(detail, _hint(model, where))))
    if bad:
        partial = _Partial(model, document.data, frozenset(bad), ())
        for rule in model.RULES:
            try:
                problems += [document.problem(*broken) for broken in rule(partial)]
            except Unavailable:
                continue
    raise InvalidFile(problems)


def describe(detail: ErrorDetails, hint: str = "") -> str:
    """One Pydantic error as a sentence: what was expected and what was given, and the field's hint unless a value is guessed."""
    kind, ctx = detail["type"], detail.get("ctx", {})
    given = f" (got {show(detail['input'])})"
    bounds = {
        "greater_than_equal": ("at least", "ge"),
        "greater_than": ("greater than", "gt"),
        "less_than_equal": ("at most", "le"),
        "less_than": ("less than", "lt"),
        "multiple_of": ("a multiple of", "multiple_of"),
    }
    types_ = {
        "int_type": "an integer",
        "float_type": "a number",
        "bool_type": "true or false",
        "string_type": "a string",
        "tuple_type": "an array",
        "dict_type": "a table",
        "model_type": "a table",
        "finite_number": "a finite number",
    }
    if kind == "missing":
        return MISSING
    behind = f": {hint}" if hint else ""
    if kind in types_:
        return f"must be {types_[kind]}{given}{behind}"
    if kind in bounds:
        words, key = bounds[kind]
        bound = f"{ctx[key]:g}" if isinstance(ctx[key], float) else ctx[key]
        return f"must be {words} {bound}{given}{behind}"
    if kind == "literal_error":
        allowed = re.findall(r"'([^']*)'", ctx["expected"]) or [ctx["expected"]]
        close = _meant(detail["input"], allowed) if isinstance(detail["input"], str) else None
        quoted = [part if part.isdigit() else f'"{part}"' for part in allowed]
        expected = quoted[0] if len(quoted) == 1 else f"one of {', '.join(quoted)}"
        return f"must be {expected}{given}" + (f'; did you mean "{close}"?' if close else behind)
    if kind in ("too_short", "too_long"):
        words, key = ("at least", "min_length") if kind == "too_short" else ("at most", "max_length")
        return f"must have {words} {ctx[key]} item{'' if ctx[key] == 1 else 's'} (got {ctx['actual_length']})"
    if kind in ("string_too_short", "string_too_long"):
        words, key = ("at least", "min_length") if kind == "string_too_short" else ("at most", "max_length")
        return f"must have {words} {ctx[key]} character{'' if ctx[key] == 1 else 's'} (got {len(detail['input'])})"
    if kind == "string_pattern_mismatch":
        return f"must match {ctx['pattern']}{given}"
    return f"{detail['msg'][:1].lower()}{detail['msg'][1:]}{given}"


def show(value: object) -> str:
    """A value in TOML's spelling, shortened."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, str):
        text = '"' + value[:MAX_SHOWN].encode("unicode_escape").decode("ascii").replace('"', '\\"') + '"'
    elif isinstance(value, (datetime, date, time)):
        text = value.isoformat()
    elif isinstance(value, dict):
        text = f"a table with {', '.join(map(str, value))}" if value else "an empty table"
    elif isinstance(value, tuple):
        text = "[" + ", ".join(show(item) for item in value[:8]) + (", ...]" if len(value) > 8 else "]")
    elif isinstance(value, int) and value.bit_length() > 128:
        text = f"an integer of {value.bit_length()} bits"
    else:
        text = str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def dotted(where: Location) -> str:
    """`("emit", "kernels", 2)` as `emit.kernels[2]`."""
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


# Helpers


class _Partial:
    """A view of a document with errors, through which rules read the fields that are good."""

    def __init__(self, model: type[Table], data: Any, bad: frozenset[Location], where: Location) -> None:
        self._model, self._data, self._bad, self._where = model, data, bad, where

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._model.model_fields or not isinstance(self._data, dict):
            raise Unavailable
        field, where = self._model.model_fields[name], (*self._where, name)
        if where in self._bad:
            raise Unavailable
        table = _table_in(field)
        if table is not None and field.annotation is table:
            return _Partial(typing.cast(type[Table], table), self._data.get(name, {}), self._bad, where)
        if any(bad[: len(where)] == where for bad in self._bad):
            raise Unavailable
        if name in self._data:
            try:
                adapter: TypeAdapter[Any] = TypeAdapter(typing.cast(Any, field.annotation))
                return adapter.validate_python(self._data[name], strict=True)
            except (ValidationError, PydanticUndefinedAnnotation):
                raise Unavailable from None
        if field.is_required():
            raise Unavailable
        return field.get_default(call_default_factory=True, validated_data=typing.cast(dict[str, Any], self))


def _table_in(field: FieldInfo) -> type[Table] | None:
    """The table class of a field, also inside `tuple[...]` and unions."""
    waiting: list[Any] = [field.annotation]
    while waiting:
        annotation = waiting.pop()
        if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
            if issubclass(annotation, Table):
                return annotation
        waiting += typing.get_args(annotation)
    return None


def _known_keys(model: type[Table], where: Location) -> list[str]:
    for part in where:
        if isinstance(part, str):
            inner = _table_in(model.model_fields[part])
            if inner is None:
                return []
            model = inner
    return list(model.model_fields)


def _hint(model: type[Table], where: Location) -> str:
    """What a table says beside an error of one of its keys, or of an item of that key's array."""
    found: type[Table] | None = model
    hint = ""
    for part in where:
        if isinstance(part, str) and found is not None:
            hint = found.HINTS.get(part, "")
            found = _table_in(found.model_fields[part]) if part in found.model_fields else None
    return hint


def _meant(word: str, allowed: typing.Sequence[str]) -> str | None:
    """The allowed word that a wrong one stands for, or None."""
    other = SPELLINGS.get(word.lower())
    if other is not None or word.lower() in NO_SPELLING:
        return other if other in allowed else None
    return _close(word, allowed)


def _close(word: str, known: typing.Sequence[str]) -> str | None:
    found = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return found[0] if found else None


def _freeze(value: Any) -> Any:
    """Arrays as tuples, so that values compare, hash and pass strict validation."""
    if isinstance(value, dict):
        return {key: _freeze(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_freeze(item) for item in value)
    return value


def _line_column(text: str, offset: int) -> tuple[int, int]:
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    line = bisect.bisect_right(starts, offset)
    return line, offset - starts[line - 1] + 1


def _toml_error(error: ValueError, text: str) -> tuple[str, int, int]:
    """Message, line and column of a tomllib error; its position stands in its message."""
    if not isinstance(error, tomllib.TOMLDecodeError):
        digits = re.search(r"[0-9_]{1000,}", text)
        return "an integer has too many digits", *_line_column(text, digits.start() if digits else 0)
    message = str(error)
    match = _POSITION.search(message)
    if match is None:
        return message, 1, 1
    message = message[: match.start()]
    message = message[:1].lower() + message[1:]
    if match[1]:
        return message, int(match[1]), int(match[2])
    line, column = _line_column(text, max(len(text.rstrip()) - 1, 0))
    return f"{message} at the end of the file", line, column
