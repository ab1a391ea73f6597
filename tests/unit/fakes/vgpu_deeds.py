"""What the tests of the fake kernel do to parents of mediated devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.errors import WriteFailed
from vfiomgr.paths import MDEV_DEVICES, MDEV_PARENTS, HostPath

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel


def uuid(number: int) -> str:
    """The `number`-th UUID."""
    return f"b4a12a62-1111-4c5e-8a5e-{number:012d}"


def types(parent: str) -> HostPath:
    """The directory of a parent's types."""
    return MDEV_PARENTS / parent / "mdev_supported_types"


def written(kernel: FakeKernel, path: HostPath, text: str) -> int:
    """The errno of a write; 0 where it succeeds."""
    try:
        kernel.write(path, text)
    except WriteFailed as error:
        return error.errno
    return 0


def create(kernel: FakeKernel, parent: str, type_id: str, text: str) -> int:
    """The errno of creating an instance; 0 where it succeeds."""
    return written(kernel, types(parent) / type_id / "create", text)


def remove(kernel: FakeKernel, text: str) -> int:
    """The errno of removing an instance; 0 where it succeeds."""
    return written(kernel, MDEV_DEVICES / text / "remove", "1")


def available(kernel: FakeKernel, parent: str) -> dict[str, int]:
    """How many more of each type there can be."""
    names = kernel.children(types(parent))
    return {
        name: int(kernel.read(types(parent) / name / "available_instances") or -1) for name in names
    }
