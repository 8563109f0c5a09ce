"""Samplers of draft tokens for {{ spec.model.title }}.

ChainSampler draws all {{ spec.draft.num_steps }} positions of up to {{ spec.draft.max_rows }} request rows by the noise kernel and one cooperative launch.
DraftSampler takes it where it fits, and the fused loop (one launch a position, any row count, CPU too) elsewhere.
Shapes: base logits [rows, {{ spec.draft.num_steps }}, {{ spec.vocabulary.draft }}], logits cache [max_reqs, {{ spec.draft.num_steps }}, >= {{ spec.vocabulary.target }}],
draft tokens [rows, {{ spec.draft.num_steps }}].
"""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

from .._device import chain_launcher, draft_launcher, host
from . import config, noise
from .fused import FusedLoop

__all__ = ["ChainSampler", "ChainTimeoutError", "DraftSampler"]

ChainTimeoutError = host.ChainTimeoutError


def _load_chain() -> ModuleType:
    """Import the chain kernel, and CuTe DSL with it: only once a sampler is built."""
    from . import chain

    return chain


class ChainSampler(chain_launcher.ChainLauncher):
    """The chain kernel of {{ spec.model.title }} on one GPU; arguments and errors as documented in ChainLauncher."""

    config: ClassVar[ModuleType] = config
    noise: ClassVar[ModuleType] = noise
    load_chain = staticmethod(_load_chain)


class DraftSampler(draft_launcher.DraftLauncher):
    """Chain or fused loop of {{ spec.model.title }}, whichever a batch fits; documented in DraftLauncher."""

    config: ClassVar[ModuleType] = config
    chain_sampler: ClassVar[type[chain_launcher.ChainLauncher]] = ChainSampler
    fused_loop = FusedLoop
