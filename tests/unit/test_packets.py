"""The packet's layout, from the spec to the compiled kernels that write and read it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("cutlass")

from tests.harness.toy import toy_spec  # noqa: E402

from dsparkgen import bench, gpu  # noqa: E402
from dsparkgen.device import load_devices  # noqa: E402
from dsparkgen.spec import ModelSpec  # noqa: E402

ROOT = Path(__file__).parents[2]
DEFAULT = {"score": (0, 1), "nan": (1, 1), "token": (2, 2)}
LAYOUTS: dict[str, tuple[int, dict[str, tuple[int, int]]]] = {
    "default": (4, DEFAULT),
    "narrow": (2, {"token": (0, 1), "score": (1, 1)}),
    "wide": (8, {"spare": (0, 2), "score": (5, 1), "token": (6, 2)}),
    "fp64": (6, {"token": (0, 1), "nan": (1, 1), "score64": (4, 2)}),
}


def spec_of(words: int, fields: dict[str, tuple[int, int]]) -> ModelSpec:
    """A toy model whose head is shared by two ranks."""
    values = toy_spec(64, kernels=("fused", "step")).model_dump()
    layout = tuple({"name": name, "word": word, "words": count} for name, (word, count) in fields.items())
    values |= {"packet": {"words": words, "fields": layout}, "parallel": {"tp": (1, 2)}}
    values |= {"noise": {"scheme": "murmur3_64"}} if "score64" in fields else {}
    return ModelSpec.model_validate(values)


@pytest.fixture(scope="module", params=LAYOUTS)
def rendered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[gpu.Product, Any]:
    layout = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    bench.write_package([spec_of(*layout)], load_devices(ROOT), ROOT / "templates", folder)
    return gpu.load_product(folder, "toy"), layout


def test_config_names_each_fields_place(rendered: tuple[gpu.Product, Any]) -> None:
    product, (words, fields) = rendered
    assert (product.config.PACKET_WORDS, product.config.PACKET_FIELDS) == (words, fields)


def test_packets_are_written_and_read_where_the_spec_says(
    rendered: tuple[gpu.Product, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the addresses in the code that CuTe DSL makes: each word is written once, words without a value are 0."""
    product, (words, fields) = rendered
    monkeypatch.chdir(tmp_path)  # where the DSL leaves the PTX
    step, options = product.module("step"), {"arch": "sm_90a", "options": "--keep-ptx"}
    text = step.compile_step(1024, "bf16", "bf16", sharded=True, **options).artifacts.PTX
    stores = {place(text, address)[1]: value for address, value in re.findall(STORE, text)}
    assert sorted(stores) == [4 * word for word in range(words)]
    score_words = [
        first + i
        for name in ("score", "score64")
        if name in fields
        for first, count in [fields[name]]
        for i in range(count)
    ]
    valued = {4 * word for word in [*score_words, *(fields[name][0] for name in ("nan", "token") if name in fields)]}
    assert {at for at, value in stores.items() if f"mov.b32 \t{value}, 0;" not in text} == valued
    text = step.compile_pick(**options).artifacts.PTX
    *scores, token = (place(text, address) for address in re.findall(LOAD, text))
    for word, score in zip(score_words, scores, strict=True):
        assert score[0] == token[0]
        assert token[1] - score[1] == 4 * (fields["token"][0] - word)


def test_the_default_packet_is_as_wide_as_scores_are() -> None:
    """fp64 scores take two words; greedy drafts draw no noise, so their scores are fp32 whatever the scheme."""
    wide = {"noise": {"scheme": "murmur3_64"}, "kernels": ("fused", "step")}
    for options, fields in (
        ({}, DEFAULT),
        (wide, {"score64": (0, 2), "token": (2, 2)}),
        (wide | {"logits": {"cache_dtypes": ()}}, DEFAULT),
    ):
        packet = toy_spec(64, **options).packet
        assert {field.name: (field.word, field.words) for field in packet.fields} == fields


STORE, LOAD = r"st\.global\.b32 \[(%rd\d+)\], (%r\d+);", r"ld\.global\.b32 %r\d+, \[(%rd\d+)\];"


def place(text: str, address: str) -> tuple[str, int]:
    """An address register as another one and a number of bytes behind it."""
    found = re.search(rf"add\.s64 \t{address}, (%rd\d+), (-?\d+);", text)
    return (found[1], int(found[2])) if found else (address, 0)
