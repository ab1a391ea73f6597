"""The main job, shown in a guest of the laboratory: `make demo`.

Each command is shown before its output; the demonstration ends at the first failure.
"""

from __future__ import annotations

import shlex
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab import libvirtd, nested
from tests.lab.topology import Topology, current

if TYPE_CHECKING:
    import subprocess

VGPU_PARENT = "mbochs"
VGPU_TYPE = "mbochs-medium"
BEGIN = time.monotonic()


class Surprise(Exception):
    """Something was not as expected."""

    def __init__(self, what: str) -> None:
        super().__init__(what)


def main() -> int:
    """Show it; 0 if all was as expected."""
    topology = current()
    if topology is None:
        print("this runs in a guest of the laboratory: make demo", file=sys.stderr)
        return 2
    try:
        with ThreadPoolExecutor() as beside:
            _tell(topology, beside.submit(_start_libvirt))
    except Surprise as surprise:
        print(f"\n### Failed: {surprise}")
        return 1
    print(f"\n### Done in {time.monotonic() - BEGIN:.0f} seconds.")
    return 0


def _start_libvirt() -> bool:
    """Start libvirtd beside the first chapters, and let it look at QEMU once: both take a while."""
    libvirtd.start()
    return _call("virsh domcapabilities --machine q35 --virttype qemu").returncode == 0


def _tell(topology: Topology, libvirt: Future[bool]) -> None:
    gpu, audio = topology.addresses["gpu"], topology.addresses["gpu_audio"]

    _chapter("The host. Its second display adapter stands for a GPU")
    first_list = _run("vfiomgr list")
    before = _states(gpu, audio)

    _chapter("Bind the GPU to vfio-pci, with its audio function")
    _run(f"vfiomgr bind {gpu}")
    _expect(_drivers(gpu, audio) == ["vfio-pci", "vfio-pci"], "a function is not on vfio-pci")

    _chapter("Start a libvirt guest with the GPU")
    elements = _run(f"vfiomgr libvirt hostdev {gpu}")
    _expect(libvirt.result(), "libvirtd does not answer")
    _start_domain(elements)
    _expect_in_guest({"pair": 1}, "GPU and audio function in one slot")

    _chapter("The kernel would wait for the guest, so unbind is refused")
    _run(f"vfiomgr unbind {gpu}", status=4)

    _chapter("The configuration of Kata Containers for the same GPU")
    _run("vfiomgr kata config")

    _chapter("Create a vGPU, and start the guest with both")
    _run("virsh destroy guest")
    uuid = _run(f"vfiomgr vgpu create --parent {VGPU_PARENT} --type {VGPU_TYPE}").strip()
    _start_domain(elements + _run(f"vfiomgr libvirt hostdev {uuid}"))
    _expect_in_guest({"pair": 1, "lone": 1}, "GPU, audio function and vGPU")

    _chapter("Return everything to the host")
    _run("virsh destroy guest")
    _run("virsh undefine guest")
    _run(f"vfiomgr vgpu remove {uuid}")
    _run(f"vfiomgr unbind {gpu}")
    _expect(_states(gpu, audio) == before, f"{gpu} or {audio} is not as it was")
    _expect(_run("vfiomgr list") == first_list, "the list is not the first one")
    for address, (driver, override) in before.items():
        print(f"{address}: driver {driver}, driver_override {override}, as before")


def _start_domain(elements: str) -> None:
    """Define the domain with the devices of vfiomgr, validated, and start it."""
    _run(f"virsh define {nested.write_domain(elements)} --validate")
    _run("virsh start guest")


def _expect_in_guest(expected: dict[str, int], what: str) -> None:
    """Wait until QEMU lists the devices of the guest."""
    _expect(nested.await_displays(expected), f"the guest does not have this: {what}")
    print(f"\nThe guest has: {what}", flush=True)


def _states(*addresses: str) -> dict[str, tuple[str, str]]:
    """Driver and driver_override by address, as the kernel tells them."""
    found = {}
    for address in addresses:
        device = Path("/sys/bus/pci/devices", address)
        override = (device / "driver_override").read_text().strip()
        found[address] = ((device / "driver").resolve().name, override)
    return found


def _drivers(*addresses: str) -> list[str]:
    return [driver for driver, _ in _states(*addresses).values()]


def _chapter(title: str) -> None:
    print(f"\n### {title}  [{time.monotonic() - BEGIN:.0f} s]", flush=True)


def _run(line: str, status: int = 0) -> str:
    """Show a command, run it, show its output; its standard output is returned."""
    print(f"\n$ {line}", flush=True)
    result = _call(line)
    print((result.stdout + result.stderr).rstrip(), flush=True)
    _expect(result.returncode == status, f"{line} exited with {result.returncode}, not {status}")
    return result.stdout


def _call(line: str) -> subprocess.CompletedProcess[str]:
    program, *arguments = shlex.split(line)
    return nested.call(_program(program), *arguments)


def _program(name: str) -> str:
    """A program of this virtual environment, or from PATH."""
    ours = Path(sys.executable).with_name(name)
    return str(ours) if ours.exists() else name


def _expect(condition: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not condition:
        raise Surprise(otherwise)


if __name__ == "__main__":
    sys.exit(main())
