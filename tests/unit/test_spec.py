"""The spec format: golden errors, defaults, and that no input gives a traceback."""

import re
import string
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsparkgen.device import NUMBERS, load_devices, read_device
from dsparkgen.locate import InvalidFile, parse_document
from dsparkgen.spec import KERNELS, ModelSpec, parse_spec, read_spec, read_specs

ROOT = Path(__file__).parents[2]
ERRORS = ROOT / "tests" / "golden" / "errors"
CASES = sorted(path.stem for path in ERRORS.glob("*.toml"))
VALID = (ROOT / "specs" / "deepseek_v41.toml").read_bytes()
# The tables that no checked-in spec has.
TABLES = b"""
[packet]
words = 4

[[packet.fields]]
name = "token"
word = 0
words = 2

[[packet.fields]]
name = "score"
word = 3

[[packet.fields]]
name = "nan"
word = 2

[step]
default_block = 4096
pdl_max_rows = 16

[[step.block_sizes]]
max_rows = 4
block = 1024

[[step.block_sizes]]
max_rows = 64
block = 2048
"""
EVERY_TABLE = VALID + TABLES
BASES = pytest.mark.parametrize("base", [VALID, EVERY_TABLE], ids=["deepseek_v41", "every table"])


@pytest.mark.parametrize("name", CASES)
def test_golden_error(name: str) -> None:
    """Each broken spec gives exactly the recorded lines. Compare a changed message by eye, then rewrite its .txt."""
    with pytest.raises(InvalidFile) as error:
        read_spec(ERRORS / f"{name}.toml", shown=f"specs/{name}.toml")
    assert f"{error.value}\n" == (ERRORS / f"{name}.txt").read_text()


def test_every_golden_text_has_its_spec() -> None:
    assert sorted(path.stem for path in ERRORS.glob("*.txt")) == CASES
    assert len(CASES) >= 40


def test_deepseek_v41() -> None:
    spec = read_spec(ROOT / "specs" / "deepseek_v41.toml")
    assert (spec.vocabulary.target, spec.vocabulary.draft, spec.vocabulary.sampling_limit) == (129280, 129280, 129280)
    assert (spec.markov.rank_dim, spec.draft.num_steps, spec.draft.max_rows) == (256, 5, 8)
    assert spec.parallel.tp == (1, 2, 4, 8)
    assert (spec.logits.base_dtypes, spec.logits.cache_dtypes) == (("bf16", "fp32"), ("bf16", "fp32"))
    assert (spec.noise.scheme, spec.noise.draft_salt, spec.noise.step_mix) == ("murmur3_32", 1 << 30, True)
    assert spec.emit.kernels == ("noise", "chain", "fused", "step")


def test_specs_are_values() -> None:
    path = ROOT / "specs" / "deepseek_v41.toml"
    assert read_spec(path) == read_spec(path)
    assert hash(read_spec(path)) == hash(read_spec(path))
    with pytest.raises(ValueError, match="frozen"):
        read_spec(path).markov.rank_dim = 512  # type: ignore[misc]


def test_rules_hold_without_a_file_too() -> None:
    values = read_spec(ROOT / "specs" / "deepseek_v41.toml").model_dump()
    values["vocabulary"]["draft"] = 32000
    with pytest.raises(ValueError, match="vocabulary.draft: must equal vocabulary.target, 129280"):
        ModelSpec.model_validate(values)


def test_every_spec_names_the_schema() -> None:
    for path in (ROOT / "specs").glob("*.toml"):
        assert path.read_text().startswith("#:schema ./spec.schema.json\n"), path
    assert set(read_specs(ROOT / "specs")) == {path.stem for path in (ROOT / "specs").glob("*.toml")}


def test_every_kernel_has_a_template() -> None:
    assert {name for name in KERNELS if (ROOT / "templates" / "model" / f"{name}.tpl.py").exists()} == set(KERNELS)


def _parse(raw: bytes) -> None:
    """Read a spec; anything but a ModelSpec or a located error fails the test."""
    try:
        parse_spec(parse_document(raw, "x.toml"), stem="deepseek_v41")
    except InvalidFile as error:
        assert error.problems
        for problem in error.problems:
            assert re.match(r"x\.toml:[1-9]\d*:[1-9]\d*: .+", str(problem), re.DOTALL)
            assert len(problem.message) < 500


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_fuzz_bytes(raw: bytes) -> None:
    _parse(raw)


def test_the_spec_with_every_table_is_valid() -> None:
    spec = parse_spec(parse_document(EVERY_TABLE, "x.toml"), stem="deepseek_v41")
    assert [(field.name, field.word) for field in spec.packet.fields] == [("token", 0), ("score", 3), ("nan", 2)]
    assert [(line.max_rows, line.block) for line in spec.step.block_sizes] == [(4, 1024), (64, 2048)]
    assert set(tomllib.loads(EVERY_TABLE.decode())) == set(ModelSpec.model_fields)


@BASES
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_fuzz_edits_of_a_valid_spec(base: bytes, data: st.DataObject) -> None:
    raw = bytearray(base)
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(raw)))
        length = data.draw(st.integers(0, 12))
        text = data.draw(st.text(string.digits + "[]{}=\"'#.,\n\\ eé\x00", max_size=6))
        raw[start : start + length] = text.encode()
    _parse(bytes(raw))


VALUES = st.sampled_from(
    [
        "0",
        "-1",
        "9" * 40,
        "0x" + "f" * 300,
        "1e400",
        "nan",
        "-inf",
        "true",
        '""',
        '"\\u0000"',
        "'../x'",
        '"bf16"',
        "[]",
        "[[]]",
    ]
    + [
        "{}",
        "{a = 1}",
        "1979-05-27",
        "07:32:00",
        '["bf16", 1]',
        "[1, 1]",
        '"' + "a" * 5000 + '"',
        "[{name = 'a', word = 0}]",
    ]
)


@BASES
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_fuzz_values_of_a_valid_spec(base: bytes, data: st.DataObject) -> None:
    """Any value at any key, the tables included."""
    lines = base.decode().splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        index = data.draw(st.sampled_from([i for i, line in enumerate(lines) if " = " in line]))
        key = lines[index].split(" = ")[0]
        lines[index] = f"{key} = {data.draw(VALUES)}"
    _parse("\n".join(lines).encode())


def test_fuzz_replaces_whole_tables() -> None:
    tables = [name for name, value in tomllib.loads(EVERY_TABLE.decode()).items() if isinstance(value, dict)]
    for name in tables:
        for value in ("5", "[]", "[{}]", "'x'", "{}", "nan"):
            text = re.sub(rf"\[+{name}(\.\w+)?\]+\n([^\[\n].*\n|\n)*", "", EVERY_TABLE.decode())
            _parse(text.replace("format = 1", f"format = 1\n{name} = {value}").encode())


def test_devices() -> None:
    devices = load_devices(ROOT)
    assert {"h20", "h100", "h200", "b200", "gb300", "rtx_pro_6000"} <= set(devices)
    h200 = devices["h200"]
    assert (h200.sms, h200.arch, h200.compute_capability, h200.smem_per_block_bytes) == (132, "sm_90a", (9, 0), 232448)
    assert all(set(device.provenance) == set(NUMBERS) for device in devices.values())


def test_weights_in_another_type_say_what_to_write() -> None:
    text = VALID.decode().replace('head_dtype = "bf16"', 'head_dtype = "fp32"')
    with pytest.raises(
        InvalidFile, match=r'head_dtype: must be "bf16" \(got "fp32"\): the kernels take bf16 weights; if the'
    ):
        parse_spec(parse_document(text.encode(), "x.toml"), stem="deepseek_v41")


@pytest.mark.parametrize(
    ("number", "message"),
    [
        ("l2_bytes = 60", "must be at least 1048576 (got 60): in bytes"),
        ("hbm_bytes_per_s = 4300.0", "must be at least 1e+11 (got 4300.0): in bytes per second"),
        ("l2_bytes_per_s = 8.3", "must be at least 1e+11 (got 8.3): in bytes per second"),
        ("grid_barrier_us = 930.0", "must be at most 100 (got 930.0): in microseconds"),
        ("rank_hop_us = 7e-7", "must be at least 0.05 (got 7e-07): in microseconds"),
        ("launch_us = 3.0e-6", "must be at least 0.1 (got 3e-06): in microseconds"),
        ("clock_hz = 1980.0", "must be at least 1e+08 (got 1980.0): in hertz"),
    ],
)
def test_a_device_in_other_units_is_refused(tmp_path: Path, number: str, message: str) -> None:
    text = (ROOT / "specs" / "devices" / "h200.toml").read_text()
    path = tmp_path / "h200.toml"
    path.write_text(re.sub(rf"(?m)^{number.split()[0]} = [^\"\n#]*", number + "\n", text, count=1))
    with pytest.raises(InvalidFile) as error:
        read_device(path)
    assert [problem.message for problem in error.value.problems] == [message]


def test_device_errors(tmp_path: Path) -> None:
    text = (ROOT / "specs" / "devices" / "h200.toml").read_text()
    text = text.replace('arch = "sm_90a"', 'arch = "sm_100a"').replace('clock_hz = "measured"\n', "")
    path = tmp_path / "h200.toml"
    path.write_text(text)
    with pytest.raises(InvalidFile) as error:
        read_device(path)
    assert [(problem.line, problem.key, problem.message) for problem in error.value.problems] == [
        (3, "arch", 'must be "sm_90a" for compute capability 9.0 (got "sm_100a")'),
        (17, "provenance", "must mark every number; clock_hz is missing"),
    ]
    path = path.rename(tmp_path / "h300.toml")
    path.write_text((ROOT / "specs" / "devices" / "h200.toml").read_text())
    with pytest.raises(InvalidFile, match='name: must equal the file\'s name, "h300" \\(got "h200"\\)'):
        read_device(path)
