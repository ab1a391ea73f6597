"""Intel's virtual functions: quotas that are set on the physical one before they are made.

xe: Documentation/ABI/testing/sysfs-driver-intel-xe-sriov, drivers/gpu/drm/xe/xe_sriov_pf_sysfs.c.
i915 with SR-IOV never came to Linux itself; its files are those that Intel's XPU Manager writes.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tests.fakes.sysfs import (
    READ_ONLY,
    READ_WRITE,
    UNASSIGNED,
    WRITE_ONLY,
    Sysfs,
    first_line,
    reject,
    unsigned,
)
from vfiomgr.paths import PCI_DEVICES, HostPath

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fakes.drivers import Driver
    from tests.fakes.reactions import Reactions
    from tests.fakes.sriov import Sriov

_ADMIN = re.compile(r"(/sys/devices/.+)/sriov_admin/(pf|vf\d+|\.bulk_profile)/(?:profile/)?(\w+)")
_IOV = re.compile(r"(/sys/devices/.+)/drm/card\d+/iov/(pf|vf\d+)/gt\d*/(\w+)")
_VFS = re.compile(r"vf[1-9]\d*")
_BOOL = re.compile(r"[yYtT1nNfF0]|[oO][nNfF]")
_PRIORITIES = ("low", "normal", "high")
_RESOURCES = ("ggtt_quota", "lmem_quota", "contexts_quota", "doorbells_quota")
_SUPPLIES = {"ggtt": 4 << 30, "contexts": 65000, "doorbells": 240}
"""What a tile has besides memory."""
_DEBUG = HostPath("/sys/kernel/debug/dri")
_SCHEDULING = ("exec_quantum_ms", "preempt_timeout_us")
_ALIGNMENT = 2 << 20
_CONTEXTS = 128
"""So many at a time (CTXS_GRANULARITY of i915)."""


@dataclass(frozen=True)
class IntelGpu:
    """A GPU on xe or i915; `vram` in bytes is what its virtual functions share.

    `has_vram_quota` as of Linux 7.0, `firmware_refuses` are attributes that answer EIO, and those
    that the hardware has not answer EPERM: `not_applicable`. `shows_in` debugfs alone is an xe
    before Linux 6.19, before 6.18 below each `gt`. Where debugfs is mounted, `tells_vram` too.
    `ignores` are attributes whose writes succeed and change nothing. With `shares_time` it gives
    all functions so many ms when they are made, whatever they had.
    """

    address: str
    driver: Literal["xe", "i915"] = "xe"
    total_vfs: int = 24
    vram: int = 24 << 30
    tiles: int = 1
    has_vram_quota: bool = True
    firmware_refuses: frozenset[str] = frozenset()
    not_applicable: frozenset[str] = frozenset()
    shows_in: Literal["sysfs", "debugfs", "gt"] = "sysfs"
    tells_vram: bool = False
    shares_time: int = 0
    ignores: frozenset[str] = frozenset()

    @property
    def quota(self) -> str:
        """What its share of memory is called."""
        return "vram_quota" if self.driver == "xe" else "lmem_quota"


class IntelVfs:
    """The attributes of all such GPUs of a host; which there are is `known`."""

    def __init__(self, sysfs: Sysfs, sriov: Sriov) -> None:
        self._sysfs = sysfs
        self._sriov = sriov
        self.known: dict[str, IntelGpu] = {}
        sriov.when_made.append(self._made)
        sriov.when_gone.append(self._gone)

    def join(self, reactions: Reactions) -> None:
        """Say what acts on its attributes."""
        reactions.others += [(_ADMIN, self._write_admin), (_IOV, self._write_iov)]

    # ---- what is there

    def bound(self, driver: Driver, address: str) -> None:
        """The driver shows a directory for each function that there can be."""
        gpu, directory = self._of(driver, address)
        if gpu is None or directory is None:
            return
        debug = _DEBUG / address
        if gpu.tells_vram:
            for tile in range(gpu.tiles):
                text = f"  use_type: 1\n  use_tt: 0\n  size: {gpu.vram // gpu.tiles}\n  usage: 0"
                self._sysfs.put(debug / f"vram{tile}_mm", text, READ_ONLY)
        if gpu.shows_in != "sysfs":
            for path, text in _debugfs(gpu):
                self._sysfs.put(debug / path, text)
            return
        for path, text, mode in self._admin(gpu) if gpu.driver == "xe" else self._iov(gpu):
            self._sysfs.put(self._root(gpu, directory) / path, text, mode)
        self._sysfs.link(self._root(gpu, directory) / "pf/device", directory)

    def leaving(self, driver: Driver, address: str) -> None:
        """The driver takes the functions away, and all that; a DRM device goes by itself."""
        gpu, directory = self._of(driver, address)
        if gpu is not None and directory is not None:
            self._sriov.disable(directory)
            self._sysfs.drop(directory / "sriov_admin")
            self._sysfs.drop(_DEBUG / address)

    def _of(self, driver: Driver, address: str) -> tuple[IntelGpu | None, HostPath | None]:
        gpu = self.known.get(address)
        if gpu is None or gpu.driver != driver.name:
            return None, None
        return gpu, self._sysfs.target(PCI_DEVICES / address)

    def _root(self, gpu: IntelGpu, directory: HostPath) -> HostPath:
        if gpu.driver == "xe":
            return directory / "sriov_admin"
        card = next(n for n in self._sysfs.names(directory / "drm") if n.startswith("card"))
        return directory / "drm" / card / "iov"

    def _admin(self, gpu: IntelGpu) -> Iterator[tuple[str, str, int]]:
        for name in (*_SCHEDULING, "sched_priority", *self._quota_of(gpu)):
            yield f".bulk_profile/{name}", "", WRITE_ONLY
        for name in _SCHEDULING:
            yield f"pf/profile/{name}", "0", READ_WRITE
        yield "pf/profile/sched_priority", _choice("low", _PRIORITIES), READ_WRITE
        for number in range(1, gpu.total_vfs + 1):
            for name in (*_SCHEDULING, *self._quota_of(gpu)):
                yield f"vf{number}/profile/{name}", "0", READ_WRITE
            # GuC lets only the physical function's priority be changed alone.
            priority = _choice("low", _PRIORITIES[:2])
            yield f"vf{number}/profile/sched_priority", priority, READ_ONLY
            yield f"vf{number}/stop", "", WRITE_ONLY

    @staticmethod
    def _quota_of(gpu: IntelGpu) -> tuple[str, ...]:
        return ("vram_quota",) if gpu.has_vram_quota else ()

    @staticmethod
    def _iov(gpu: IntelGpu) -> Iterator[tuple[str, str, int]]:
        yield "pf/auto_provisioning", "1", READ_WRITE
        for tile in _tiles(gpu):
            for name, number in _supplies(gpu).items():
                yield f"pf/{tile}/available/{name}_free", str(number), READ_ONLY
            for name in _SCHEDULING:
                yield f"pf/{tile}/{name}", "0", READ_WRITE
            for number in range(1, gpu.total_vfs + 1):
                for name in (*_RESOURCES, *_SCHEDULING):
                    yield f"vf{number}/{tile}/{name}", "0", READ_WRITE

    # ---- writes

    def _write_admin(self, match: re.Match[str], text: str) -> None:
        directory, function, name = HostPath(match[1]), match[2], match[3]
        gpu = self.known[directory.name]
        root = self._root(gpu, directory)
        if name == "stop":
            _expect_bool(text)
            return
        value = self._checked(gpu, name, text, is_physical=function == "pf")
        every = [n for n in self._sysfs.names(root) if n == "pf" or _VFS.fullmatch(n)]
        quotas = [n for n in every if n != "pf"]
        chosen = [function]
        if function == ".bulk_profile":
            chosen = quotas if name == gpu.quota else every
        paths = [f"{root}/{n}/profile/{name}" for n in chosen]
        self._set(gpu, root, name, paths, value)

    def _write_iov(self, match: re.Match[str], text: str) -> None:
        directory, function, name = HostPath(match[1]), match[2], match[3]
        gpu = self.known[directory.name]
        value = self._checked(gpu, name, text, is_physical=function == "pf")
        if name in _RESOURCES and self._is_enabled(directory, function):
            reject(errno.EPERM)
        self._set(gpu, self._root(gpu, directory), name, [match[0]], value)

    def _checked(self, gpu: IntelGpu, name: str, text: str, *, is_physical: bool) -> str:
        """What a write means.

        Raises:
            OSError: EINVAL or ERANGE for what it cannot be, EPERM and EIO where the GPU is so.

        """
        if name in gpu.not_applicable:
            reject(errno.EPERM)
        if name in gpu.firmware_refuses:
            reject(errno.EIO)
        if name == "sched_priority":
            words = _PRIORITIES if is_physical else _PRIORITIES[:2]
            if first_line(text) not in words:
                reject(errno.EINVAL)
            return first_line(text)
        return str(unsigned(text, bits=64 if name in (*_RESOURCES, "vram_quota") else 32))

    def _set(self, gpu: IntelGpu, root: HostPath, name: str, paths: list[str], value: str) -> None:
        if name in (gpu.quota, "contexts_quota"):
            unit = _ALIGNMENT if name == gpu.quota else _CONTEXTS
            value = str(-(-int(value) // unit) * unit)
        if name in (gpu.quota, *_RESOURCES):
            self._refuse_too_much(gpu, root, paths, int(value))
        if name in gpu.ignores:
            return
        if name in _RESOURCES and int(value):
            self._sysfs.put(root / "pf/auto_provisioning", "0")
        for path in paths:
            words = _PRIORITIES if "/pf/" in path else _PRIORITIES[:2]
            is_priority = name == "sched_priority"
            mode = READ_ONLY if is_priority and "/pf/" not in path else READ_WRITE
            self._sysfs.put(path, _choice(value, words) if is_priority else value, mode)
        self._count_supplies(gpu, root)

    def _count_supplies(self, gpu: IntelGpu, root: HostPath) -> None:
        """What i915 has left to give on each tile."""
        for tile in _tiles(gpu) if gpu.driver == "i915" else ():
            for name, number in _supplies(gpu).items():
                quotas = self._quotas(gpu, root, f"{name}_quota")
                used = sum(int(self._sysfs.get(q)) for q in quotas if _tile(q) == tile)
                path = root / f"pf/{tile}/available/{name}_free"
                self._sysfs.update(path, str(number - used), READ_ONLY)

    def _refuse_too_much(self, gpu: IntelGpu, root: HostPath, paths: list[str], value: int) -> None:
        """EIO where the functions would have more than the GPU."""
        name = paths[0].rpartition("/")[2]
        others = set(self._quotas(gpu, root, name)) - set(paths)
        tile = _supplies(gpu)["lmem" if name == gpu.quota else name.removesuffix("_quota")]
        same_tile = [p for p in others if gpu.driver == "xe" or _tile(p) == _tile(paths[0])]
        used = sum(int(self._sysfs.get(path)) for path in same_tile)
        if used + value * len(paths) > tile:
            reject(errno.EIO)

    def _quotas(self, gpu: IntelGpu, root: HostPath, name: str = "") -> list[str]:
        """The paths of the quotas of all virtual functions: of memory unless told."""
        functions = [name for name in self._sysfs.names(root) if _VFS.fullmatch(name)]
        places = ["profile"] if gpu.driver == "xe" else _tiles(gpu)
        paths = [f"{root}/{f}/{place}/{name or gpu.quota}" for f in functions for place in places]
        return [path for path in paths if self._sysfs.exists(path)]

    def _is_enabled(self, directory: HostPath, function: str) -> bool:
        number = int(self._sysfs.get(directory / "sriov_numvfs") or "0")
        return function != "pf" and int(function.removeprefix("vf")) <= number

    # ---- functions come and go

    def _made(self, address: str) -> None:
        """Links to the new ones; where nobody gave them memory, each gets a fair share."""
        gpu, directory = self.known.get(address), self._sysfs.target(PCI_DEVICES / address)
        if gpu is None or directory is None or gpu.shows_in != "sysfs":
            return
        root = self._root(gpu, directory)
        number = int(self._sysfs.get(directory / "sriov_numvfs"))
        for index in range(number):
            virtual = self._sysfs.target(directory / f"virtfn{index}")
            self._sysfs.link(root / f"vf{index + 1}" / "device", virtual or directory)
        if gpu.shares_time:
            for index in range(number):
                quantum = root / f"vf{index + 1}/profile/exec_quantum_ms"
                self._sysfs.put(quantum, str(gpu.shares_time))
        if not self._shares(gpu, root, self._quotas(gpu, root)):
            return
        for kind, supply in _supplies(gpu).items():
            name = gpu.quota if kind == "lmem" else f"{kind}_quota"
            unit = {"contexts": _CONTEXTS, "doorbells": 1}.get(kind, _ALIGNMENT)
            for path in self._quotas(gpu, root, name):
                if int(path.removeprefix(f"{root}/vf").split("/")[0]) <= number:
                    self._sysfs.put(path, str(supply // number // unit * unit))
        self._count_supplies(gpu, root)

    def _shares(self, gpu: IntelGpu, root: HostPath, quotas: list[str]) -> bool:
        """Whether the driver itself gives memory to functions."""
        if gpu.driver == "i915":
            return self._sysfs.get(root / "pf/auto_provisioning") == "1"
        return not any(int(self._sysfs.get(path)) for path in quotas)

    def _gone(self, address: str) -> None:
        """No links any more; xe gives all memory back, i915 what it had shared out itself."""
        gpu, directory = self.known.get(address), self._sysfs.target(PCI_DEVICES / address)
        if gpu is None or directory is None or not self._sysfs.exists(directory / "driver"):
            return
        if gpu.shows_in != "sysfs":
            return
        root = self._root(gpu, directory)
        for name in self._sysfs.names(root):
            if _VFS.fullmatch(name):
                self._sysfs.drop(root / name / "device")
        if gpu.driver == "xe" or self._shares(gpu, root, self._quotas(gpu, root)):
            for name in _RESOURCES if gpu.driver == "i915" else (gpu.quota,):
                for path in self._quotas(gpu, root, name):
                    self._sysfs.put(path, "0")
        self._count_supplies(gpu, root)

    def make_inconsistent(self, address: str, path: str) -> None:
        """Reading a value that differs between tiles is EUCLEAN; `path` is below its directory."""
        place = PCI_DEVICES / address / path
        self._sysfs.put(place, "", READ_WRITE | UNASSIGNED)


def _supplies(gpu: IntelGpu) -> dict[str, int]:
    """What each tile has to share out."""
    memory = {"lmem": gpu.vram // gpu.tiles}
    return memory | _SUPPLIES if gpu.driver == "i915" else memory


def _debugfs(gpu: IntelGpu) -> Iterator[tuple[str, str]]:
    """An xe before its sriov_admin (xe_gt_sriov_pf_debugfs.c, xe_tile_sriov_pf_debugfs.c)."""
    numbers = {"exec_quantum_ms": "20", "preempt_timeout_us": "0", "sched_priority": "1"}
    share = str(gpu.vram // gpu.tiles // gpu.total_vfs // _ALIGNMENT * _ALIGNMENT)
    for function in ("pf", *(f"vf{number}" for number in range(1, gpu.total_vfs + 1))):
        for tile in range(gpu.tiles):
            inner = f"sriov/{function}/tile{tile}"
            place = f"{inner}/gt{tile}" if gpu.shows_in == "debugfs" else f"gt{tile}/{function}"
            for name, text in numbers.items():
                yield f"{place}/{name}", text
            if function == "pf":
                continue
            if gpu.shows_in == "debugfs":
                yield f"{inner}/vram_quota", share
            yield f"{place}/lmem_quota", share


def _choice(chosen: str, words: tuple[str, ...]) -> str:
    return " ".join(f"[{word}]" if word == chosen else word for word in words)


def _tiles(gpu: IntelGpu) -> list[str]:
    return ["gt"] if gpu.tiles == 1 else [f"gt{tile}" for tile in range(gpu.tiles)]


def _tile(path: str) -> str:
    return path.split("/")[-2]


def _expect_bool(text: str) -> None:
    if not _BOOL.match(text):
        reject(errno.EINVAL)
