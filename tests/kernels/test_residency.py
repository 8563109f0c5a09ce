"""The chain kernel at every residency, planned and forced, on this machine's GPU: one build a worker process at a time."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("triton")


def test_every_build_of_the_cover_equals_the_oracle_to_the_bit(cuda: Any) -> None:
    from tests.harness import residency

    from dsparkgen.device import load_devices
    from dsparkgen.gpu import CannotTell

    devices = load_devices(residency.ROOT)
    try:
        device = devices[residency.local_device(devices)]
    except CannotTell as error:
        pytest.skip(str(error))
    builds = residency.numbered_cover(device)
    results = residency.run(builds, jobs=os.cpu_count() or 1)
    assert [result.number for result in results] == list(builds)
    failed = [str(result) for result in results if result.failure]
    assert not failed, "\n".join(failed)
