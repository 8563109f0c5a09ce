"""docs/spec-reference.md is what the Pydantic models say today."""

from pathlib import Path

from dsparkgen.device import DeviceSpec
from dsparkgen.reference import spec_reference
from dsparkgen.spec import ModelSpec

PAGE = Path(__file__).parents[2] / "docs" / "spec-reference.md"


def test_page_is_current() -> None:
    assert PAGE.read_text() == spec_reference(), "the spec format changed: run `make docs`"


def test_every_key_of_both_formats_is_on_the_page() -> None:
    page = spec_reference()
    for model in (ModelSpec, DeviceSpec):
        schema = model.model_json_schema()
        for table in (schema, *schema.get("$defs", {}).values()):
            for key, entry in table.get("properties", {}).items():
                assert f"| `{key}` |" in page or f"{key}]`" in page, key
                assert "$ref" in entry or entry["description"], f"{key} has no description"
