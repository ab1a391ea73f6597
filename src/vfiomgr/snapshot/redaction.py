"""A snapshot without what identifies a machine or a person, for a public report.

Serial numbers, UUIDs, MAC and IP addresses, and the names of the host, its guests, pods and users
are replaced; equal values get equal replacements, so that rules find the same as before.
Models, drivers, PCI addresses, sizes and versions stay, and the time of the snapshot.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

from vfiomgr.expressions import expression

_UUID = expression(r"(?i)(?<![0-9a-f])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![0-9a-f])")
_LONG_ID = expression(r"(?i)(?<![0-9a-f])(?:[0-9a-f]{32}|[0-9a-f]{40}|[0-9a-f]{64})(?![0-9a-f])")
"""Machine IDs, IDs of containers, checksums."""
_MAC = expression(r"(?i)(?<![0-9a-f:])[0-9a-f]{2}(?::[0-9a-f]{2}){5}(?![0-9a-f:])")
_IPV4 = expression(
    r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.])"
)
_IPV6 = expression(
    r"(?i)(?<![\w:.])(?:(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}"
    r"|[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){0,5}::(?:[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){0,5})?)(?![\w:])"
)
_PLACE = expression(
    r"(?<![\w/])(/(?:home|mnt|media|srv|run/media)/|/dev/mapper/(?!control\b)|/dev/disk/by-[a-z]+/"
    r"|(?:PART)?LABEL=)([^\s,:;\"'/]+)"
)
"""What a person named: home directories, mount points, volumes and labels."""
_HOME = expression(r"(?<![\w/])/home/([^\s,:;\"'/]+)")
_PERSONAL = frozenset(
    {"agent", "cdi_files", "created", "definitions", "desktop", "files", "gpu_partitions"}
    | {
        "host_uses",
        "kernel_command_line",
        "nodes",
        "readiness",
        "unknown_users",
        "users",
        "vgpu_marks",
    }
)
"""The members of a snapshot in which names of persons, guests and hosts can stand."""
_SUMMED = "files"
"""Texts of vfiomgr, some of which end with their own checksum."""
_WHOLE = {"serial": "serial", "guest": "guest", "host_name": "host"}
"""Members that are names, with the word that replaces them."""
_UNITS = "unit"
_KNOWN_UNIT = expression(
    r"(gdm3?|sddm|lightdm|greetd|lxdm|ly|xdm|display-manager|nvidia-[\w-]+|dcgm[\w-]*|nvsm[\w-]*"
    r"|systemd-[\w-]+|libvirt[\w-]*|virt\w+d|docker|containerd|crio|kubelet|k3s|pipewire[\w-]*"
    r"|pulseaudio|wireplumber|vfiomgr[\w-]*|user@\d+|session-c?\d+|init)\.(service|scope|slice)"
    r"|machine-.*|docker-.*|crio-.*|cri-containerd-.*|libpod-.*"
)
"""Units of programs that anyone may have, and those that contain the names of guests or IDs."""
_COMMAND_LINE = "kernel_command_line"
_URL = expression(r"(?i)\b((?:https?|ftp|tftp|nfs|iscsi|nbd)://?)([^\s\"',]+)")
_NETWORK_ROOT = expression(r"(?<!\S)(nfsroot=|(?:net)?root=nfs4?:)(\S+)")
"""nfsroot=[SERVER:]DIRECTORY (Documentation/admin-guide/nfs/nfsroot.rst), and dracut's forms."""
_VOLUME = expression(
    r"(?<![\w/])(/dev/(?!(?:block|cciss|disk|mapper|vfio)/)(?=[^\s,/]+/)|rd\.lvm\.(?:lv|vg)=)([^\s,]+)"
)
"""/dev/GROUP/VOLUME of LVM (lvm(8)), and dracut's parameters (dracut.cmdline(7))."""
_LOGIN = expression(r"[^\s/@:=,]+:[^\s/@]+@")
_SECRET = expression(
    r"(?i)(?<!\S)([\w.-]*(?:passw|secret|token|credential|api[_-]?key|username)[\w.-]*=)(\S+)"
)
"""Parameters of the kernel command line whose values are secrets."""
_OF_PODS = frozenset({"pod", "claim"})
_SYSTEM_USERS = frozenset(
    {"root", "nobody", "kvm", "qemu", "libvirt", "libvirt-qemu", "libvirt-dnsmasq", "render"}
    | {"video", "audio", "input", "disk", "tty", "users", "hugetlbfs", "sgx", "vfio", "gdm", "sddm"}
)
_SHORTEST = 3
"""Characters of a name that is also replaced within texts."""


class Redaction:
    """Replacements of one report; several snapshots of it share one, and get the same ones.

    `names` are those of hosts. Names of drivers stay, even if a guest is named like one.
    """

    def __init__(self, names: Iterable[str] = (), key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(16) if key is None else key
        self._known: dict[tuple[str, str], str] = {}
        self._numbers: dict[str, int] = {}
        self._by_name: dict[str, str] = {}
        self._has_ids = False
        known = tuple(names)
        for name in known:
            self._numbered("host", name)  # before short names, which may be those of other hosts
        for name in known:
            self.host(name)

    def __call__(self, document: dict[str, Any]) -> dict[str, Any]:
        """A snapshot as `to_document` returns it, with replacements."""
        name = (document.get("created") or {}).get("host_name")
        if name:
            self.host(name)
        for kind, name in _named_in(document):
            self._numbered(kind, name)
        kept = {*(document.get("pci_drivers") or ()), *(document.get("vfio_modules") or ())}
        names = self._pattern(kept)
        found = {}
        for key, value in document.items():
            self._has_ids = key in _PERSONAL and key != _SUMMED
            bare = self._without_secrets(value) if key == _COMMAND_LINE else value
            found[key] = self._replaced(bare, names if key in _PERSONAL else None)
        return found

    def host(self, name: str) -> str:
        """The replacement of the name of a host, and of its short name."""
        new = self._numbered("host", name)
        self._known.setdefault(("host", name.partition(".")[0]), new)
        return new

    def _replaced(self, value: Any, names: re.Pattern[str] | None) -> Any:  # noqa: ANN401 - of JSON
        if isinstance(value, str):
            return self._text(value, names)
        if isinstance(value, list):
            return [self._replaced(one, names) for one in value]
        if isinstance(value, dict):
            return {
                self._text(key, names): self._member(key, one, names) for key, one in value.items()
            }
        return value

    def _member(self, key: str, value: Any, names: re.Pattern[str] | None) -> Any:  # noqa: ANN401
        """A member of an object; entire names are replaced there, however short."""
        if key in _WHOLE and isinstance(value, str) and value:
            return self._numbered(_WHOLE[key], value)
        if key == _UNITS and isinstance(value, str) and not _KNOWN_UNIT.fullmatch(value):
            name, dot, kind = value.rpartition(".")
            return f"{self._numbered('unit', name)}{dot}{kind}"
        if key in _OF_PODS and isinstance(value, str):
            found = dict(_of_pod(value))
            rest = value.split("/")[2:]
            return "/".join([*(self._numbered(kind, old) for kind, old in found.items()), *rest])
        return self._replaced(value, names)

    def _without_secrets(self, text: str | None) -> str | None:
        """The kernel command line without URLs, volumes, and the values of secret parameters."""
        if text is None:
            return None
        text = _URL.sub(lambda m: f"{m[1]}{self._numbered('url', m[2])}", text)
        text = _NETWORK_ROOT.sub(lambda m: f"{m[1]}{self._numbered('url', m[2])}", text)
        text = _VOLUME.sub(lambda m: f"{m[1]}{self._numbered('name', m[2])}", text)
        text = _LOGIN.sub(lambda m: f"{self._numbered('login', m[0])}@", text)
        return _SECRET.sub(lambda m: f"{m[1]}{self._numbered('secret', m[2])}", text)

    def _text(self, text: str, names: re.Pattern[str] | None) -> str:
        text = _UUID.sub(lambda m: self._uuid(m[0]), text)
        if self._has_ids:
            text = _LONG_ID.sub(lambda m: self._hash("id", m[0].lower())[: len(m[0])], text)
        text = _MAC.sub(lambda m: self._mac(m[0]), text)
        text = _IPV4.sub(lambda m: self._address(m[0], "192.0.2."), text)
        text = _IPV6.sub(lambda m: self._address(m[0], "2001:db8::"), text)
        text = _PLACE.sub(lambda m: f"{m[1]}{self._place(m[1], m[2])}", text)
        return text if names is None else names.sub(lambda m: self._by_name[m[0]], text)

    def _pattern(self, kept: Iterable[str]) -> re.Pattern[str] | None:
        """All names as they stand in texts, also escaped as in names of systemd's units."""
        kept = frozenset(kept)
        self._by_name = {
            form: new
            for (kind, old), new in self._known.items()
            if kind in _NAMES and len(old) >= _SHORTEST and old not in kept
            for form in (old, old.replace("-", "\\x2d"))
        }
        if not self._by_name:
            return None
        longest_first = sorted(self._by_name, key=len, reverse=True)
        either = "|".join(map(re.escape, longest_first))
        return re.compile(rf"(?:(?<=\\x2d)|(?<![0-9A-Za-z_]))(?:{either})(?![0-9A-Za-z_])")

    def _numbered(self, kind: str, old: str) -> str:
        """`guest-1` and so on."""
        if (kind, old) not in self._known:
            self._numbers[kind] = self._numbers.get(kind, 0) + 1
            self._known[kind, old] = f"{kind}-{self._numbers[kind]}"
        return self._known[kind, old]

    def _hash(self, kind: str, old: str) -> str:
        """64 hexadecimal digits, which say nothing about the value without the key."""
        return hashlib.blake2b(f"{kind} {old}".encode(), key=self._key, digest_size=32).hexdigest()

    def _uuid(self, old: str) -> str:
        """Another random UUID (RFC 9562, version 4): snapshots of two hosts get different ones."""
        digits = self._hash("uuid", old.lower())
        return f"{digits[:8]}-{digits[8:12]}-4{digits[12:15]}-8{digits[15:18]}-{digits[18:30]}"

    def _mac(self, old: str) -> str:
        """A locally administered address."""
        digits = self._hash("mac", old.lower())
        return ":".join(("02", *(digits[at : at + 2] for at in range(0, 10, 2))))

    def _address(self, old: str, prefix: str) -> str:
        """An address for documentation (RFC 5737, RFC 3849); loopback and unspecified ones stay."""
        if old.startswith(("127.", "0.")) or old in ("::", "::1", "255.255.255.0"):
            return old
        number = self._numbered(prefix, old).rpartition("-")[2]
        return f"{prefix}{number}"

    def _place(self, where: str, old: str) -> str:
        """A directory or volume; a UUID in it was replaced before."""
        if _UUID.search(old):
            return old
        return self._numbered("user" if where == "/home/" else "name", old)


_NAMES = ("host", "guest", "namespace", "pod", "user", "serial")


def _named_in(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The names of guests, pods and users, and serial numbers, in a snapshot, with their kind."""
    for device in document.get("devices") or ():
        if device.get("serial"):
            yield "serial", device["serial"]
    for user in document.get("users") or ():
        if user.get("guest"):
            yield "guest", user["guest"]
        yield from _of_pod(user.get("pod"))
    agent = document.get("agent") or {}
    for resource in agent.get("resources") or ():
        for device in resource.get("devices") or ():
            yield from _of_pod(device.get("pod"))
    for claim in agent.get("claims") or ():
        yield from _of_pod(claim.get("claim"))
    homes = (name for text in _texts(document) for name in _HOME.findall(text))
    users = (name for name in (*_users(document), *homes) if name not in _SYSTEM_USERS)
    yield from (("user", name) for name in users)


def _texts(value: Any) -> Iterator[str]:  # noqa: ANN401 - of JSON
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for one in value if isinstance(value, list) else value.values():
            yield from _texts(one)


def _of_pod(name: str | None) -> Iterator[tuple[str, str]]:
    namespace, _, rest = (name or "").partition("/")
    if rest:
        yield "namespace", namespace
        yield "pod", rest.partition("/")[0]


def _users(document: dict[str, Any]) -> Iterator[str]:
    readiness = document.get("readiness") or {}
    for limit in readiness.get("memlock") or ():
        kind, _, name = (limit.get("subject") or "").partition(" ")
        if kind == "user" and name:
            yield name
    desktop = document.get("desktop") or {}
    yield from (one["user"] for one in desktop.get("sessions") or () if one.get("user"))
    yield from desktop.get("lingering") or ()
    for node in readiness.get("nodes") or ():
        yield from filter(None, (node.get("owner") or "").split(":"))
