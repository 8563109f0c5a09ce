"""The spec format: what a model file says. This module is its only definition.

`read_spec` turns a file into a frozen `ModelSpec` or raises `InvalidFile` with every problem and its line. The JSON
Schema, the reference in docs/ and the errors all come from the models below.
"""

import keyword
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from dsparkgen.locate import Document, InvalidFile, Location, Problem, Table, read_document, show, validate

FORMAT = 1

Dtype = Literal["bf16", "fp32"]
KernelName = Literal["noise", "chain", "fused", "step"]
PacketRole = Literal["score", "score64", "token", "nan", "spare"]
Arch = Literal["sm_90a", "sm_100a", "sm_103a", "sm_120a"]
NAME = r"^[a-z][a-z0-9_]*$"
FP32_EXPONENT = 126  # of the largest power of two whose inverse is a normal fp32 number as well
Broken = Iterator[tuple[Location, str]]

EXAMPLE_KEY = "vocabulary.target"
BF16_WEIGHTS = 'the kernels take bf16 weights; if the engine casts at load, write "bf16" and say so in provenance.notes'

# A Gumbel key packs an ordered fp32 score (32 bits) and the token id; 24 bits of id leave 8 for a tag.
MAX_VOCABULARY = 1 << 24


class Model(Table):
    """Name and title of the model."""

    name: Annotated[str, Field(pattern=NAME, max_length=48)] = Field(
        description="Folder and import name of the generated package; equal to the file name without .toml."
    )
    title: Annotated[str, Field(pattern=r'^[^"\\\x00-\x1f\x7f]+$', max_length=80)] = Field(
        description="Name for people, one line, without quotes or backslashes."
    )
    description: str = Field(default="", description="What the model is, for the documentation.")


class Vocabulary(Table):
    """Token ids: the target model's, the draft head's, and how they relate."""

    target: Annotated[int, Field(ge=2, le=MAX_VOCABULARY)] = Field(
        description="Rows of the Markov embedding: the target vocabulary, in tokens."
    )
    draft: Annotated[int, Field(ge=1, le=MAX_VOCABULARY)] = Field(
        default_factory=lambda data: data["target"],
        description="Rows of the Markov head: the draft vocabulary, in tokens. Default: `target`.",
    )
    d2t: bool = Field(
        default=False,
        description="Whether a d2t tensor maps draft to target ids: target id = draft id + d2t[draft id].",
    )
    sampling_limit: Annotated[int, Field(ge=1, le=MAX_VOCABULARY)] = Field(
        default_factory=lambda data: data["target"],
        description="Ids at or above this are padding of the head and never drafted. Default: `target`.",
    )


class Markov(Table):
    """The Markov head: bias = head @ embed[previous token]."""

    HINTS = {"embed_dtype": BF16_WEIGHTS, "head_dtype": BF16_WEIGHTS}

    rank_dim: Annotated[int, Field(ge=64, le=512, multiple_of=16)] = Field(
        description="Inner dimension of embedding and head."
    )
    head_type: Literal["vanilla", "gated", "rnn"] = Field(
        default="vanilla", description="Form of the head; `vanilla` is one matrix product."
    )
    embed_dtype: Literal["bf16"] = Field(
        default="bf16",
        description="Data type of the Markov embedding, as the engine hands it over, after any cast at load.",
    )
    head_dtype: Literal["bf16"] = Field(
        default="bf16", description="Data type of the Markov head, as the engine hands it over, after any cast at load."
    )
    bias_rounding: Literal["bf16", "none"] = Field(
        default="bf16", description="Rounding of the fp32 bias before it is added: to bf16, or none."
    )


class Draft(Table):
    """Shape of a draft step."""

    num_steps: Annotated[int, Field(ge=1, le=16)] = Field(description="Draft tokens per request and step (N).")
    sample_from_anchor: bool = Field(
        default=True, description="true: N query rows give N drafts; false: 1 + N query rows, the anchor's is skipped."
    )
    top_k: Annotated[int, Field(ge=0, le=MAX_VOCABULARY)] = Field(
        default=0, description="0: dense drafts; else only that many largest base logits of a position are candidates."
    )
    max_rows: Annotated[int, Field(ge=1, le=8)] = Field(
        default=8, description="Request rows that one chain launch takes: columns of its tensor-core tile."
    )


class Transform(Table):
    """Output transform of the logits: a multiplier, then a soft cap `cap * tanh(x / cap)`."""

    placement: Literal["none", "sum", "base", "both"] = Field(
        default="none",
        description="What is transformed: base + bias, the base alone, or base and bias each. They draw other tokens.",
    )
    multiplier: float = Field(default=1.0, description="Factor applied before the cap; rounded to fp32.")
    soft_cap: Annotated[float, Field(gt=0.0)] | None = Field(
        default=None, description="Bound of the soft cap; rounded to fp32. Default: no cap."
    )
    base_capped: bool = Field(
        default=False, description="Whether the base logits arrive capped, so that only the bias is capped here."
    )


class Logits(Table):
    """Data types of logits and cache, and the output transform."""

    base_dtypes: Annotated[tuple[Dtype, ...], Field(min_length=1)] = Field(
        description="Data types of the base logits that kernels are compiled for."
    )
    cache_dtypes: tuple[Dtype, ...] = Field(
        description="Data types of the logits cache; an empty array means greedy drafts without a cache."
    )
    transform: Transform = Field(default=Transform(), description="Output transform.")


class Noise(Table):
    """The Gumbel noise, equal to the verifying engine's."""

    scheme: Literal["murmur3_32", "murmur3_64", "philox_32"] = Field(
        default="murmur3_32", description="Hash and width of the uniform numbers."
    )
    draft_salt: Annotated[int, Field(ge=0, lt=1 << 32)] = Field(
        default=1 << 30, description="Added to the position, so that drafts and recovered tokens use separate noise."
    )
    step_mix: bool = Field(
        default=True, description="Whether the seed is mixed with the draft step: seed ^ (step << 32)."
    )


class Parallel(Table):
    """Tensor-parallel vocabulary shards of the Markov head."""

    tp: Annotated[tuple[Annotated[int, Field(ge=1, le=16)], ...], Field(min_length=1)] = Field(
        description="Tensor-parallel sizes to plan for, ascending."
    )
    exchange: Literal["mailbox", "packet"] = Field(
        default="mailbox", description="How ranks agree on a token: 64-bit records in peer memory, or gathered packets."
    )


class PacketField(Table):
    """One field of a packet."""

    name: PacketRole = Field(
        description="`score`: fp32 bits of the rank's best score, 1 word; `score64`: fp64 bits in place of it where "
        "`noise.scheme` is `murmur3_64`, 2 words, the low word first; `token`: its target id, 1 word, or 2 with the low "
        "word first; `nan`: 1 when the score is NaN, else 0, 1 word; `spare`: left alone."
    )
    word: Annotated[int, Field(ge=0, le=15)] = Field(description="First 32-bit word of the field.")
    words: Annotated[int, Field(ge=1, le=2)] = Field(default=1, description="Width of the field in 32-bit words.")


TOKEN_FIELD = PacketField(name="token", word=2, words=2)
SCORE_FIELDS = (PacketField(name="score", word=0), PacketField(name="nan", word=1))
SCORE64_FIELDS = (PacketField(name="score64", word=0, words=2),)


class Packet(Table):
    """Layout of the packet that a rank sends per request row when the step kernels share a sharded head."""

    words: Annotated[int, Field(ge=2, le=16, multiple_of=2)] = Field(
        default=4, description="Width of a packet in 32-bit words."
    )
    fields: tuple[PacketField, ...] = Field(
        default=(*SCORE_FIELDS, TOKEN_FIELD),
        description="Fields of a packet. Default: score in word 0, nan in word 1, token in words 2 and 3; where the whole table "
        "is left out and `noise.scheme` is `murmur3_64`, score64 in words 0 and 1, token in words 2 and 3.",
    )


class StepBlock(Table):
    """One line of the table of block sizes."""

    max_rows: Annotated[int, Field(ge=1, le=4096)] = Field(description="Most request rows that take this block size.")
    block: Annotated[int, Field(ge=1024, le=8192)] = Field(
        description="Vocabulary entries of a block, a power of two; results do not depend on it."
    )


class Step(Table):
    """Launches of the step kernels, one a draft position. Every choice draws the same tokens."""

    block_sizes: Annotated[tuple[StepBlock, ...], Field(max_length=8)] = Field(
        default=(
            StepBlock(max_rows=2, block=1024),
            StepBlock(max_rows=8, block=2048),
            StepBlock(max_rows=16, block=4096),
        ),
        description="Block sizes by row count, ascending; the first line with enough rows counts.",
    )
    default_block: Annotated[int, Field(ge=1024, le=8192)] = Field(
        default=8192, description="Block size beyond the last line of `block_sizes`, a power of two."
    )
    pdl_max_rows: Annotated[int, Field(ge=0, le=4096)] = Field(
        default=32, description="Most request rows that are launched programmatically dependent; 0 means never."
    )


class Emit(Table):
    """What is generated."""

    kernels: Annotated[tuple[KernelName, ...], Field(min_length=1)] = Field(description="Kernels to generate.")
    archs: Annotated[tuple[Arch, ...], Field(min_length=1)] = Field(
        description="GPU architectures that the kernels are compiled for in checks."
    )


class Provenance(Table):
    """Where the numbers come from."""

    source: Annotated[str, Field(min_length=1)] = Field(description="Public source of the numbers.")
    notes: str = Field(default="", description="Anything a reader of the numbers should know.")
    unknown: tuple[str, ...] = Field(
        default=(), description="Keys that no public source states; their values here are assumptions."
    )
    unverified: tuple[str, ...] = Field(default=(), description="Keys whose value comes from a related model.")


def _names(spec: Any) -> Broken:
    if keyword.iskeyword(spec.model.name):
        yield ("model", "name"), f"must not be a Python keyword (got {show(spec.model.name)})"
    if spec.model.name == "engines":
        yield ("model", "name"), 'must not be "engines", the folder of the engine hooks'


def _vocabulary(spec: Any) -> Broken:
    target, draft = spec.vocabulary.target, spec.vocabulary.draft
    if draft > target:
        yield ("vocabulary", "draft"), f"must be at most vocabulary.target, {target} (got {draft})"
    elif draft != target and not spec.vocabulary.d2t:
        yield (
            ("vocabulary", "draft"),
            f"must equal vocabulary.target, {target}, unless vocabulary.d2t is true (got {draft})",
        )


def _sampling_limit(spec: Any) -> Broken:
    limit, target = spec.vocabulary.sampling_limit, spec.vocabulary.target
    if limit > target:
        yield ("vocabulary", "sampling_limit"), f"must be at most vocabulary.target, {target} (got {limit})"


def _transform(spec: Any) -> Broken:
    transform, where = spec.logits.transform, ("logits", "transform")
    placement, multiplier, cap = transform.placement, transform.multiplier, transform.soft_cap
    if placement == "none":
        if multiplier != 1.0:
            yield (*where, "multiplier"), f'must be 1.0 when placement is "none" (got {show(multiplier)})'
        if cap is not None:
            yield (*where, "soft_cap"), f'must be absent when placement is "none" (got {show(cap)})'
    else:
        if multiplier == 1.0 and cap is None:
            yield (*where, "placement"), f"needs a multiplier or a soft_cap (got {show(placement)} with neither)"
        for key, value in (("multiplier", multiplier), ("soft_cap", cap)):
            if value is not None and not 2.0**-FP32_EXPONENT <= abs(value) <= 2.0**FP32_EXPONENT:
                size = f"2^-{FP32_EXPONENT} to 2^{FP32_EXPONENT} in size, so that fp32 holds it and its inverse"
                yield (*where, key), f"must be {size} (got {show(value)})"
    if transform.base_capped and placement not in ("base", "both"):
        yield (*where, "base_capped"), f'must be false unless placement is "base" or "both" (got {show(placement)})'


def _distinct(*where: str) -> Callable[[Any], Broken]:
    """A rule: the items of an array differ."""

    def rule(spec: Any) -> Broken:
        values = spec
        for part in where:
            values = getattr(values, part)
        for index, value in enumerate(values):
            if value in values[:index]:
                yield (*where, index), f"must be listed once (got {show(value)} again)"

    return rule


def _tp_order(spec: Any) -> Broken:
    tp = spec.parallel.tp
    if len(set(tp)) == len(tp) and list(tp) != sorted(tp):
        yield ("parallel", "tp"), f"must be ascending (got {show(tp)})"


PACKET_WIDTHS = {"score": (1,), "score64": (2,), "token": (1, 2), "nan": (1,), "spare": (1, 2)}
"""Words that each field of a packet may have."""


def _step_blocks(spec: Any) -> Broken:
    before = 0
    for index, line in enumerate(spec.step.block_sizes):
        where = ("step", "block_sizes", index)
        if line.max_rows <= before:
            yield (*where, "max_rows"), f"must be ascending, more than {before} (got {line.max_rows})"
        before = line.max_rows
        if line.block & (line.block - 1):
            yield (*where, "block"), f"must be a power of two (got {line.block})"
    if spec.step.default_block & (spec.step.default_block - 1):
        yield ("step", "default_block"), f"must be a power of two (got {spec.step.default_block})"


def _provenance(spec: Any) -> Broken:
    for field in ("unknown", "unverified"):
        for index, name in enumerate(getattr(spec.provenance, field)):
            if not _is_key(name):
                yield (
                    ("provenance", field, index),
                    f"must be a key of this format, as in {EXAMPLE_KEY} (got {show(name)})",
                )


def _is_key(name: str) -> bool:
    """Whether a dotted name is that of a value of the format, not of a table."""
    found: Any = ModelSpec
    for part in name.split("."):
        if not (isinstance(found, type) and issubclass(found, Table) and part in found.model_fields):
            return False
        found = found.model_fields[part].annotation
    return not (isinstance(found, type) and issubclass(found, Table))


def _has_wide_scores(noise: Any, logits: Any) -> bool:
    """Whether scores are compared in fp64: with fp64 noise, which greedy drafts do not draw."""
    return bool(noise.scheme == "murmur3_64" and logits.cache_dtypes)


def _packet(spec: Any) -> Broken:
    taken: dict[int, str] = {}
    names: set[str] = set()
    for index, field in enumerate(spec.packet.fields):
        where = ("packet", "fields", index)
        if field.name in names:
            yield (*where, "name"), f"must be used once (got {show(field.name)} again)"
        names.add(field.name)
        if field.words not in PACKET_WIDTHS[field.name]:
            widths = " or ".join(map(str, PACKET_WIDTHS[field.name]))
            yield (*where, "words"), f"must be {widths} for {show(field.name)} (got {field.words})"
        if field.word + field.words > spec.packet.words:
            last = field.word + field.words - 1
            yield (*where, "word"), f"must end within packet.words, {spec.packet.words} (got word {last})"
        if field.words == 2 and field.word % 2:
            yield (*where, "word"), f"must be even for a field of 2 words (got {field.word})"
        for word in range(field.word, field.word + field.words):
            if word in taken:
                yield (*where, "word"), f"must not overlap: word {word} belongs to {taken[word]}"
            taken.setdefault(word, field.name)


def _packet_needed(spec: Any) -> Broken:
    sharded_step = "step" in spec.emit.kernels and max(spec.parallel.tp) > 1
    if not sharded_step and spec.parallel.exchange != "packet":
        return
    user = 'exchange "packet"' if spec.parallel.exchange == "packet" else "step kernel on more than one rank"
    names = [field.name for field in spec.packet.fields]
    wide = _has_wide_scores(spec.noise, spec.logits)
    score, other = ("score64", "score") if wide else ("score", "score64")
    if other in names:
        where = ("packet", "fields", names.index(other), "name")
        yield where, f"must be {show(score)} for {'fp64' if wide else 'fp32'} scores (got {show(other)})"
    for role in (score, "token"):
        if role not in names and not (role == score and other in names):
            yield ("packet", "fields"), f"must have a field {show(role)} for the {user} (got {show(tuple(names))})"


# What each kernel of this generator can serve. A spec may describe more than today's kernels compute; a listed kernel
# that would compute something else is an error at the field that it cannot serve.


class Limit(NamedTuple):
    """A field that a kernel cannot serve."""

    where: Location
    expected: str  # what it must be, in words
    found: object
    because: str = ""  # what stands in the way


Limits = Iterator[Limit]
FP32_NOISE = ("murmur3_32", "philox_32")
OTHER_HEADS = {
    "gated": "a gated head needs a kernel that gates the Markov embedding by the draft model's hidden state",
    "rnn": "an rnn head needs a kernel that carries a recurrent state from position to position",
}
"""What a kernel for another form of the head would have to do."""


def _noise_limits(spec: Any) -> Limits:
    yield from _must_be_among(spec, ("noise", "scheme"), FP32_NOISE, "it writes fp32 noise")
    if not spec.logits.cache_dtypes:
        yield Limit(("logits", "cache_dtypes"), "a list with an item", (), "greedy drafts use no noise")


def _dense_limits(spec: Any) -> Limits:
    """What every kernel needs that computes the bias of the whole draft vocabulary from one Markov embedding."""
    head = spec.markov.head_type
    yield from _must_be_among(spec, ("markov", "head_type"), ("vanilla",), OTHER_HEADS.get(head, ""))
    yield from _must_be_among(
        spec, ("markov", "bias_rounding"), ("bf16",), "an fp32 bias needs a kernel that keeps it so"
    )
    gathers = "a top-k draft needs a kernel that gathers head rows by candidate"
    yield from _must_be_among(spec, ("draft", "top_k"), (0,), gathers)


def _fused_limits(spec: Any) -> Limits:
    yield from _dense_limits(spec)


def _chain_limits(spec: Any) -> Limits:
    yield from _dense_limits(spec)
    yield from _must_be_among(spec, ("noise", "scheme"), FP32_NOISE, "its exchange record has 32 bits of score")
    yield from _must_be_among(spec, ("parallel", "exchange"), ("mailbox",))


def _step_limits(spec: Any) -> Limits:
    yield from _dense_limits(spec)


def _must_be_among(spec: Any, where: tuple[str, ...], values: Sequence[object], because: str = "") -> Limits:
    found = spec
    for part in where:
        found = getattr(found, part)
    if found not in values:
        yield Limit(where, " or ".join(show(value) for value in values), found, because)


KERNELS: dict[str, Callable[[Any], Limits]] = {
    "noise": _noise_limits,
    "chain": _chain_limits,
    "fused": _fused_limits,
    "step": _step_limits,
}
"""The kernels that this generator has a template for, each with what it cannot serve."""

NEEDS = {"chain": ("noise", "fused"), "step": ("fused",)}
"""Kernels that another one relies on: the chain draws from the noise kernel, unless its drafts are greedy; chain and step kernels
leave what they do not take to the fused loop."""


def _kernels_exist(spec: Any) -> Broken:
    for index, kernel in enumerate(spec.emit.kernels):
        if kernel not in KERNELS:
            yield (
                ("emit", "kernels", index),
                f"must be a kernel that this generator has a template for: {', '.join(KERNELS)} (got {show(kernel)})",
            )


def _kernels_needed(spec: Any) -> Broken:
    for kernel in spec.emit.kernels:
        for other in NEEDS.get(kernel, ()):
            if other == "noise" and not spec.logits.cache_dtypes:
                continue
            if other not in spec.emit.kernels:
                got = show(spec.emit.kernels)
                yield ("emit", "kernels"), f"must list {show(other)}, which the {kernel} kernel relies on (got {got})"


def _kernels_serve(spec: Any) -> Broken:
    served: dict[tuple[Location, str, str, str], list[str]] = {}
    for kernel in spec.emit.kernels:
        for limit in KERNELS[kernel](spec) if kernel in KERNELS else ():
            key = (limit.where, limit.expected, show(limit.found), limit.because)
            served.setdefault(key, []).append(kernel)
    for (where, expected, got, because), kernels in served.items():
        *first, last = sorted(kernels)
        names = f"{', '.join(first)} and {last} kernels" if first else f"{last} kernel"
        reason = f": {because}" if because else ""
        yield where, f"must be {expected} for the {names} (got {got}){reason}"


def _default_packet(data: dict[str, Any]) -> Packet:
    """The packet of a spec that states none: with the score as wide as scores are."""
    wide = "noise" in data and "logits" in data and _has_wide_scores(data["noise"], data["logits"])
    return Packet(fields=(*(SCORE64_FIELDS if wide else SCORE_FIELDS), TOKEN_FIELD))


class ModelSpec(Table):
    """A model: everything its kernels are specialised for."""

    RULES = (
        _names,
        _vocabulary,
        _sampling_limit,
        _transform,
        _distinct("logits", "base_dtypes"),
        _distinct("logits", "cache_dtypes"),
        _distinct("parallel", "tp"),
        _distinct("emit", "kernels"),
        _distinct("emit", "archs"),
        _tp_order,
        _step_blocks,
        _provenance,
        _packet,
        _packet_needed,
        _kernels_exist,
        _kernels_needed,
        _kernels_serve,
    )

    format: Literal[1] = Field(description="Version of this format.")
    model: Model = Field(description="Name and title.")
    vocabulary: Vocabulary = Field(description="Token ids.")
    markov: Markov = Field(description="The Markov embedding and head.")
    draft: Draft = Field(description="Steps and rows of a draft.")
    logits: Logits = Field(description="Data types and output transform.")
    noise: Noise = Field(default=Noise(), description="Gumbel noise.")
    parallel: Parallel = Field(description="Tensor parallelism.")
    packet: Packet = Field(default_factory=_default_packet, description="Packets of the step kernels.")
    step: Step = Field(default=Step(), description="Launches of the step kernels.")
    emit: Emit = Field(description="Kernels and architectures to generate.")
    provenance: Provenance = Field(description="Source of the numbers.")

    @model_validator(mode="after")
    def _rules(self) -> Self:
        self.check_rules()
        return self


def read_spec(path: Path, *, shown: str | None = None) -> ModelSpec:
    """Read, check and freeze one spec file.

    Args:
        path: The file; its name without .toml is the model's name.
        shown: How errors name the file; default: relative to the working directory.

    Raises:
        InvalidFile: With every problem, each with file, line and column.
    """
    return parse_spec(read_document(path, shown=shown), stem=path.stem)


def parse_spec(document: Document, *, stem: str) -> ModelSpec:
    """Check a parsed file. `stem` is the model name that the file's name asks for.

    Raises:
        InvalidFile: With every problem.
    """
    number = document.data.get("format")
    if "format" in document.data and (type(number) is not int or number != FORMAT):
        later = type(number) is int and number > FORMAT
        expected = f"expected `format = {FORMAT}`, see docs/spec-reference.md"
        way = "update dsparkgen, which reads a later one" if later else expected
        message = f"must be {FORMAT}, the spec format of this dsparkgen (got {show(number)}); {way}"
        raise InvalidFile([document.problem(("format",), message)])
    problems: list[Problem] = []
    try:
        spec = validate(document, ModelSpec)
    except InvalidFile as error:
        problems += error.problems
    name = document.data.get("model", {})
    name = name.get("name") if isinstance(name, dict) else None
    if not re.fullmatch(NAME, stem):
        problems.append(Problem(document.file, 1, 1, "", f"the file's name must match {NAME} (got {show(stem)})"))
    elif isinstance(name, str) and name != stem and not any(problem.key == "model.name" for problem in problems):
        message = f"must equal the file's name, {show(stem)} (got {show(name)})"
        problems.append(document.problem(("model", "name"), message))
    if problems:
        raise InvalidFile(problems)
    return spec


def read_specs(folder: Path) -> dict[str, ModelSpec]:
    """Every spec of a folder, by model name in alphabetical order.

    Raises:
        InvalidFile: With the problems of all files.
    """
    specs: dict[str, ModelSpec] = {}
    problems: list[Problem] = []
    for path in sorted(folder.glob("*.toml")):
        try:
            specs[path.stem] = read_spec(path)
        except InvalidFile as error:
            problems += error.problems
    if problems:
        raise InvalidFile(problems)
    return specs
