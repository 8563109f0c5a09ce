"""The step kernels on the CPU, in plain torch on the memory whose addresses they are given: what the launcher's tests run.

It stands for a model's step.py. Every launch does at once what the kernel does, reads and writes only where its arguments point, and
holds the launcher to the kernels' condition: alignment where vectors were chosen.
"""

from __future__ import annotations

import ast
import ctypes
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dspark_kernels._device import step_sizes
from dspark_kernels._device.step_call import UNUSED_BY_GREEDY_DRAFTS

from .cases import Transform
from .eager import head_output, transformed_sum
from .fake_kernels import FakeKernel
from .oracle import divide, gumbel, winner

STEP = Path(__file__).parents[2] / "templates" / "model" / "step.tpl.py"
BYTES = {"bf16": 2, "fp32": 4, "": 4}  # "": greedy drafts have no cache
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
VECTOR_BYTES, ENTRIES = 16, 8
NO_TOKEN = 2**31 - 1  # of a rank without a candidate
WIDE = "murmur3_64"  # the noise scheme whose scores are fp64


def constant(name: str) -> tuple[str, ...]:
    """A constant of the step kernels, read without importing their compiler."""
    for node in ast.parse(STEP.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return tuple(ast.literal_eval(node.value))
    raise AssertionError(f"{STEP}: expected {name} at the top level")


def memory(address: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """A tensor on memory at an address; strides in entries."""
    entries = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    buffer = (ctypes.c_char * (entries * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(tuple(shape), tuple(strides))


class StepSimulator:
    """A model's step.py. `compiled` lists the builds in order, `launched` the names of the kernels that ran."""

    ANCHOR_ARGUMENTS = constant("ANCHOR_ARGUMENTS")
    STEP_ARGUMENTS = constant("STEP_ARGUMENTS")
    PICK_ARGUMENTS = constant("PICK_ARGUMENTS")
    FILL_ARGUMENTS = constant("FILL_ARGUMENTS")
    NARROW = constant("NARROW")

    def __init__(self, config: Any) -> None:
        self.config = config
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[str] = []

    def compile_build(self, build: Any, *, arch: str, options: str) -> FakeKernel:
        kernels: dict[str, tuple[tuple[Any, ...], Sequence[str], Callable[[Mapping[str, int]], None]]] = {
            "anchor": (("anchor", build.pdl), self.ANCHOR_ARGUMENTS, self._anchor),
            "step": (
                ("step", build.block, build.base, build.cache, build.sharded, build.vector, build.pdl),
                self.STEP_ARGUMENTS,
                lambda a: self._step(a, build.base, build.cache, build.sharded, build.vector),
            ),
            "pick": (("pick", build.pdl), self.PICK_ARGUMENTS, self._pick),
            "fill": (
                ("fill", build.cache, build.vector, build.pdl),
                self.FILL_ARGUMENTS,
                lambda a: self._fill(a, build.cache, build.vector),
            ),
        }
        choices, names, play = kernels[build.kernel]
        self.compiled.append(choices)

        def run(arguments: Mapping[str, int], stream: int) -> None:
            self.launched.append(build.kernel)
            play(arguments)

        return FakeKernel(run, names, self.NARROW)

    # --- the kernels ---

    def _embedding(self, a: Mapping[str, int], row: int, token: int) -> None:
        """Gather a token's Markov embedding to a row's."""
        rank = self.config.RANK_DIM
        source = memory(a["embed"], torch.bfloat16, (self.config.VOCAB_SIZE, rank), (rank, 1))
        memory(a["embeddings"], torch.bfloat16, (row + 1, rank), (rank, 1))[row] = source[token]

    def _anchor(self, a: Mapping[str, int]) -> None:
        rows, distance = a["rows"], a["query_per_row"]
        words = step_sizes.scratch_words(rows)
        memory(a["scratch"], torch.int64, (words,), (1,)).zero_()
        for row, token in enumerate(memory(a["input_ids"], torch.int32, (rows,), (distance,)).tolist()):
            self._embedding(a, row, token if 0 <= token < self.config.VOCAB_SIZE else 0)

    def _step(self, a: Mapping[str, int], base: str, cache: str, sharded: bool, vector: bool) -> None:
        config, rows, width, step = self.config, a["rows"], a["width"], a["step"]
        steps, by_row = config.NUM_STEPS, sharded or config.D2T
        if vector:
            assert width % ENTRIES == 0, width
            for name, size in (("base", BYTES[base]), ("bias", 2), ("cache", BYTES[cache])):
                rows_matter = rows > 1 or (name == "cache" and not by_row)
                assert a[name] % VECTOR_BYTES == 0, name
                assert not rows_matter or a[f"{name}_row_stride"] * size % VECTOR_BYTES == 0, name
        logits = memory(a["base"], DTYPES[base], (rows, width), (a["base_row_stride"], 1))
        bias = memory(a["bias"], torch.bfloat16, (rows, width), (a["bias_row_stride"], 1))
        greedy = not config.CACHE_DTYPES
        assert not greedy or all(a.get(name, 0) == 0 for name in UNUSED_BY_GREEDY_DRAFTS)
        transform = Transform.of(config)
        if transform.placement in ("base", "both") and not transform.base_capped:
            logits = head_output(transform, logits)
        logits = transformed_sum(transform, logits, bias).to(torch.float32 if greedy else DTYPES[cache])
        ids = torch.arange(a["vocab_start"], a["vocab_start"] + width)
        if config.D2T:
            ids = memory(a["target_ids"], torch.int32, (width,), (1,)).long()
        logits[:, ids >= config.SAMPLING_LIMIT] = float("-inf")
        for row in range(rows):
            if greedy:
                self._finish(a, row, *self._best_draft(logits[row], ids), sharded)
                continue
            sample = row * steps + step
            state = int(memory(a["idx_mapping"], torch.int64, (sample + 1,), (1,))[sample])
            heat, seed = 0.0, 0
            if state >= 0:
                heat = float(memory(a["temperature"], torch.float32, (state + 1,), (1,))[state])
                seed = int(memory(a["seeds"], torch.int64, (state + 1,), (1,))[state])
                line = row if by_row else state
                size = BYTES[cache]
                memory(a["cache"] + line * a["cache_row_stride"] * size, DTYPES[cache], (width,), (1,)).copy_(
                    logits[row]
                )
            position = int(memory(a["sample_pos"], torch.int64, (sample + 1,), (1,))[sample])
            score, token = self._best(logits[row].float(), ids, heat, seed, position, step)
            self._finish(a, row, score, token, sharded)

    def _finish(self, a: Mapping[str, int], row: int, score: float, token: int, sharded: bool) -> None:
        """What a row's last block does with the winner."""
        if sharded:
            self._packet(a, row, score, token)
        else:
            self._token(a, row, token)
            self._embedding(a, row, token)

    def _best_draft(self, score: torch.Tensor, ids: torch.Tensor) -> tuple[float, int]:
        """Score and target id of the winner of greedy drafts: ties go to the lowest draft id."""
        candidates = ids < self.config.SAMPLING_LIMIT
        ids, score = ids[candidates], score[candidates]
        if not len(ids):
            return float("-inf"), NO_TOKEN
        place = winner(score)
        return float(score[place]), int(ids[place])

    def _best(
        self, score: torch.Tensor, ids: torch.Tensor, heat: float, seed: int, position: int, step: int
    ) -> tuple[float, int]:
        """Score and target id of the winner among a row's columns."""
        config = self.config
        if heat != 0.0:
            seed = seed ^ (step << 32) if config.STEP_MIX else seed
            key, scheme = position - 1 + config.DRAFT_SALT, config.NOISE_SCHEME
            noise = gumbel(seed, key, config.VOCAB_SIZE, score.device, scheme=scheme)
            score = divide(score, heat) + noise[ids]
        by_id = torch.argsort(ids)
        ids, score = ids[by_id], score[by_id]
        candidates = ids < config.SAMPLING_LIMIT
        ids, score = ids[candidates], score[candidates]
        if not len(ids):
            return float("-inf"), NO_TOKEN
        place = winner(score)
        return float(score[place]), int(ids[place])

    def _token(self, a: Mapping[str, int], row: int, token: int) -> None:
        at = row * a["token_stride"] + a["step"]
        memory(a["draft_tokens"], torch.int64, (at + 1,), (1,))[at] = token

    def _packet(self, a: Mapping[str, int], row: int, score: float, token: int) -> None:
        words = self.config.PACKET_WORDS
        packet = memory(a["packets"], torch.int32, (row + 1, words), (words, 1))[row]
        packet.zero_()
        fields = self.config.PACKET_FIELDS
        if self._wide:
            packet.view(torch.float64)[fields["score64"][0] // 2] = score
        else:
            packet.view(torch.float32)[fields["score"][0]] = score
        packet[fields["token"][0]] = token
        if "nan" in fields:
            packet[fields["nan"][0]] = int(score != score)

    @property
    def _wide(self) -> bool:
        return bool(self.config.CACHE_DTYPES and self.config.NOISE_SCHEME == WIDE)

    def _pick(self, a: Mapping[str, int]) -> None:
        rows, world, words = a["rows"], a["world"], self.config.PACKET_WORDS
        packets = memory(a["packets"], torch.int32, (world, rows, words), (rows * words, words, 1))
        for row in range(rows):
            fields, line = self.config.PACKET_FIELDS, packets[:, row].contiguous()
            if self._wide:
                score = line.view(torch.float64)[:, fields["score64"][0] // 2]
            else:
                score = line.view(torch.float32)[:, fields["score"][0]]
            tokens = line[:, fields["token"][0]]
            if not self.config.CACHE_DTYPES:  # ranks' draft ids ascend, token ids need not
                score, tokens = score[tokens != NO_TOKEN], tokens[tokens != NO_TOKEN]
            by_id = torch.argsort(tokens) if self.config.CACHE_DTYPES else torch.arange(len(tokens))
            token = int(tokens[by_id][winner(score[by_id])])
            self._token(a, row, token)
            self._embedding(a, row, token)

    def _fill(self, a: Mapping[str, int], cache: str, vector: bool) -> None:
        config, rows, width, world, pitch = self.config, a["rows"], a["width"], a["world"], a["pitch"]
        steps, dtype, size = config.NUM_STEPS, DTYPES[cache], BYTES[cache]
        if vector:
            assert width % ENTRIES == 0, width
            for name in ("cache", "shards"):
                assert a[name] % VECTOR_BYTES == 0, name
            assert a["cache_req_stride"] * size % VECTOR_BYTES == a["cache_pos_stride"] * size % VECTOR_BYTES == 0
        strides = (a["rank_stride"], steps * pitch, pitch, 1)
        shards = memory(a["shards"], dtype, (world, rows, steps, width), strides)
        for row in range(rows):
            for step in range(steps):
                state = int(memory(a["idx_mapping"], torch.int64, (rows * steps,), (1,))[row * steps + step])
                if state < 0:
                    continue
                drafts = shards[:, row, step].reshape(-1)
                at = a["cache"] + (state * a["cache_req_stride"] + step * a["cache_pos_stride"]) * size
                target = memory(at, dtype, (config.VOCAB_SIZE,), (1,))
                if config.D2T:
                    inverse = memory(a["inverse"], torch.int32, (config.VOCAB_SIZE,), (1,)).long()
                    drafts = torch.where(inverse >= 0, drafts[inverse.clamp(min=0)], float("-inf"))
                target.copy_(drafts)
