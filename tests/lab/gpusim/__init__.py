"""A GPU that makes vGPUs, in a guest of the topology `sriov` (see README.md).

    gpusim.load(family="mdev", wedge=0)
    first, second = gpusim.enable(2)
    ...
    gpusim.unload()

While it is loaded, the topology's NVMe controller is the GPU. nvme is unloaded and kept out, so
that neither udev nor a probe gives it a function that has no driver.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tests.lab.topology import current
from vfiomgr.host.tree import HostTree
from vfiomgr.host.udev import reload_rules

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULE_VARIABLE = "VFIOMGR_LAB_GPUSIM"  # set in a guest: the module's file
SRIOV_MANAGE = Path("/usr/lib/nvidia/sriov-manage")
NVIDIA_SMI = Path("/usr/bin/nvidia-smi")
_HERE = Path(__file__).parent
_KEPT_OUT = Path("/etc/modprobe.d/gpusim.conf")  # Debian 12's udev heeds none below /run
_DEVICES = Path("/sys/bus/pci/devices")
_NEEDED = ("vfio-pci-core", "mdev", "vfio_iommu_type1")
_DEADLINE = 30.0
"""Seconds for nvme to take its controller back: it probes in the background."""
_SHOWN = 4000
"""How much is shown of the kernel's messages where it does not."""


def load(*, family: Literal["mdev", "vendor"], **parameters: str | int) -> None:
    """Have the GPU, without virtual functions, in place of nvme or of a GPU loaded before.

    The parameters are those of the module; it forgets those of before.
    """
    if _is_loaded():
        _remove()
    else:
        _keep_nvme_out()
        _run("modprobe", "--all", *_NEEDED)
    options = [f"{name}={value}" for name, value in parameters.items()]
    _run("insmod", os.environ[MODULE_VARIABLE], f"family={family}", *options)
    assert driver(gpu()) == "nvidia"


def unload() -> None:
    """Give the controller back to nvme; where the GPU is not loaded, do nothing."""
    if not _KEPT_OUT.exists():
        return
    if _is_loaded():
        _remove()
    _KEPT_OUT.unlink()
    reload_rules(HostTree("/"), _DEADLINE)
    _run("modprobe", "nvme")
    if driver(gpu()) is None:  # loaded by another event, nvme does not look for functions again
        write(Path("/sys/bus/pci/drivers_probe"), gpu())
    deadline = time.monotonic() + _DEADLINE
    while driver(gpu()) != "nvme":
        assert time.monotonic() < deadline, _run("dmesg")[-_SHOWN:]
        time.sleep(0.1)


def enable(count: int | None = None) -> tuple[str, ...]:
    """Make virtual functions, all where no number is given; return their addresses."""
    if count is None:
        count = int((_DEVICES / gpu() / "sriov_totalvfs").read_text())
    _set_functions(count)
    return virtual_functions()


def disable() -> None:
    """Remove all virtual functions; waits for those that guests have."""
    _set_functions(0)


def gpu() -> str:
    """Return the address of the GPU."""
    topology = current()
    assert topology is not None
    return topology.addresses["nvme"]


def virtual_functions() -> tuple[str, ...]:
    """Return the addresses of the GPU's virtual functions, by their number."""
    links = (_DEVICES / gpu()).glob("virtfn*")
    by_number = sorted(links, key=lambda link: int(link.name.removeprefix("virtfn")))
    return tuple(link.resolve().name for link in by_number)


def write(attribute: Path, text: str) -> None:
    """Write an attribute once; `Path.write_text` repeats a failed write as it closes the file."""
    with attribute.open("wb", buffering=0) as file:
        file.write(text.encode())


def driver(address: str) -> str | None:
    """Return the driver of a function."""
    link = _DEVICES / address / "driver"
    return link.resolve().name if link.exists() else None


def install_tools() -> None:
    """Put the stand-ins for NVIDIA's programs where a host has them."""
    for place in _tools():
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(_HERE / place.name, place)
        place.chmod(0o755)


def remove_tools() -> None:
    """Take the stand-ins away."""
    for place in _tools():
        place.unlink(missing_ok=True)


def _tools() -> Iterator[Path]:
    """Yield their places; never on the machine itself."""
    assert current() is not None
    yield from (SRIOV_MANAGE, NVIDIA_SMI)


def _is_loaded() -> bool:
    return Path("/sys/module/gpusim").exists()


def _remove() -> None:
    disable()
    _run("rmmod", "gpusim")


def _keep_nvme_out() -> None:
    """Unload nvme, and let no device load it again."""
    assert current() is not None
    _KEPT_OUT.parent.mkdir(exist_ok=True)
    _KEPT_OUT.write_text("blacklist nvme\n")
    reload_rules(HostTree("/"), _DEADLINE)
    _run("udevadm", "settle")  # a worker that began before the reload would load it again
    _run("modprobe", "--remove", "nvme")


def _set_functions(count: int) -> None:
    """Write the number as sriov-manage does."""
    directory = _DEVICES / gpu()
    autoprobe = (directory / "sriov_drivers_autoprobe").read_text()
    assert autoprobe == "1\n", "another test left it so that no driver takes new functions"
    write(directory / "gpusim/unlock", "1")
    write(directory / "sriov_numvfs", str(count))


def _run(*command: str) -> str:
    """Run a program of the guest, and return what it said; AssertionError where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command)}: {said}"
    return said
