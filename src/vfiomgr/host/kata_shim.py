"""Which of Kata's shims and configurations a handler can name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.model.kata import RuntimeName, handler_configuration
from vfiomgr.model.path import HostPath

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.host.tree import HostTree

_SHIM = "containerd-shim-kata-v2"
SHIMS: dict[RuntimeName, tuple[HostPath, ...]] = {
    "go": tuple(HostPath(f"{d}/{_SHIM}") for d in ("/opt/kata/bin", "/usr/bin", "/usr/local/bin")),
    "rs": (HostPath(f"/opt/kata/runtime-rs/bin/{_SHIM}"),),
}
"""Where Kata's own builds and the packages of distributions put them."""
_VERSION = HostPath("/opt/kata/VERSION")
_DEFAULTS = HostPath("/opt/kata/share/defaults/kata-containers")
_WITH_GPUS = (
    _DEFAULTS / "runtime-rs/configuration-qemu-nvidia-gpu-runtime-rs.toml",
    _DEFAULTS / "configuration-qemu-nvidia-gpu.toml",
)
"""Those that Kata ships and that plug devices."""
_OF_RS = re.compile(r"^\s*(dial_timeout_ms|reconnect_timeout_ms)\s*=|runtime-rs", re.MULTILINE)
_OF_GO = re.compile(r"^\s*dial_timeout\s*=", re.MULTILINE)
_RS_IS_DEFAULT = 4


def find_configuration(tree: HostTree, handler: str) -> HostPath | None:
    """The configuration of a handler's own, or else one that Kata ships for GPUs."""
    places = (handler_configuration(handler), *_WITH_GPUS)
    return next((path for path in places if tree.exists(path)), None)


def find_shims(tree: HostTree, configuration: HostPath) -> tuple[HostPath, ...]:
    """The shims that are installed; the first is the one that a configuration is for."""
    order = _order(tree, configuration)
    return tuple(path for name in order for path in SHIMS[name] if tree.exists(path))


def _order(tree: HostTree, configuration: HostPath) -> Iterator[RuntimeName]:
    """The runtime that a configuration shows to be for; else the default of the release."""
    text = tree.read_text(configuration) or ""
    major = (tree.read(_VERSION) or "0").partition(".")[0]
    is_rs = major.isdecimal() and int(major) >= _RS_IS_DEFAULT
    if "/runtime-rs/" in configuration or _OF_RS.search(text):
        is_rs = True
    elif _OF_GO.search(text):
        is_rs = False
    yield from ("rs", "go") if is_rs else ("go", "rs")
