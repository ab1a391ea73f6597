"""/usr/lib/nvidia/sriov-manage: virtual functions by way of taking the GPU from its driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fakes.nvidia.gpus import DRIVER
from tests.fakes.programs import Said
from vfiomgr.errors import UsageError
from vfiomgr.paths import PCI_DEVICES
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.fakes.drivers import Drivers
    from tests.fakes.nvidia.gpus import Gpu, NvidiaGpus
    from tests.fakes.sriov import Sriov
    from tests.fakes.sysfs import Sysfs

_USAGE = """\
Usage:
    /usr/lib/nvidia/sriov-manage <-e|-d> <ssss:bb:dd.f|ALL>
"""


class SriovManage:
    """It unbinds, so all that the driver held of the GPU is lost: modes, GPU instances, types."""

    def __init__(
        self,
        sysfs: Sysfs,
        drivers: Drivers,
        sriov: Sriov,
        gpus: NvidiaGpus,
        is_used: Callable[[Gpu], bool],
    ) -> None:
        self._sysfs = sysfs
        self._drivers = drivers
        self._sriov = sriov
        self._gpus = gpus
        self._is_used = is_used

    def changes(self, arguments: Sequence[str]) -> bool:
        """All but the help."""
        return "-h" not in arguments

    def run(self, arguments: Sequence[str]) -> Said:
        """`-e` or `-d`, and an address or ALL."""
        if "-h" in arguments:
            return Said(0, _USAGE)
        if len(arguments) < 2 or arguments[0] not in ("-e", "-d"):
            return Said(1, error=_USAGE)
        act = self._enable if arguments[0] == "-e" else self._disable
        gpus = self._meant(arguments[1])
        if not gpus:
            return Said(1, error=f"{arguments[1]}: no GPU with virtual functions\n")
        said = [act(gpu) for gpu in gpus]
        return Said(
            max(one.code for one in said),
            "".join(one.output for one in said),
            "".join(one.error for one in said),
        )

    def _meant(self, text: str) -> list[Gpu]:
        able = [gpu for gpu in self._gpus.known.values() if gpu.total_vfs]
        if text.lower() == "all":
            return able
        try:
            address = str(PciAddress.parse(text))
        except UsageError:
            return []
        return [gpu for gpu in able if gpu.address == address]

    def _number(self, gpu: Gpu) -> int:
        return int(self._sysfs.get(PCI_DEVICES / gpu.address / "sriov_numvfs") or "0")

    def _enable(self, gpu: Gpu) -> Said:
        if self._number(gpu):
            return Said(0, f"GPU at {gpu.address} already has VFs enabled.\n")
        return self._cycle(gpu, f"Enabling VFs on {gpu.address}\n", gpu.total_vfs)

    def _disable(self, gpu: Gpu) -> Said:
        if not self._number(gpu):
            return Said(0, f"GPU at {gpu.address} already has VFs disabled.\n")
        return self._cycle(gpu, f"Disabling VFs on {gpu.address}\n", 0)

    def _cycle(self, gpu: Gpu, output: str, number: int) -> Said:
        """Unbind, which takes the functions away, make others, bind; the error of a bind stays.

        With the unbindLock persistence mode keeps the GPU no longer.
        """
        if self._drivers.driver_of(gpu.address) == DRIVER:
            if self._is_used(gpu):
                return Said(1, output, f"Cannot obtain unbindLock for {gpu.address}\n")
            self._gpus.memory.set_persistent(gpu.address, is_on=False)
        self._drivers.detach(gpu.address)
        directory = PCI_DEVICES / gpu.address
        made = self._sriov.make(directory, number) if number else []
        try:
            for address in (gpu.address, *made):
                self._drivers.bind(DRIVER, address)
            self._gpus.memory.set_persistent(gpu.address, is_on=True)  # nvidia-smi -pm 1
        except OSError as error:
            return Said(1, output, f"sriov-manage: line 100: echo: write error: {error.strerror}\n")
        return Said(0, output)
