"""docs/spec-reference.md, written from the Pydantic models that define the two file formats.

python -m dsparkgen.reference docs/spec-reference.md
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsparkgen.device import DeviceSpec
from dsparkgen.spec import ModelSpec

INTRODUCTION = """\
# Spec reference

Written from the Pydantic models in `generator/dsparkgen/spec.py` and `device.py`, the only definitions of the formats; `make docs`
rewrites this page. `dsparkgen schema` prints a model spec's format as JSON Schema, for editors. Unknown keys are errors. All errors
of a file are reported at once, with file, line and column.

# Model specs: `specs/<model>.toml`
"""
DEVICES = "\n# Device descriptions: `specs/devices/<device>.toml`\n"
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}

Schema = Mapping[str, Any]


def spec_reference() -> str:
    """The whole page as Markdown."""
    parts = [INTRODUCTION]
    for schema, heading in ((ModelSpec.model_json_schema(), ""), (DeviceSpec.model_json_schema(), DEVICES)):
        parts += [heading, *_sections(schema, schema.get("$defs", {}), "")]
    return "".join(parts)


def _sections(schema: Schema, definitions: Mapping[str, Schema], name: str) -> Iterator[str]:
    """One table of keys for this TOML table, then the tables inside it. `name` is as TOML writes it, brackets apart."""
    keys, inner = {}, []
    for key, entry in schema["properties"].items():
        table = _table(entry, definitions)
        item = _table(entry.get("items", {}), definitions)
        path = f"{name}.{key}" if name else key
        if table is not None:
            inner.append((table, path))
            continue
        keys[key] = entry
        if item is not None:
            inner.append((item, f"[{path}]"))
    if keys:
        yield f"\n## `[{name}]`\n" if name else "\n## Top level\n"
        yield f"\n{_one_line(schema['description'])}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
        for key, entry in keys.items():
            default = _default(entry, key in schema.get("required", ()))
            yield f"| `{key}` | {_type(entry, definitions)} | {default} | {_one_line(entry['description'])} |\n"
    for table, path in inner:
        yield from _sections(table, definitions, path)


def _table(entry: Schema, definitions: Mapping[str, Schema]) -> Schema | None:
    """The schema of the TOML table that a key holds, or None for a key with another value."""
    if "$ref" not in entry:
        return None
    target = definitions[entry["$ref"].rsplit("/", 1)[1]]
    return target if "properties" in target else None


def _default(entry: Schema, required: bool) -> str:
    """What a key left out means."""
    if required:
        return "required"
    if "default" not in entry:
        return "derived"
    return "not set" if entry["default"] is None else f"`{json.dumps(entry['default'])}`"


def _type(entry: Schema, definitions: Mapping[str, Schema]) -> str:
    """A schema in words: its type, its choices, its bounds."""
    if "$ref" in entry:
        return "table"
    if "anyOf" in entry:
        return " or ".join(_type(option, definitions) for option in entry["anyOf"] if option.get("type") != "null")
    if "const" in entry or "enum" in entry:
        return " or ".join(f"`{json.dumps(choice)}`" for choice in entry.get("enum", [entry.get("const")]))
    if "prefixItems" in entry:
        return f"list of {len(entry['prefixItems'])}: " + ", ".join(
            _type(item, definitions) for item in entry["prefixItems"]
        )
    if entry["type"] == "array":
        return f"list of {_type(entry['items'], definitions)}"
    if entry["type"] == "object":
        return f"table of {_type(entry['additionalProperties'], definitions)}"
    bounds = [f"{sign} {_number(entry[key])}" for key, sign in BOUNDS.items() if key in entry]
    if "multipleOf" in entry:
        bounds.append(f"a multiple of {entry['multipleOf']}")
    return ", ".join([entry["type"], *bounds])


def _number(value: float) -> str:
    """A bound, without zeros that say nothing."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _one_line(text: str) -> str:
    """Text for one cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(spec_reference())
