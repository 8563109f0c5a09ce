"""The residency cover without a GPU: every pair of values is in it, every forced line fits and is what it says, and it compiles."""

import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.harness import checks, residency  # noqa: E402
from tests.harness.residency import Build  # noqa: E402

from dsparkgen import plan  # noqa: E402
from dsparkgen.device import DeviceSpec, load_devices  # noqa: E402
from dsparkgen.render import digest  # noqa: E402

ROOT = Path(__file__).parents[2]
SAMPLE = 6  # builds compiled here, others whenever the kernel changes; `python -m tests.harness.residency --compile` takes all
LEAST = 40  # builds of the cover


@pytest.fixture(scope="module")
def device() -> DeviceSpec:
    return load_devices(ROOT)["h200"]


@pytest.fixture(scope="module")
def builds(device: DeviceSpec) -> dict[int, Build]:
    return residency.numbered_cover(device)


def test_the_cover_holds_every_pair_that_can_be_built(device: DeviceSpec, builds: dict[int, Build]) -> None:
    possible = {pair for build in residency.possible_builds(device) for pair in residency.pairs_of(build)}
    covered = {pair for build in builds.values() for pair in residency.pairs_of(build)}
    assert covered == possible
    assert LEAST <= len(builds) == len(set(builds.values()))


def test_pairs_that_cannot_be_built_are_those_that_do_not_fit(builds: dict[int, Build]) -> None:
    """Only a residency with a limited room excludes a value of another factor."""
    covered = {pair for build in builds.values() for pair in residency.pairs_of(build)}
    missing = {
        (first, left, second, right)
        for number, (first, lefts) in enumerate(residency.FACTORS.items())
        for second, rights in list(residency.FACTORS.items())[number + 1 :]
        for left in lefts
        for right in rights
        if (first, left, second, right) not in covered
    }
    excluded = {pair for pair in missing if "residency" in (pair[0], pair[2])}
    assert missing == excluded
    names = {right if second == "residency" else left for _, left, second, right in excluded}
    assert names <= {"all shared", "all registers", "odd shared, ring of 7", "registers, 1 shared, least ring"}


def test_every_line_fits_and_keeps_the_devices_ctas(device: DeviceSpec, builds: dict[int, Build]) -> None:
    for build in builds.values():
        line = residency.line_of(build, device)
        base_bytes = plan.BYTES[build.base]
        placed = plan.layout.residency(line, base_bytes)
        assert max(residency.shared_bytes(line, build, base) for base in plan.BYTES) <= device.smem_per_block_bytes, (
            build.title
        )
        assert (line.ctas, line.row_slots) == (device.sms, residency.row_slots(build))
        assert (
            line.tiles * device.sms * plan.TILE_ROWS >= build.columns > (line.tiles - 1) * device.sms * plan.TILE_ROWS
        )
        assert line.partial == (build.columns % plan.TILE_ROWS != 0)
        assert placed.register_tiles * placed.register_chunks <= plan.REGISTER_CHUNKS
        assert placed.ahead >= 1
        # One lane a warp makes the barriers of what it loads first.
        assert plan.layout.slot_count(line, build.rank_dim, base_bytes) <= 32 * line.warps
        streamed = line.tiles - min(line.tiles, placed.register_tiles * line.warps) - placed.resident
        assert streamed <= 0 or placed.ring > 0, build.title


@pytest.mark.parametrize("name", residency.FORCED)
def test_forced_lines_are_what_their_names_say(name: str, device: DeviceSpec, builds: dict[int, Build]) -> None:
    found = [build for build in builds.values() if build.residency == name]
    assert found
    for build in found:
        line = residency.line_of(build, device)
        x = line.bf16
        assert x == line.fp32
        in_registers = min(line.tiles, x.register_tiles * line.warps)
        streamed = line.tiles - in_registers - x.resident
        if name == "all streamed":
            assert (in_registers, x.resident, streamed) == (0, 0, line.tiles) and x.ring > 0
        elif name == "all shared":
            assert (in_registers, x.resident, x.ring) == (0, line.tiles, 0)
        elif name == "all registers":
            assert (in_registers, x.resident, x.ring) == (line.tiles, 0, 0)
        elif name == "odd ring, 3 shared":
            assert x.ring % 2 == 1 and x.resident == 3 and in_registers == 0
        elif name == "odd shared, ring of 7":
            assert x.ring == 7 and x.resident % 2 == 1 and streamed >= 1
        else:
            assert (x.register_tiles, x.resident) == (1, 1) and x.ring >= 1


def test_the_base_spec_and_every_build_are_valid_specs(builds: dict[int, Build]) -> None:
    for build in builds.values():
        spec, changes = residency.spec_of(build), residency.FEATURES[build.feature]
        vocabulary = spec.vocabulary
        assert (vocabulary.draft, spec.markov.rank_dim) == (build.vocab_size, build.rank_dim)
        assert (vocabulary.target > vocabulary.draft) == vocabulary.d2t == ("d2t" in changes)
        assert vocabulary.target - vocabulary.sampling_limit == changes.get("limit", 0)
        assert (not spec.logits.cache_dtypes) == ("greedy" in changes) == (build.cache == "none")
        assert spec.logits.transform.placement == changes.get("transform", {"placement": "none"})["placement"]
        assert spec.draft.num_steps == build.num_steps and spec.draft.max_rows >= build.rows


def test_every_feature_is_built_with_every_row_slot_count(builds: dict[int, Build]) -> None:
    built = {(build.feature, residency.row_slots(build)) for build in builds.values()}
    assert built >= {(feature, slots) for feature in residency.FEATURES for slots in plan.ROW_SLOTS}
    others = [build for build in builds.values() if build.feature != "plain"]
    for factor, values in (("residency", residency.FACTORS["residency"]), ("dtypes", residency.FACTORS["dtypes"])):
        assert {getattr(build, factor) for build in others} == set(values)


class Stand:
    """A generated model whose chain draws what the oracle draws, but for `damage` to its outputs."""

    def __init__(self, build: Build, damage: Any) -> None:
        self.build, self.damage, self.calls = build, damage, 0
        self.config = SimpleNamespace(
            VOCAB_SIZE=build.vocab_size,
            DRAFT_VOCAB_SIZE=build.vocab_size,
            D2T=False,
            SAMPLING_LIMIT=build.vocab_size,
            TRANSFORM="none",
            MULTIPLIER=1.0,
            SOFT_CAP=None,
            BASE_CAPPED=False,
            NOISE_SCHEME="murmur3_32",
            RANK_DIM=build.rank_dim,
            NUM_STEPS=build.num_steps,
            DRAFT_SALT=1 << 30,
            STEP_MIX=True,
        )

    def module(self, name: str) -> Any:
        return SimpleNamespace(ChainSampler=lambda *weights, **options: self._sampler(weights))

    def has(self, kernel: str) -> bool:
        return kernel == "chain"

    def _sampler(self, weights: Any) -> Any:
        from tests.harness.cases import Case
        from tests.harness.oracle import oracle

        def sample(
            base: Any,
            ids: Any,
            states: Any,
            positions: Any,
            heat: Any,
            seeds: Any,
            cache: Any,
            tokens: Any,
            **keywords: Any,
        ) -> None:
            self.calls += 1
            case = Case(
                *weights,
                base,
                ids,
                states,
                positions,
                heat,
                seeds,
                cache,
                tokens,
                keywords["query_per_row"],
                self.build.vocab_size,
            )
            drawn, cached = oracle(case)
            tokens.copy_(drawn)
            cache.copy_(cached)
            self.damage(self.calls, tokens, cache)

        return SimpleNamespace(
            supports=lambda rows, base: True,
            why_not_call=lambda rows, base: None,
            fork_noise=lambda *arguments: None,
            sample=sample,
        )


SMALL = Build(17, 128, 5, "all shared", 3, "bf16/fp32")


def test_a_build_that_equals_the_oracle_passes_every_batch() -> None:
    stand = Stand(SMALL, lambda call, tokens, cache: None)
    residency.check_cases(stand, SMALL, torch.device("cpu"))
    assert stand.calls == residency.BATCHES


@pytest.mark.parametrize("call", range(1, residency.BATCHES + 1))
@pytest.mark.parametrize("part", ["token", "cache", "padding"])
def test_one_wrong_value_in_any_batch_is_found(call: int, part: str) -> None:
    def damage(now: int, tokens: Any, cache: Any) -> None:
        if now == call:
            if part == "token":
                tokens[0, 4] += 1
            elif part == "cache":
                cache[cache.shape[0] // 2, 2, 16] = 12_345.0
            else:
                tokens[3, 0] = 0  # a row that the batch does not have

    with pytest.raises(checks.CheckFailed, match=f"batch {call - 1}"):
        residency.check_cases(Stand(SMALL, damage), SMALL, torch.device("cpu"))


def test_a_batch_that_the_chain_declines_is_an_error() -> None:
    stand = Stand(SMALL, lambda call, tokens, cache: None)
    sampler = stand._sampler(())
    sampler.why_not_call = lambda rows, base: "because"
    stand._sampler = lambda weights: sampler
    with pytest.raises(ValueError, match="expected the chain to take it: because"):
        residency.check_cases(stand, SMALL, torch.device("cpu"))


def test_without_a_gpu_it_cannot_tell(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert residency.main([]) == residency.CANNOT_TELL
    assert "CUDA" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("cutlass") is None or find_spec("triton") is None, reason="needs CuTe DSL and Triton")
def test_a_sample_compiles_without_spills_and_one_failure_stays_alone(builds: dict[int, Build]) -> None:
    code = "".join(path.read_text() for path in sorted((ROOT / "templates").rglob("*.py")))
    first = int(digest(code), 16)
    chosen = {1 + (first + step * len(builds) // SAMPLE) % len(builds) for step in range(SAMPLE)}
    impossible = Build(262144, 512, 16, "all shared", 8, "fp32/fp32")
    asked = {number: builds[number] for number in chosen} | {0: impossible}
    results = residency.run(asked, jobs=min(4, os.cpu_count() or 1), verb="compile")
    assert [result.number for result in results] == sorted(asked)
    refused, *others = results
    assert refused.failure is not None and "expected a build that fits h200" in refused.failure
    assert [result.failure for result in others] == [None] * SAMPLE
    assert all("registers" in result.detail for result in others)
