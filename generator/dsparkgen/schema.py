"""The spec format as JSON Schema, for editors: each spec names the file in its `#:schema` line."""

import json
from typing import Any

from dsparkgen.spec import ModelSpec

SCHEMA_FILE = "spec.schema.json"  # stands beside the specs


def spec_schema() -> dict[str, Any]:
    """The JSON Schema of a spec, with descriptions. Rules across fields are not in it: `dsparkgen check` has those."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_tidy(ModelSpec.model_json_schema())}


def schema_text() -> str:
    """The schema as it stands in `specs/spec.schema.json`."""
    return json.dumps(spec_schema(), indent=2, ensure_ascii=False) + "\n"


def _tidy(value: Any) -> Any:
    """Without Pydantic's titles (the names again) and without Python's line breaks in descriptions."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if not (key == "title" and isinstance(item, str))}
        return {
            key: " ".join(item.split()) if key == "description" and isinstance(item, str) else _tidy(item)
            for key, item in kept.items()
        }
    if isinstance(value, list):
        return [_tidy(item) for item in value]
    return value
