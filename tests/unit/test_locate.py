"""The TOML reader: positions of keys, and errors that never are tracebacks."""

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, model_validator

from dsparkgen.locate import InvalidFile, Location, Problem, Table, parse_document, read_document, scan, validate

TEXT = '''\
# comment = 1
plain = 1
"quoted key" = "a # b"
dotted.inner . 'last' = 0x10

[table] # [not.a.table]
array = [ 1, # one ]
  """two ] " """, [ 'x', { deep = true } ],
]
long = """
[fake]
key = 1
\\""" quoted"""
literal = \'\'\'
other = 'a\\\'\'\'
[table.sub]
inline = { a = 1, b.c = [2] }

[[items]]
name = "first"
[items.more]
x = 1979-05-27T07:32:00Z
[[items]]
  name = "second"
'''


def _paths(value: Any, where: Location = ()) -> list[Location]:
    """Every key and array item of parsed TOML."""
    found: list[Location] = [where] if where else []
    if isinstance(value, dict):
        for key, item in value.items():
            found += _paths(item, (*where, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += _paths(item, (*where, index))
    return found


@pytest.mark.parametrize(
    ("where", "line", "column"),
    [
        (("plain",), 2, 1),
        (("quoted key",), 3, 1),
        (("dotted",), 4, 1),
        (("dotted", "inner"), 4, 8),
        (("dotted", "inner", "last"), 4, 16),
        (("table",), 6, 1),
        (("table", "array"), 7, 1),
        (("table", "array", 0), 7, 11),
        (("table", "array", 1), 8, 3),
        (("table", "array", 2, 1, "deep"), 8, 28),
        (("table", "long"), 10, 1),
        (("table", "literal"), 14, 1),
        (("table", "sub"), 16, 1),
        (("table", "sub", "inline", "b", "c", 0), 17, 26),
        (("items", 0), 19, 1),
        (("items", 0, "more", "x"), 22, 1),
        (("items", 1, "name"), 24, 3),
        (("items", 1, "absent"), 23, 1),
        (("table", "array", 9), 7, 1),
        (("absent",), 1, 1),
    ],
)
def test_position(where: Location, line: int, column: int) -> None:
    assert parse_document(TEXT.encode(), "x.toml").position(where) == (line, column)


def test_crlf_counts_lines_once() -> None:
    document = parse_document(b"a = 1\r\n\r\n[t]\r\nb = 2\r\n", "x.toml")
    assert document.position(("t", "b")) == (4, 1)


KEYS = st.one_of(
    st.text("abcXYZ019_-", min_size=1, max_size=3),
    st.text("ab. #[]=é", max_size=3).map(lambda text: f'"{text}"'),
    st.text('ab." #[]=', max_size=3).map(lambda text: f"'{text}'"),
)
DOTTED = st.lists(KEYS, min_size=1, max_size=3).map(" . ".join)
SCALARS = st.one_of(
    st.integers(-9, 9).map(str),
    st.sampled_from(
        ["true", "1.5e3", "nan", "1979-05-27", "07:32:00", '"\\"]#"', "'\\'", '"""a\n"b"\n"""', "'''\n]''x'''"]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: "[ # [\n" + ",\n".join(items) + " ]"),
        st.lists(inner, max_size=3).map(lambda items: "[" + ", ".join(items) + "]"),
        st.lists(st.tuples(KEYS, inner), max_size=2).map(lambda ps: "{" + ", ".join(f"{k} = {v}" for k, v in ps) + "}"),
    ),
    max_leaves=5,
)
LINES = st.one_of(
    st.tuples(DOTTED, VALUES).map(lambda pair: f"{pair[0]} = {pair[1]} # x = 1"),
    DOTTED.map(lambda key: f"[{key}]"),
    DOTTED.map(lambda key: f"[[ {key} ]]"),
    st.just("\t# comment ' \" ["),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(LINES, max_size=6).map("\n".join))
def test_every_key_of_any_valid_text_has_its_position(text: str) -> None:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    marks = scan(text)
    assert marks.repeated == ()
    for where in _paths(data):
        assert where in marks.offsets, (where, text)
        name = where[-1]
        if isinstance(name, str) and not text.startswith("[", marks.offsets[where]):
            assert name in text[marks.offsets[where] :][: len(name) + 1]


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=80), st.lists(LINES, max_size=5).map(lambda lines: "\n".join(lines).encode())))
def test_any_bytes_parse_or_give_a_located_error(raw: bytes) -> None:
    try:
        parse_document(raw, "x.toml")
    except InvalidFile as error:
        assert error.problems
        assert all(re.match(r"x\.toml:\d+:\d+: .", str(problem)) for problem in error.problems)


def test_a_text_that_the_scanner_cannot_follow_keeps_its_first_marks() -> None:
    assert set(scan('a = 1\nb = "open\nc = 3').offsets) == {("a",), ("b",)}


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidFile, match="gone.toml:1:1: cannot be read: No such file"):
        read_document(tmp_path / "gone.toml", shown="gone.toml")
    with pytest.raises(InvalidFile, match="cannot be read: Is a directory"):
        read_document(tmp_path)
    (tmp_path / "big.toml").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(InvalidFile, match="at most 1048576 bytes"):
        read_document(tmp_path / "big.toml")


class Inner(Table):
    size: Annotated[int, Field(ge=1)]
    scale: float = 1.0


class Outer(Table):
    """A table with a rule that reads two fields and another that reads one."""

    RULES = (
        lambda outer: iter([(("inner", "size"), "too large")] if outer.inner.size > outer.limit else []),
        lambda outer: iter([(("name",), "must not be x")] if outer.name == "x" else []),
    )

    limit: int
    inner: Inner
    name: str = "x"
    copy_of_limit: int = Field(default_factory=lambda data: data["limit"])

    @model_validator(mode="after")
    def _rules(self) -> Self:
        self.check_rules()
        return self


def _problems(text: str) -> list[str]:
    with pytest.raises(InvalidFile) as error:
        validate(parse_document(text.encode(), "x.toml"), Outer)
    return [f"{problem.line} {problem.key}: {problem.message}" for problem in error.value.problems]


def test_rules_run_beside_field_errors_but_not_on_bad_fields() -> None:
    assert _problems("limit = 1\n[inner]\nsize = 2\nscale = true\n") == [
        "1 name: must not be x",
        "3 inner.size: too large",
        "4 inner.scale: must be a number (got true)",
    ]
    assert _problems("limit = 'a'\nname = 'x'\n[inner]\nsize = 2\n") == [
        '1 limit: must be an integer (got "a")',
        "2 name: must not be x",
    ]


def test_a_misspelt_required_key_is_one_error() -> None:
    assert _problems("limits = 1\nname = 'y'\n[inner]\nsize = 2\n") == ["1 limits: unknown key; did you mean limit?"]


def test_a_wrong_value_beside_a_misspelt_key_is_reported_too() -> None:
    assert _problems("limit = 'a'\nlimits = 1\nname = 'y'\n[inner]\nsize = 2\n") == [
        '1 limit: must be an integer (got "a")',
        "2 limits: unknown key; did you mean limit?",
    ]


class Typed(Table):
    HINTS = {"weights": "bf16 alone", "rate": "in hertz"}

    weights: Literal["bf16"] = "bf16"
    logits: tuple[Literal["bf16", "fp32"], ...] = ()
    rate: Annotated[float, Field(ge=1e8)] = 1e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("weights = 'bfloat16'", 'weights: must be "bf16" (got "bfloat16"); did you mean "bf16"?'),
        ("weights = 'float32'", 'weights: must be "bf16" (got "float32"): bf16 alone'),
        ("weights = 'fp16'", 'weights: must be "bf16" (got "fp16"): bf16 alone'),
        ("logits = ['float32']", 'logits[0]: must be one of "bf16", "fp32" (got "float32"); did you mean "fp32"?'),
        ("logits = ['float16']", 'logits[0]: must be one of "bf16", "fp32" (got "float16")'),
        ("rate = 1.98", "rate: must be at least 1e+08 (got 1.98): in hertz"),
    ],
)
def test_hints_name_the_unit_or_what_to_write(text: str, message: str) -> None:
    with pytest.raises(InvalidFile) as error:
        validate(parse_document(text.encode(), "x.toml"), Typed)
    assert [f"{problem.key}: {problem.message}" for problem in error.value.problems] == [message]


def test_problems_sort_by_line_and_print_like_a_compiler() -> None:
    error = InvalidFile([Problem("b.toml", 10, 1, "k", "ten"), Problem("b.toml", 9, 2, "", "nine")])
    assert str(error) == "b.toml:9:2: nine\nb.toml:10:1: k: ten"
