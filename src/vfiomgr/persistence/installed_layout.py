"""A layout that is installed: its file, what was written for it, the units that carry it out."""

from __future__ import annotations

import re

from vfiomgr.diagnostic import refuse
from vfiomgr.documents.parsed import parse_json
from vfiomgr.paths import HostPath
from vfiomgr.persistence.model import SANDBOX, UNITS, require_plain
from vfiomgr.value import Value

DIRECTORY = HostPath("/etc/vfiomgr")
FILE = DIRECTORY / "layout.yaml"
RECORD = DIRECTORY / "layout.installed.json"
"""Which layout of the file, and the rules of udev that were written for it."""
BOOT = UNITS / "vfiomgr-layout.service"
WATCH = UNITS / "vfiomgr-watch.service"
"""Keeps the layout; `vfiomgr-persist.service` is another one, for hot-plugged functions."""
WANTED = UNITS / "multi-user.target.d" / "vfiomgr-layout.conf"
"""Has systemd start both at boot; a file, where `systemctl enable` would make a link."""
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
_SETTLE = 60
"""Seconds for udev to be done with all devices of the boot; a driver's probe may take some."""
_BARE = re.compile(r"[A-Za-z0-9._+@:/-]+")


class WrittenRule(Value):
    """A file of udev's rules that was written for a layout, or that must not be there for it."""

    path: str
    sha256: str | None
    """Of its text: what was changed since is somebody else's. None where there is to be no rule."""
    before: str | None = None
    """What was there: somebody else's rule for the same function."""

    @property
    def is_absence(self) -> bool:
        """Whether there is to be no rule: one would take from the layout what it is to pin."""
        return self.sha256 is None

    def is_as_written(self, text: str | None) -> bool:
        """Whether a text is the one that was written; None for a file that is not there."""
        return self.sha256 == (None if text is None else digest_of(text))


class InstalledLayout(Value):
    """What is to be known of an installed layout, so that exactly that can be taken back."""

    name: str
    rules: tuple[WrittenRule, ...] = ()


def digest_of(text: str) -> str:
    """What a record knows a text by."""
    from hashlib import sha256  # noqa: PLC0415 - slow to import, and lists need none

    return sha256(text.encode()).hexdigest()


def render_record(installed: InstalledLayout) -> str:
    """The record as a JSON document."""
    import json  # noqa: PLC0415 - lists need none

    rules = [
        {"path": str(rule.path), "sha256": rule.sha256, "before": rule.before}
        for rule in installed.rules
    ]
    document = {
        "api_version": _VERSION,
        "kind": "InstalledLayout",
        "layout": installed.name,
        "rules": rules,
    }
    return json.dumps(document, indent=2) + "\n"


def parse_record(text: str | None) -> InstalledLayout | None:
    """The record that `render_record` wrote; None where there is none, or another version's."""
    try:
        document = parse_json(text or "null")
        if document["api_version"] != _VERSION:
            return None
        rules = tuple(WrittenRule(**rule) for rule in document["rules"])
        return InstalledLayout(document["layout"], rules)
    except (ValueError, KeyError, TypeError):
        return None


def boot_command(name: str, allow: tuple[str, ...] = ()) -> str:
    """What brings a host to its installed layout at boot, without the program."""
    return f"apply {FILE} --layout {_word(name)}{_allowing(allow)}"


def render_boot(program: str, name: str, allow: tuple[str, ...] = ()) -> str:
    """The unit for a boot: after udev is done with what it found, before those who use devices.

    `udevadm settle` in the unit itself, since systemd-udev-settle.service is deprecated.

    Raises:
        Refusal: a path or a name that a unit cannot hold.

    """
    return f"""\
{_HEAD}[Unit]
Description=PCI devices as the layout in {FILE} wants them
ConditionPathExists={FILE}
After={_AFTER}
Before={_BEFORE}

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStartPre=-udevadm settle --timeout={_SETTLE}
ExecStart={require_plain(program)} {boot_command(name, allow)}
{SANDBOX}"""


def render_watch(program: str, name: str, allow: tuple[str, ...] = ()) -> str:
    """The unit that keeps the layout, from when it was brought about.

    Raises:
        Refusal: a path or a name that a unit cannot hold.

    """
    command = f"watch {FILE} --layout {_word(name)} --enforce{_allowing(allow)}"
    return f"""\
{_HEAD}[Unit]
Description=PCI devices stay as the layout in {FILE} wants them
ConditionPathExists={FILE}
After={BOOT.name}

[Service]
ExecStart={require_plain(program)} {command}
Restart=on-failure
RestartSec=10
{SANDBOX}"""


def render_wanted(*, with_watch: bool) -> str:
    """The drop-in that makes the services part of a boot."""
    names = [BOOT.name, WATCH.name] if with_watch else [BOOT.name]
    return f"{_HEAD}[Unit]\nWants={' '.join(names)}\n"


def _allowing(allow: tuple[str, ...]) -> str:
    return "".join(f" --allow {guard}" for guard in allow)


def _word(name: str) -> str:
    """A word of a command line of systemd (systemd.service(5), systemd.syntax(7)).

    Raises:
        Refusal: it holds a character that has no name there.

    """
    if _BARE.fullmatch(name):
        return name
    if not name.isprintable():
        message = f"no unit of systemd can be written for the layout {name!r}"
        refuse("layout-name", name, message, "give it a name of printable characters")
    for special, escaped in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        name = name.replace(special, escaped)
    return f'"{name}"'
