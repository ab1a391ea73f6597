"""URIs of libvirts: `DRIVER[+TRANSPORT]://[HOST]/PATH` (https://libvirt.org/uri.html)."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from vfiomgr.errors import UsageError

_DRIVERS = frozenset(
    {
        "bhyve",
        "ch",
        "esx",
        "gsx",
        "hyperv",
        "interface",
        "libxl",
        "lxc",
        "network",
        "nodedev",
        "nwfilter",
        "openvz",
        "parallels",
        "phyp",
        "qemu",
        "secret",
        "storage",
        "test",
        "uml",
        "vbox",
        "vmwarefusion",
        "vmwareplayer",
        "vmwarews",
        "vpx",
        "vz",
        "xen",
    }
)
"""Those of all releases (src/*/*_driver.c); one that a host lacks its daemon names itself."""
_REMEDY = "--connect takes URIs like qemu:///system: https://libvirt.org/uri.html"


def split_uri(uri: str) -> SplitResult:
    """The parts of a URI; of an alias from libvirt.conf the path alone.

    Raises:
        UsageError: it is none, or no libvirt has a driver of its name.

    """
    try:
        parts = urlsplit(uri)
        _ = parts.port
    except ValueError as error:
        message = f"--connect {uri} is no URI: {error}"
        raise UsageError(message, _REMEDY) from None
    driver = parts.scheme.partition("+")[0]
    if driver and driver not in _DRIVERS:
        message = f"libvirt has no driver {driver!r}, which the URI {uri} asks for"
        raise UsageError(message, _REMEDY)
    return parts
