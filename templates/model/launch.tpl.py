"""Samplers of draft tokens for {{ spec.model.title }}.

# % if "chain" in spec.emit.kernels
ChainSampler draws all {{ spec.draft.num_steps }} positions of up to {{ spec.draft.max_rows }} request rows by the noise kernel and one cooperative launch.
# % endif
# % if "step" in spec.emit.kernels
StepSampler runs the engine's loop with one kernel behind each position's product, for any row count.
# % endif
DraftSampler draws each batch by the first that takes it; the fused loop takes any row count, on a CPU too.
Shapes: base logits [rows, {{ spec.draft.num_steps }}, {{ spec.vocabulary.draft }}], logits cache [max_reqs, {{ spec.draft.num_steps }}, >= {{ spec.vocabulary.target }}],
draft tokens [rows, {{ spec.draft.num_steps }}].
"""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

from .._device import chain_emulated, chain_launcher, draft_launcher, host, rank_group
from . import config
from .fused import FusedLoop

# % if "noise" in spec.emit.kernels
from . import noise  # isort: skip
# % endif

ChainError = host.ChainError
ChainTimeoutError = host.ChainTimeoutError
Declined = rank_group.Declined
RanksDifferError = host.RanksDifferError
VocabParallelHead = draft_launcher.VocabParallelHead


# % if "chain" in spec.emit.kernels
def _load_chain() -> ModuleType:
    """Import the chain kernel, and CuTe DSL with it: only once a sampler is built."""
    from . import chain

    return chain


class ChainSampler(chain_launcher.ChainLauncher):
    """The chain kernel of {{ spec.model.title }}, on one GPU or on one a rank; documented in ChainLauncher."""

    config: ClassVar[ModuleType] = config
    noise: ClassVar[ModuleType | None] = {{ "noise" if "noise" in spec.emit.kernels else None }}
    load_chain = staticmethod(_load_chain)


class EmulatedChainSampler(chain_emulated.EmulatedChainLauncher):
    """The chain kernel of {{ spec.model.title }} for several ranks on one GPU; documented in EmulatedChainLauncher."""

    config: ClassVar[ModuleType] = config
    noise: ClassVar[ModuleType | None] = {{ "noise" if "noise" in spec.emit.kernels else None }}
    load_chain = staticmethod(_load_chain)


# % endif
# % if "step" in spec.emit.kernels
def _load_step() -> ModuleType:
    """Import the step kernels, and CuTe DSL with them: only once a sampler is built."""
    from . import step

    return step


class StepSampler(draft_launcher.StepLauncher):
    """The engine's loop with the step kernels of {{ spec.model.title }}, any number of rows; documented in StepLauncher."""

    config: ClassVar[ModuleType] = config
    load_step = staticmethod(_load_step)


# % endif
class DraftSampler(draft_launcher.DraftLauncher):
    """The samplers of {{ spec.model.title }} as one: the first that takes a batch draws it; documented in DraftLauncher."""

    config: ClassVar[ModuleType] = config
    chain_sampler = {{ "ChainSampler" if "chain" in spec.emit.kernels else None }}
    step_sampler = {{ "StepSampler" if "step" in spec.emit.kernels else None }}
    fused_loop = FusedLoop
