"""Stands for a compiled kernel on a GPU: what a launcher gives it is checked and handed to a function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from dspark_kernels._device.kernel_store import Recipe


class FakeKernel:
    """A kernel that `run` plays, with its arguments by name and the stream.

    Args:
        run: called for each launch.
        names: its arguments, all of which a launch must give.
        narrow: those that are int32; all others are int64.
        facts: what the kernel's description tells its host.
    """

    def __init__(
        self,
        run: Callable[[dict[str, int], int], None],
        names: Sequence[str],
        narrow: Collection[str],
        facts: Mapping[str, int] | None = None,
    ) -> None:
        self._run, self._names, self._narrow = run, names, narrow
        self.image: Any = SimpleNamespace(description=SimpleNamespace(facts=facts or {}))
        self.residents = 1  # CTAs on an SM, as the driver would say

    def launch(self, arguments: Mapping[str, int], stream: int) -> None:
        """Play one launch."""
        given = {name: arguments[name] for name in self._names}
        for name, value in given.items():
            bits = 31 if name in self._narrow else 63
            assert isinstance(value, int) and -(2**bits) <= value < 2**bits, (name, value)
        self._run(given, stream)

    def blocks_per_sm(self) -> int:
        """What a launcher asks before it relies on residency."""
        return self.residents


def provide(recipe: Recipe, device: Any) -> Any:
    """A launcher's `provide` for kernel modules whose compile functions return a FakeKernel: no pack, no cache."""
    return recipe.compile("", "")
