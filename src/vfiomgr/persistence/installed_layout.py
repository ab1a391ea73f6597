"""The installed layout: its file, its rules, the units that apply it, and what it binds."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, blocker, refuse
from vfiomgr.documents.jsonable import to_jsonable
from vfiomgr.documents.text import parse_json, sealed
from vfiomgr.expressions import expression
from vfiomgr.paths import HostPath
from vfiomgr.persistence.model import SANDBOX, UNITS, render_rule, require_plain, rule_file
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.persistence.model import PersistedBinding
    from vfiomgr.snapshot.model import HostSnapshot

DIRECTORY = HostPath("/etc/vfiomgr")
FILE = DIRECTORY / "layout.yaml"
RECORD = DIRECTORY / "layout.installed.json"
"""The record: the name of the layout, and the udev rules written for it."""
BOOT = UNITS / "vfiomgr-layout.service"
WATCH = UNITS / "vfiomgr-watch.service"
"""Enforces the layout; `vfiomgr-persist.service` is for hot-plugged functions."""
WANTED = UNITS / "multi-user.target.d" / "vfiomgr-layout.conf"
"""Starts both at boot; a file instead of the link that `systemctl enable` creates."""
SERVICES = (BOOT, WATCH, WANTED)
FILES = (RECORD, FILE, *SERVICES)

_VERSION = "vfiomgr/v1"
_HEAD = "# vfiomgr: removed by vfiomgr layout uninstall.\n"
_AFTER = (
    "local-fs.target systemd-udev-trigger.service systemd-modules-load.service "
    "vfiomgr-persist.service nvidia-vgpud.service nvidia-vgpu-mgr.service"
)
_BEFORE = (
    "vfiomgr-vgpu.service display-manager.service libvirtd.service virtqemud.service "
    "virtnodedevd.service kubelet.service containerd.service crio.service docker.service"
)
SETTLE = 60
"""Seconds for udev to settle at boot; the probe of a driver may take some."""
_BARE = expression(r"[A-Za-z0-9._+@:/-]+")


class WrittenRule(Value):
    """A udev rule file that was written for a layout, or that must not exist for it."""

    path: str
    sha256: str | None
    """The hash of its text, to detect changes by others; None if there must be no rule."""
    before: str | None = None
    """The former text: another rule for the same function."""

    @property
    def is_absence(self) -> bool:
        """Whether there must be no rule, because it would prevent the layout's pins."""
        return self.sha256 is None

    def is_as_written(self, text: str | None) -> bool:
        """Whether a text is the written one; None stands for a missing file."""
        return self.sha256 == (None if text is None else digest_of(text))


class InstalledLayout(Value):
    """The record of an installed layout, with which it can be uninstalled exactly."""

    name: str
    rules: tuple[WrittenRule, ...] = ()


def digest_of(text: str) -> str:
    """The hash of a text in the record."""
    from hashlib import sha256  # noqa: PLC0415 - slow to import, and lists need none

    return sha256(text.encode()).hexdigest()


def render_record(installed: InstalledLayout) -> str:
    """Render the record as a JSON document."""
    import json  # noqa: PLC0415 - lists need none

    document = {
        "api_version": _VERSION,
        "kind": "InstalledLayout",
        "layout": installed.name,
        "rules": to_jsonable(installed.rules),
    }
    return json.dumps(document, indent=2) + "\n"


def parse_record(text: str | None) -> InstalledLayout | None:
    """Parse the record; None if it is missing or of another version."""
    try:
        document = parse_json(text or "null")
        if document["api_version"] != _VERSION:
            return None
        rules = tuple(WrittenRule(**rule) for rule in document["rules"])
        return InstalledLayout(document["layout"], rules)
    except (ValueError, KeyError, TypeError):
        return None


def boot_command(name: str | None, allow: tuple[str, ...] = (), *, adopt: bool = False) -> str:
    """The arguments that apply the installed layout at boot, as a unit has them."""
    return f"apply {FILE}{_choosing(name)}{_allowing(allow)}{' --adopt' if adopt else ''}"


def shell_command(name: str | None, allow: tuple[str, ...] = ()) -> str:
    """The same command for a shell."""
    choosing = "" if name is None else f" --layout {shlex.quote(name)}"
    return f"vfiomgr apply {FILE}{choosing}{_allowing(allow)}"


def render_boot(
    program: str, name: str | None, allow: tuple[str, ...] = (), *, adopt: bool = False
) -> str:
    """Render the unit for the boot: after udev settles, before services that use devices.

    The unit runs `udevadm settle` itself, because systemd-udev-settle.service is deprecated.

    Raises:
        Refusal: a unit cannot contain the path or name.
    """
    return sealed(f"""\
{_HEAD}[Unit]
Description=Apply the layout in {FILE} to PCI devices
ConditionPathExists={FILE}
After={_AFTER}
Before={_BEFORE}

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStartPre=-udevadm settle --timeout={SETTLE}
ExecStart={require_plain(program)} {boot_command(name, allow, adopt=adopt)}
{SANDBOX}""")


def render_watch(program: str, name: str | None, allow: tuple[str, ...] = ()) -> str:
    """Render the unit that enforces the layout after it was applied.

    Raises:
        Refusal: a unit cannot contain the path or name.
    """
    command = f"layout watch {FILE}{_choosing(name)} --enforce{_allowing(allow)}"
    return sealed(f"""\
{_HEAD}[Unit]
Description=Enforce the layout in {FILE} on PCI devices
ConditionPathExists={FILE}
After={BOOT.name}

[Service]
ExecStart={require_plain(program)} {command}
Restart=on-failure
RestartSec=10
{SANDBOX}""")


def render_wanted(*, with_watch: bool) -> str:
    """Render the drop-in that starts the services at boot."""
    names = [BOOT.name, WATCH.name] if with_watch else [BOOT.name]
    return sealed(f"{_HEAD}[Unit]\nWants={' '.join(names)}\n")


def _choosing(name: str | None) -> str:
    """The option that chooses a layout of the file; None where the file has only one."""
    return "" if name is None else f" --layout {_word(name)}"


def _allowing(allow: tuple[str, ...]) -> str:
    return "".join(f" --allow {guard}" for guard in allow)


def _word(name: str) -> str:
    """Quote a word for a systemd command line (systemd.service(5), systemd.syntax(7)).

    Raises:
        Refusal: it contains a character that cannot be quoted.
    """
    if _BARE.fullmatch(name):
        return name
    if not name.isprintable():
        message = f"cannot write a systemd unit for the layout {name!r}: unsupported characters"
        refuse("layout-name", name, message, "use a name of printable characters")
    for special, escaped in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        name = name.replace(special, escaped)
    return f'"{name}"'


_parsed = lru_cache(maxsize=1)(parse_record)
"""Cached, because every function of a plan needs it."""


def layout_name(host: HostSnapshot) -> str:
    """The name of the installed layout."""
    installed = _installed(host)
    return installed.name if installed is not None else ""


def of_layout(host: HostSnapshot, address: PciAddress) -> WrittenRule | None:
    """The installed layout's rule for a function, or its record that there must be none.

    A rule that was changed since no longer belongs to the layout.
    """
    installed = _installed(host)
    path = rule_file(address)
    for rule in installed.rules if installed is not None else ():
        if rule.path == path and (rule.is_absence or rule.is_as_written(host.files.text(path))):
            return rule
    return None


def _installed(host: HostSnapshot) -> InstalledLayout | None:
    text = host.files.text(RECORD)
    return None if text is None else _parsed(text)


def diagnostics(host: HostSnapshot, devices: Iterable[PciDevice]) -> Iterator[Diagnostic]:
    """Refuse functions that the installed layout pins, which a rule would prevent."""
    for device in devices:
        rule = of_layout(host, device.address)
        if rule is not None and rule.is_absence:
            yield blocker(
                "set-by-layout",
                device,
                f"the installed layout {layout_name(host)} sets reset_method or d3cold of {device} "
                "on its host driver, which a rule would prevent",
                "leave out --persist (the layout binds it at each boot), or first run: "
                "vfiomgr layout uninstall",
            )


def replacement_notes(host: HostSnapshot, wanted: Iterable[PersistedBinding]) -> Iterator[str]:
    """Report rules of the layout that the plan replaces."""
    for binding in wanted:
        rule = of_layout(host, binding.address)
        if rule is not None and not rule.is_as_written(render_rule(binding)):
            yield (
                f"replacing the rule of the layout {layout_name(host)} for {binding.address}; at "
                "boot the layout is applied after all rules and takes precedence"
            )


def removal_notes(host: HostSnapshot, addresses: Iterable[PciAddress]) -> Iterator[str]:
    """Report functions that the layout binds again, with or without rules."""
    names = [str(address) for address in addresses if of_layout(host, address) is not None]
    if names:
        yield (
            f"the installed layout {layout_name(host)} binds {', '.join(names)} again at the next "
            "boot; to prevent it: vfiomgr layout uninstall"
        )
