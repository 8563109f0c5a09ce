"""A Hugging Face or speculators config.json of a DSpark draft -> a commented spec.

Read are the keys of vLLM 0.33.0's DSpark classes (`markov_rank`, or `dspark_markov_rank` where the draft is part of its
target's checkpoint) and of the speculators format (`speculators_model_type`, `transformer_layer_config`,
`speculators_config.proposal_methods`), at the top or nested. What a config leaves out is left out here too: the spec
names it under provenance.unknown, and where the key is required the spec reader says so.
"""

import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from dsparkgen.locate import InvalidFile, Problem, parse_document, show, show_path
from dsparkgen.schema import SCHEMA_FILE
from dsparkgen.spec import FORMAT, Arch, ModelSpec, Noise, parse_spec, read_spec
from dsparkgen.tree import SHIPPED, Roots, UsageError, require_spec

MAX_CONFIG_BYTES = 16 << 20  # quantised checkpoints list their layers in it; a larger file is a wrong file
WIDTH = 120
SECTIONS = ("", "dspark_config", "dflash_config", "eagle_config", "text_config", "transformer_layer_config")
RANK_KEYS = ("markov_rank", "dspark_markov_rank")
TRANSFORM_KEYS = ("logit_scale", "output_multiplier", "final_logit_softcapping", "output_soft_cap_temp")
CONFIDENCE_KEY = "enable_confidence_head"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # owner/name, and so no path of a machine
DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}

Family = Literal["qwen3", "kimi_k3", "gemma4", "muse_spark", "deepseek"]
FAMILIES: dict[str, Family] = {
    "Qwen3DSparkModel": "qwen3",
    "Qwen3OmniDSparkModel": "qwen3",
    "K3DSparkModel": "kimi_k3",
    "Gemma4DSparkModel": "gemma4",
    "MuseSparkDSparkModel": "muse_spark",
    "DSparkV41DraftModel": "deepseek",
}
"""Draft classes of vLLM 0.33.0 by architecture. They differ in which output transform they read and what it acts on."""


@dataclass(frozen=True)
class Found:
    """A value of a config.

    Attributes:
        value: The value, of the type asked for.
        path: Its dotted key.
        others: Other keys that state another value, each with it.
    """

    value: Any
    path: str
    others: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Config:
    """A config.json of a DSpark draft.

    Attributes:
        file: How errors name it.
        name: Its file name, as comments name it.
        text: The JSON text.
        data: The object.
    """

    file: str
    name: str
    text: str
    data: Mapping[str, Any]

    @property
    def is_speculators(self) -> bool:
        """Whether it is in the speculators format, whose defaults differ."""
        return "speculators_model_type" in self.data or "speculators_config" in self.data

    def find(self, kind: type, *keys: str, sections: tuple[str, ...] = SECTIONS) -> Found | None:
        """The first of `keys` that a section states; null counts as absent.

        Raises:
            InvalidFile: It has another type than `kind`.
        """
        found: list[tuple[str, Any]] = []
        for section in sections:
            table = self.data.get(section) if section else self.data
            if not isinstance(table, Mapping):
                continue
            for key in keys:
                if table.get(key) is not None:
                    path = f"{section}.{key}" if section else key
                    found.append((path, self.typed(table[key], kind, path)))
        if not found:
            return None
        (path, value), *others = found
        return Found(value, path, tuple(other for other in others if other[1] != value))

    def typed(self, value: Any, kind: type, path: str) -> Any:
        """The value if it has the type; an integer will do for a float.

        Raises:
            InvalidFile: It has not.
        """
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                pass
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
            raise self.refuse(f"expected {names[kind]} (got {_shown(value)})", path)
        return value

    def refuse(self, message: str, path: str = "") -> InvalidFile:
        """An error at a key, or about the file."""
        places = [match.start() for match in re.finditer(rf'"{re.escape(path.rpartition(".")[2])}"\s*:', self.text)]
        at = places[0] if path and len(places) == 1 else 0
        line, column = self.text.count("\n", 0, at) + 1, at - self.text.rfind("\n", 0, at)
        return InvalidFile([Problem(self.file, line, column, path, message)])


@dataclass(frozen=True)
class Entry:
    """One line of the spec.

    Attributes:
        value: Its value; None leaves the key out, and only the comment stands.
        comment: Where the value comes from.
        state: `known`, `unknown` (no source states it) or `unverified` (a related model's).
    """

    value: Any
    comment: str = ""
    state: Literal["known", "unknown", "unverified"] = "known"


def read_config(path: Path) -> Config:
    """Read the config of a DSpark draft.

    Raises:
        InvalidFile: Not readable, not JSON, not an object, or of another kind of model.
    """
    file = show_path(path)

    def refuse(message: str, line: int = 1, column: int = 1) -> InvalidFile:
        return InvalidFile([Problem(file, line, column, "", message)])

    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_CONFIG_BYTES + 1)
    except (OSError, ValueError) as error:
        raise refuse(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > MAX_CONFIG_BYTES:
        raise refuse(f"expected a config of at most {MAX_CONFIG_BYTES} bytes (got more)")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise refuse(f"expected UTF-8 text (got byte 0x{raw[error.start]:02x} at offset {error.start})", line) from None
    try:
        data = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        message = f"not valid JSON: {error.msg[:1].lower()}{error.msg[1:]}"
        raise refuse(message, error.lineno, error.colno) from None
    except RecursionError:
        raise refuse("not valid JSON: nested too deeply") from None
    except ValueError as error:  # NaN and the infinities, and Python's limit on the digits of an integer
        raise refuse(f"not usable: {error}") from None
    if not isinstance(data, dict):
        raise refuse(f"expected a JSON object, the config of a DSpark draft (got {_shown(data)})")
    config = Config(file, _printable(path.name), text, data)
    _require_draft(config)
    return config


def check_name(name: str) -> None:
    """Raise UsageError unless a model may have this name: the spec format decides."""
    text = f"format = {FORMAT}\n[model]\nname = {_toml(name)}\n"
    try:
        parse_spec(parse_document(text.encode(), ""), stem=name)
    except InvalidFile as error:
        wrong = [problem for problem in error.problems if problem.key == "model.name"]
        if wrong:
            raise UsageError(f"NAME: {wrong[0].message}") from None


def read_like(name: str, roots: Roots) -> ModelSpec:
    """The spec to take unset fields from; beside private specs, those of the root are known too.

    Raises:
        InvalidFile: It is invalid.
        UsageError: There is none.
    """
    paths: dict[str, Path] = {}
    for folder in (roots.templates.parent / "specs", roots.specs):
        paths |= {path.stem: path for path in sorted(folder.glob("*.toml"))}
    require_spec(name, dict.fromkeys(paths), roots)  # type: ignore[arg-type]
    return read_spec(paths[name])


def write_new(name: str, text: str, roots: Roots) -> Path:
    """Write a spec that does not exist yet.

    Raises:
        UsageError: It exists, or cannot be written.
    """
    path = roots.specs / f"{name}.toml"
    if roots.specs == SHIPPED / "specs":
        raise UsageError("specs of an installed package are not added to; give a folder by --specs, or --root")
    try:
        with path.open("x", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
    except FileExistsError:
        raise UsageError(f"{show_path(path)}: exists already and is left as it is") from None
    except OSError as error:
        raise UsageError(f"{show_path(path)}: cannot be written: {error.strerror or error}") from None
    return path


def spec_text(name: str, config: Config | None = None, like: ModelSpec | None = None) -> str:
    """A commented spec.

    Args:
        name: The model's name, as `check_name` lets it through.
        config: Where its numbers are. Default: nothing is known.
        like: A related model; what `config` does not state is taken from it and counts as unverified.

    Returns:
        TOML. It is a valid spec, or the reader's errors are at keys that the text marks or that today's kernels
        cannot serve.

    Raises:
        InvalidFile: A value of the config has another type than expected.
    """
    builder = _Builder(config, like)
    builder.model(name)
    builder.vocabulary()
    builder.markov()
    builder.draft()
    builder.logits()
    builder.transform()
    builder.choices()
    builder.provenance()
    return _text(builder.entries)


class _Builder:
    """Collects the spec's entries in the order of the file."""

    def __init__(self, config: Config | None, like: ModelSpec | None) -> None:
        self.config, self.like = config, like
        self.entries: dict[str, Entry] = {}
        self.missing = f"not in {config.name}" if config else "not stated"

    def find(self, kind: type, *keys: str, sections: tuple[str, ...] = SECTIONS) -> Found | None:
        return self.config.find(kind, *keys, sections=sections) if self.config else None

    def origin(self, found: Found) -> str:
        assert self.config is not None  # something was found in it
        others = "".join(f"; but {path} is {_shown(value)}" for path, value in found.others)
        return f"{self.config.name}: {found.path}{others}"

    def fact(self, key: str, found: Found | None, value: Any = None) -> None:
        """What the config states; else the related model's; else unknown."""
        if found is not None:
            self.entries[key] = Entry(found.value if value is None else value, self.origin(found))
        elif self.like is not None:
            self.entries[key] = Entry(self.of_like(key), f"as {self.like.model.name}; {self.missing}", "unverified")
        else:
            self.entries[key] = Entry(None, f"{self.missing}; expected: {_description(key)}", "unknown")

    def choice(self, key: str, value: Any, comment: str) -> None:
        """What no config states and whoever generates the kernels decides."""
        if self.like is not None:
            self.entries[key] = Entry(self.of_like(key), f"as {self.like.model.name}")
        else:
            self.entries[key] = Entry(value, comment)

    def of_like(self, key: str) -> Any:
        value: Any = self.like
        for part in key.split("."):
            value = getattr(value, part)
        return value

    def model(self, name: str) -> None:
        self.entries["model.name"] = Entry(name)
        self.entries["model.title"] = Entry(name, "the name for people")
        verifier = self.verifier()
        if verifier is not None:
            self.entries["model.description"] = Entry(f"DSpark draft for {verifier.value}.", self.origin(verifier))

    def verifier(self) -> Found | None:
        """The target model, where it is named as on the Hub."""
        path = "speculators_config.verifier.name_or_path"
        name = self.config and _inside(self.config.data, *path.split("."))
        return Found(name, path) if isinstance(name, str) and HUB_NAME.fullmatch(name) else None

    def vocabulary(self) -> None:
        sections = SECTIONS
        if self.config is not None and self.config.is_speculators:
            sections = ("transformer_layer_config", *SECTIONS[:-1])
        target, draft = self.find(int, "vocab_size", sections=sections), self.find(int, "draft_vocab_size")
        self.fact("vocabulary.target", target)
        rows = self.entries["vocabulary.target"].value
        if draft is not None:
            self.entries["vocabulary.draft"] = Entry(draft.value, self.origin(draft))
            if rows is None:
                comment = f"true if vocabulary.draft is the smaller one; expected: {_description('vocabulary.d2t')}"
                self.entries["vocabulary.d2t"] = Entry(None, comment, "unknown")
            elif draft.value < rows:
                comment = "the draft vocabulary is the smaller one: the checkpoint has a d2t tensor"
                self.entries["vocabulary.d2t"] = Entry(True, comment)
        elif target is None and self.like is not None:
            for key in ("draft", "d2t", "sampling_limit"):
                self.fact(f"vocabulary.{key}", None)
        elif target is not None:
            comment = f"draft: draft_vocab_size is {self.missing}, so the head covers the target vocabulary"
            self.entries["vocabulary.draft"] = Entry(None, comment)
        if self.config is not None and _family(self.config) == "muse_spark":
            comment = "vLLM 0.33.0's class for this architecture demands a d2t tensor whatever its size"
            self.entries["vocabulary.d2t"] = Entry(True, comment)

    def markov(self) -> None:
        self.fact("markov.rank_dim", self.find(int, *RANK_KEYS))
        head = self.find(str, "markov_head_type", "dspark_markov_head_type")
        if head is None and self.config is not None:
            comment = f"markov_head_type is {self.missing}: vanilla, the formats' default"
            self.entries["markov.head_type"] = Entry("vanilla", comment)
        else:
            self.fact("markov.head_type", head)
        dtype = self.find(str, "dtype", "torch_dtype")
        value = dtype and DTYPES.get(dtype.value.removeprefix("torch."), dtype.value)
        for key in ("markov.embed_dtype", "markov.head_dtype"):
            self.fact(key, dtype, value)
        head = self.fp32_head()
        if head is not None:
            comment = f"{self.origin(head)}; an fp32 head rounds nothing to bf16"
            self.entries["markov.bias_rounding"] = Entry("none", comment)
        else:
            self.choice("markov.bias_rounding", "bf16", "vLLM rounds the bias to the head's dtype")

    def fp32_head(self) -> Found | None:
        """The key that asks for products and logits in fp32."""
        found = self.find(str, "head_dtype")
        return found if found is not None and found.value.removeprefix("torch.") == "float32" else None

    def draft(self) -> None:
        anchor = self.find(bool, "sample_from_anchor")
        bonus = self.find(bool, "dspark_bonus_anchor")
        block = self.find(int, "block_size", "dspark_block_size")
        tokens = self.proposal() or self.find(int, "num_speculative_tokens")
        state: Literal["known", "unknown"] = "known"
        if anchor is not None:
            from_anchor, comment = anchor.value, self.origin(anchor)
        elif bonus is not None:
            from_anchor, comment = not bonus.value, f"{self.origin(bonus)}, its opposite"
        elif self.config is not None:
            from_anchor = not self.config.is_speculators
            format_ = "the speculators" if self.config.is_speculators else "its own"
            comment = f"{self.missing}: vLLM 0.33.0 then takes {_toml(from_anchor)} in {format_} format"
            if block and tokens and tokens.value != block.value - (not from_anchor):
                state = "unknown"
                comment += f"; but {block.path} is {block.value} and {tokens.path} {tokens.value}"
        if tokens is not None and block is not None:
            self.entries["draft.num_steps"] = Entry(tokens.value, f"{self.origin(tokens)}; a block is {block.value}")
        elif tokens is None and block is not None and not from_anchor:
            comment_ = f"{self.origin(block)}, less the anchor's row"
            self.entries["draft.num_steps"] = Entry(block.value - 1, comment_)
        else:
            self.fact("draft.num_steps", tokens or block)
        if self.config is not None:
            self.entries["draft.sample_from_anchor"] = Entry(from_anchor, comment, state)
        else:
            self.fact("draft.sample_from_anchor", None)
        candidates = self.find(int, "dspark_draft_topk")
        if candidates is not None:
            self.fact("draft.top_k", candidates)
        self.choice("draft.max_rows", 8, "request rows of one chain launch")

    def proposal(self) -> Found | None:
        """Draft tokens of the first proposal method, which is the one that vLLM takes."""
        methods = _inside(self.config.data, "speculators_config", "proposal_methods") if self.config else None
        if not isinstance(methods, list) or not methods or not isinstance(methods[0], dict):
            return None
        value, path = methods[0].get("speculative_tokens"), "speculators_config.proposal_methods[0].speculative_tokens"
        assert self.config is not None  # the methods stand in it
        return None if value is None else Found(self.config.typed(value, int, path), path)

    def logits(self) -> None:
        head = self.fp32_head()
        if head is not None:
            for key in ("logits.base_dtypes", "logits.cache_dtypes"):
                self.entries[key] = Entry(("fp32",), self.origin(head))
        else:
            self.choice("logits.base_dtypes", ("bf16", "fp32"), "the head's dtype; fp32 for engines that ask for it")
            self.choice("logits.cache_dtypes", ("bf16", "fp32"), "vLLM's cache has the head's dtype")

    def transform(self) -> None:
        stated = {key: found for key in TRANSFORM_KEYS if (found := self.find(float, key)) is not None}
        family = _family(self.config) if self.config else None
        where = "logits.transform"
        read = {
            "qwen3": ("both", "logit_scale", None),
            "kimi_k3": ("both", "logit_scale", None),
            "gemma4": ("both", None, "final_logit_softcapping"),
            "muse_spark": ("sum", "output_multiplier", "output_soft_cap_temp"),
            "deepseek": ("none", None, None),
        }
        if family is None:
            scale = stated.get("logit_scale") or stated.get("output_multiplier")
            cap = stated.get("final_logit_softcapping") or stated.get("output_soft_cap_temp")
            self.fact(f"{where}.placement", None)
            if (scale or cap) and self.entries[f"{where}.placement"].value == "none":  # a related model without either
                expected = f"{self.missing}; expected: {_description(f'{where}.placement')}"
                self.entries[f"{where}.placement"] = Entry(None, expected, "unknown")
            note = "; refused until placement says what it acts on"
            placed = self.entries[f"{where}.placement"].value not in (None, "none")
            if self.like is not None and not scale and not cap:
                for key, default in (("multiplier", 1.0), ("soft_cap", None), ("base_capped", False)):
                    if self.of_like(f"{where}.{key}") != default:
                        self.fact(f"{where}.{key}", None)
        else:
            placement, scale_key, cap_key = read[family]
            scale = self.width_multiplier() or (stated.pop(scale_key, None) if scale_key else None)
            cap = stated.pop(cap_key, None) if cap_key else None
            acts = (scale is not None and scale.value != 1.0) or cap is not None
            state: Literal["known", "unknown"] = "known"
            comment = "as vLLM 0.33.0's class for this architecture applies it"
            if not acts:
                comment = "vLLM 0.33.0's class for this architecture finds no factor or cap"
            unread = [found for key, found in stated.items() if not (family == "muse_spark" and key == scale_key)]
            if unread:
                state = "unknown"
                comment += "".join(f"; it does not read {found.path}, {found.value}" for found in unread)
            self.entries[f"{where}.placement"] = Entry(placement if acts else "none", comment, state)
            if acts and placement == "both":
                self.entries[f"{where}.base_capped"] = Entry(
                    True, "vLLM's LogitsProcessor has transformed the base logits"
                )
            note, placed = "", True
        if scale is not None and (scale.value != 1.0 or not placed):
            self.entries[f"{where}.multiplier"] = Entry(scale.value, self.origin(scale) + ("" if placed else note))
        if cap is not None:
            self.entries[f"{where}.soft_cap"] = Entry(cap.value, self.origin(cap) + ("" if placed else note))

    def width_multiplier(self) -> Found | None:
        """The output multiplier where a Muse config gives it as a ratio of widths."""
        table = self.config.data.get("metap") if self.config else None
        if not isinstance(table, dict) or not (table.get("use_metap") and table.get("router_has_one_inf_dim")):
            return None
        base = self.find(float, "base_width", sections=("metap",))
        width = self.find(float, "hidden_size")
        mode = self.find(str, "metap_mode", sections=("metap",))
        powers = {"mup": -1.0, "sp": -0.5}
        if not base or not width or not mode or base.value <= 0 or width.value <= 0 or mode.value not in powers:
            assert self.config is not None  # it has the table
            raise self.config.refuse('expected base_width, and metap_mode "mup" or "sp", beside hidden_size', "metap")
        power = powers[mode.value]
        return Found((width.value / base.value) ** power, f"(hidden_size / metap.base_width) ** {power}")

    def choices(self) -> None:
        noise = Noise()
        self.choice("noise.scheme", noise.scheme, "as the verifying engine draws: vLLM 0.33.0")
        self.choice(
            "noise.draft_salt", noise.draft_salt, "2^30, vLLM's; drafts and recovered tokens must not share noise"
        )
        self.choice("noise.step_mix", noise.step_mix, "vLLM 0.33.0 mixes the step into the seed")
        self.choice("parallel.tp", (1, 2, 4, 8), "tensor-parallel sizes to plan for")
        self.choice("parallel.exchange", "mailbox", "")
        if self.like is not None and self.like.packet.fields:
            self.choice("packet.words", None, "")
            self.choice("packet.fields", None, "")
        self.choice("emit.kernels", ("noise", "chain", "fused", "step"), "")
        self.choice("emit.archs", get_args(Arch), "")

    def provenance(self) -> None:
        if self.config is None:
            expected = f"expected: {_description('provenance.source')}"
            self.entries["provenance.source"] = Entry(None, expected, "unknown")
        else:
            address = self.config.data.get("_name_or_path")
            known = isinstance(address, str) and HUB_NAME.fullmatch(address)
            source = f"{self.config.name} of {address}" if known else self.config.name
            self.entries["provenance.source"] = Entry(source, "complete it: the public address and the revision")
        numbers = {key: entry for key, entry in self.entries.items() if not key.startswith("provenance.")}
        states = {state: [key for key, entry in numbers.items() if entry.state == state] for state in STATES}
        notes = []
        if states["unverified"] and self.like is not None:
            notes.append(f"What is unverified was taken from {self.like.model.name}.")
        confidence = self.find(bool, CONFIDENCE_KEY)
        if confidence is not None and confidence.value:
            notes.append(f"The config enables a confidence head ({confidence.path}); these kernels do not compute it.")
        if notes:
            self.entries["provenance.notes"] = Entry(" ".join(notes))
        for state, comment in STATES.items():
            if states[state]:
                self.entries[f"provenance.{state}"] = Entry(tuple(states[state]), comment)


STATES = {
    "unknown": "no source that was read states these; their values here are assumptions: take out what a public source states",
    "unverified": "a related model's values; take out what you checked",
}


def _require_draft(config: Config) -> None:
    """Refuse the config of another kind of model."""
    kind = config.data.get("speculators_model_type", "dspark")
    if kind != "dspark":
        raise config.refuse(f'expected "dspark" (got {_shown(kind)})', "speculators_model_type")
    rank = config.find(int, *RANK_KEYS)
    if rank is not None and rank.value == 0:
        raise config.refuse("expected a rank above 0 (got 0): this draft has no Markov head", rank.path)
    named = [kind for kind in _architectures(config) if "dspark" in kind.lower()]
    nested = config.data.get("text_config")
    named += [key for key in (*config.data, *(nested if isinstance(nested, dict) else ())) if key.startswith("dspark_")]
    if rank is None and not named and "speculators_model_type" not in config.data:
        model_type = _shown(config.data.get("model_type"))
        raise config.refuse(
            f"expected the config of a DSpark draft: {RANK_KEYS[0]}, a key dspark_*, an architecture with DSpark in its name, "
            f'or speculators_model_type "dspark" (got model_type {model_type}, '
            f"architectures {_shown(list(_architectures(config)))})"
        )


def _architectures(config: Config) -> tuple[str, ...]:
    listed = config.data.get("architectures")
    return tuple(item for item in listed if isinstance(item, str)) if isinstance(listed, list) else ()


def _family(config: Config) -> Family | None:
    """The vLLM class that serves a config; None where the config does not say."""
    for architecture in _architectures(config):
        if architecture in FAMILIES:
            return FAMILIES[architecture]
    model_type = config.data.get("model_type")
    if config.is_speculators or (model_type == "qwen3" and "DSparkDraftModel" in _architectures(config)):
        return "qwen3"
    if isinstance(model_type, str) and re.fullmatch(r"deepseek_v4\d?", model_type):
        return "deepseek"
    return None


def _inside(data: Any, *keys: str) -> Any:
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _description(key: str) -> str:
    """What the spec format says about a key, and the words that it may be."""
    model: Any = ModelSpec
    *tables, last = key.split(".")
    for table in tables:
        model = model.model_fields[table].annotation
    field = model.model_fields[last]
    words = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return f"{field.description} One of: {', '.join(map(_toml, words))}." if words else str(field.description)


def _text(entries: Mapping[str, Entry]) -> str:
    lines = [f"#:schema ./{SCHEMA_FILE}", f"format = {FORMAT}"]
    table = ""
    for key, entry in entries.items():
        head, _, last = key.rpartition(".")
        if head != table:
            table = head
            lines += ["", f"[{table}]"]
        lines += _lines(key, last, entry)
    return "\n".join(lines) + "\n"


def _lines(key: str, last: str, entry: Entry) -> list[str]:
    comment = _printable(entry.comment)
    if entry.value is None:
        label = "unknown: " if entry.state == "unknown" else ""
        above = [f"# {line}" for line in textwrap.wrap(label + comment, WIDTH - 2)] if comment else []
        return above + ([f"# {last} = ?"] if entry.state == "unknown" else [])
    if key == "noise.draft_salt":
        digits = f"{entry.value:08x}"
        line = f"{last} = 0x{digits[:4]}_{digits[4:]}"
    else:
        line = f"{last} = {_toml(entry.value)}"
    if isinstance(entry.value, tuple) and len(line) > WIDTH:
        line = "\n".join([f"{last} = [", *(f"  {_toml(item)}," for item in entry.value), "]"])
    if not comment:
        return [line]
    if "\n" not in line and len(line) + len(comment) + 4 <= WIDTH:
        return [f"{line}  # {comment}"]
    return [*(f"# {part}" for part in textwrap.wrap(comment, WIDTH - 2)), line]


def _toml(value: Any) -> str:
    """A value in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        text = value.encode("utf-8", "replace").decode("utf-8")
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_toml, value))}]"
    if hasattr(value, "model_dump"):
        pairs = ", ".join(f"{key} = {_toml(item)}" for key, item in value.model_dump().items())
        return f"{{ {pairs} }}"
    return repr(value)


def _shown(value: Any) -> str:
    """A JSON value, shortened."""
    if value is None:
        return "null"
    return show(tuple(value) if isinstance(value, list) else value)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _no_constant(name: str) -> float:
    raise ValueError(f"expected a finite number (got {name})")
