from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes.hosts import workstation

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    """The workstation with vfio-pci loaded."""
    return workstation(tmp_path, vfio_loaded=True)
