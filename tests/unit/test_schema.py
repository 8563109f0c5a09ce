"""The JSON Schema that editors use."""

import tomllib
from pathlib import Path
from typing import Any

from dsparkgen.schema import SCHEMA_FILE, schema_text, spec_schema

ROOT = Path(__file__).parents[2]


def test_checked_in_schema_is_current() -> None:
    """To renew it: dsparkgen schema --out specs/spec.schema.json"""
    assert (ROOT / "specs" / SCHEMA_FILE).read_text() == schema_text()


def test_every_key_has_a_description() -> None:
    schema = spec_schema()
    for name, table in {"spec": schema, **schema["$defs"]}.items():
        assert table["additionalProperties"] is False, name
        for key, entry in table["properties"].items():
            assert len(entry["description"]) >= 10 and "\n" not in entry["description"], (name, key)


def test_schema_has_the_keys_of_the_spec() -> None:
    schema = spec_schema()

    def known(table: dict[str, Any], values: dict[str, Any]) -> None:
        for key, value in values.items():
            entry = table["properties"][key]
            if isinstance(value, dict):
                known(schema["$defs"][entry["$ref"].rsplit("/", 1)[1]], value)

    known(schema, tomllib.loads((ROOT / "specs" / "deepseek_v41.toml").read_text()))
    assert schema["$defs"]["Markov"]["properties"]["rank_dim"]["multipleOf"] == 16
    assert set(schema["required"]) == {
        "format", "model", "vocabulary", "markov", "draft", "logits", "parallel", "emit", "provenance"
    }  # fmt: skip
