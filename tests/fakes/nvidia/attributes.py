"""The attributes of one vGPU below `nvidia`: of a mediated device, or of a virtual function."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from tests.fakes.mdevs import UUID
from tests.fakes.nvidia.rules import Seat
from tests.fakes.sysfs import READ_ONLY, READ_WRITE, UNASSIGNED, Sysfs, reject, unsigned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fakes.mdevs import Extra
    from tests.fakes.nvidia.gpus import Gpu, NvidiaGpus
    from tests.fakes.vfio import Vfio
    from vfiomgr.paths import HostPath

_LONGEST_PARAMS = 1024
_NONE = "Not Applicable"


def shown(seat: Seat | None) -> Iterator[Extra]:
    """What they say of a vGPU that has just been made; without one they cannot be read."""
    if seat is None:
        yield "nvidia/vgpu_params", "", READ_WRITE | UNASSIGNED
        yield "nvidia/placement_id", "", READ_WRITE | UNASSIGNED
        yield "nvidia/gpu_instance_id", "", READ_ONLY | UNASSIGNED
        return
    yield "nvidia/vgpu_params", "", READ_WRITE
    placement = _NONE if seat.placement is None else str(seat.placement)
    yield "nvidia/placement_id", placement, READ_WRITE
    if seat.instance is None:
        yield "nvidia/gpu_instance_id", "", READ_ONLY | UNASSIGNED
    else:
        yield "nvidia/gpu_instance_id", str(seat.instance), READ_ONLY


class NvidiaAttributes:
    """Their stores, each with the directory of the mediated device or virtual function."""

    def __init__(self, sysfs: Sysfs, gpus: NvidiaGpus, vfio: Vfio) -> None:
        self._sysfs = sysfs
        self._gpus = gpus
        self._vfio = vfio

    def set_params(self, directory: HostPath, text: str) -> None:
        r"""vgpu_params_store: replaces all, and keeps all bytes of a write but the last.

        That one is taken for a newline (snprintf with the count of the write): `a=1` without one
        becomes `a=`. Nothing is parsed before the guest starts.

        Raises:
            OSError: ENXIO without a vGPU, E2BIG for more than 1024 bytes, EPERM while it is open.

        """
        self._seat(directory)
        if len(text) > _LONGEST_PARAMS:
            reject(errno.E2BIG)
        if self._vfio.is_open(directory):
            reject(errno.EPERM)
        self._sysfs.put(directory / "nvidia/vgpu_params", text[:-1])

    def set_placement(self, directory: HostPath, text: str) -> None:
        """Move a vGPU of a heterogeneous GPU before it is used.

        Raises:
            OSError: ENXIO without a vGPU, EPERM without heterogeneous mode or while it is open,
                EINVAL for a place that its type has not, or that another has taken.

        """
        gpu, seat = self._seat(directory)
        placement = unsigned(text, bits=32)
        if not self._gpus.memory.modes(gpu.address).is_heterogeneous:
            reject(errno.EPERM)
        if self._vfio.is_open(directory):
            reject(errno.EPERM)
        wanted = Seat(seat.kind, placement=placement)
        if not self._gpus.rules(gpu, besides=directory.name).can_sit(wanted):
            reject(errno.EINVAL)
        self._gpus.seat(gpu, directory.name, wanted)
        self._sysfs.put(directory / "nvidia/placement_id", str(placement))
        self._gpus.changed(gpu)

    def _seat(self, directory: HostPath) -> tuple[Gpu, Seat]:
        function = directory.parent if UUID.fullmatch(directory.name) else directory
        gpu = self._gpus.of(function.name)
        seat = self._gpus.vgpus(gpu).get(directory.name) if gpu else None
        if gpu is None or seat is None:
            reject(errno.ENXIO)
        return gpu, seat
