"""What a desktop guest has besides its GPU: Looking Glass, evdev input, sound and USB devices."""

from __future__ import annotations

from typing import Literal

from vfiomgr.pci.memory import power_of_two
from vfiomgr.units import MIB
from vfiomgr.value import Value

KVMFR = "/dev/kvmfr0"
"""The node of Looking Glass's kernel module, which lets GPUs of the host read the frames."""
SHARED = "/dev/shm"  # noqa: S108 - libvirt has it there
"""Where the files of shared memory are (qemuBuildShmemBackendMemProps)."""
BY_ID = "/dev/input/by-id/"
"""Names of input devices that a restart does not change."""
AudioKind = Literal["spice", "pipewire", "pulseaudio", "none"]
GRABS = ("ctrl-ctrl", "alt-alt", "shift-shift", "meta-meta", "scrolllock", "ctrl-scrolllock")
"""The keys that switch between host and guest (domaincommon.rng: grabToggle)."""

_ALIGNED = 256
_IN_DRIVER, _DRIVER_BYTES = 3, 4 * MIB
_IN_APPLICATION, _APPLICATION_BYTES = 2, 10 * MIB
_PIXEL, _HDR_PIXEL = 4, 8


class LookingGlass(Value):
    """Looking Glass: the guest copies its frames into memory that a client of the host shows."""

    width: int
    """The largest width of the guest's screen, in pixels."""
    height: int
    """Its height."""
    is_kvmfr: bool = False
    """Whether the memory is that of the kernel module, and not a file in /dev/shm."""
    has_hdr: bool = False
    """Whether the guest shows HDR with the host application, whose pixels then have 8 bytes."""

    @property
    def size_bytes(self) -> int:
        """The memory for both ways to capture: the display driver and the host application.

        The driver (IDD) has three frames with lines of multiples of 256 bytes and 4 MiB; the
        application two frames and 10 MiB (install_libvirt.rst of Looking Glass). The size of the
        memory is that of a PCI BAR, a power of two.
        """
        line = -(-self.width * _PIXEL // _ALIGNED) * _ALIGNED
        of_driver = line * self.height * _IN_DRIVER + _DRIVER_BYTES
        pixel = _HDR_PIXEL if self.has_hdr else _PIXEL
        of_application = self.width * self.height * pixel * _IN_APPLICATION + _APPLICATION_BYTES
        return power_of_two(max(of_driver, of_application))

    @property
    def size_mib(self) -> int:
        """The memory in MiB."""
        return self.size_bytes // MIB


LOOKING_GLASS = "looking-glass"
"""The name of its shared memory, which its client opens by default."""


class EvdevInput(Value):
    """A keyboard or mouse of the host, whose events QEMU reads."""

    path: str
    """The node of the event device, below /dev/input."""
    is_keyboard: bool
    """Whether its keys switch all of them between host and guest."""
    toggle: str = GRABS[0]
    """The keys that switch."""


class GuestAudio(Value):
    """Where the sound of the guest goes."""

    kind: AudioKind
    """How it is played; `none` for a guest without a sound card."""
    user: int | None = None
    """The user whose sound server it is; None for SPICE."""

    @property
    def runtime_directory(self) -> str:
        """The directory with the socket of the user's sound server."""
        return f"/run/user/{self.user}"


class UsbDevice(Value):
    """A USB device of the host by its IDs; the first that is found."""

    vendor: str
    """Its vendor ID, four hexadecimal digits."""
    product: str
    """Its product ID."""


class SharedMemory(Value):
    """`<shmem>` of a domain: memory that the guest and programs of the host share."""

    line: int
    name: str
    model: str
    size_bytes: int | None
    """None if the XML has no size: QEMU then uses 4 MiB, or the size that a server sets."""

    @property
    def path(self) -> str:
        """The file that QEMU opens or creates."""
        return f"{SHARED}/{self.name}"


class DomainAudio(Value):
    """`<audio>` of a domain."""

    line: int
    kind: str
    directory: str | None = None
    """The directory with the socket of a sound server, if it is written."""


class DomainScreen(Value):
    """Screen, input and sound of a domain."""

    inputs: tuple[tuple[int, str], ...] = ()
    """Lines and nodes of `<input type='evdev'>`."""
    audios: tuple[DomainAudio, ...] = ()
    videos: tuple[tuple[int, str], ...] = ()
    """Lines and models of `<video>`."""
    has_balloon: bool = False
    """Whether it has a memory balloon, which libvirt adds where none is written."""
