"""The timer that writes metrics for node-exporter: its units, and how they are installed."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import refuse
from vfiomgr.documents.text import is_sealed, sealed
from vfiomgr.expressions import expression
from vfiomgr.metrics.model import DEVICES
from vfiomgr.paths import RUNTIME, HostPath
from vfiomgr.persistence.model import SANDBOX, UNITS, require_plain
from vfiomgr.persistence.steps import ChangeFiles, FileChange

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

SERVICE = UNITS / "vfiomgr-metrics.service"
TIMER = UNITS / "vfiomgr-metrics.timer"
WANTED = UNITS / "timers.target.d" / "vfiomgr-metrics.conf"
"""Starts the timer at boot; a file instead of the link that `systemctl enable` creates."""
FILES = (SERVICE, WANTED, TIMER)
"""In the order in which they are written: systemd starts the timer when it is there."""
LOCK = "metrics"
NAME = "vfiomgr.prom"
DIRECTORIES = (
    HostPath("/var/lib/prometheus/node-exporter"),
    HostPath("/var/lib/node_exporter/textfile_collector"),
    HostPath("/var/lib/node_exporter"),
)
"""The directories of Debian's package, of the examples of node-exporter, of its Ansible role."""
_TEMPORARY = ("/tmp/", "/var/tmp/")  # noqa: S108 - refused
"""What PrivateTmp= hides from the service (systemd.exec(5))."""
_HEAD = "# vfiomgr: removed by vfiomgr metrics uninstall.\n"
_OUTPUT = expression(r"^ExecStart=.* metrics --output (\S+)$", re.MULTILINE)
_PLAIN = expression(r"(/[A-Za-z0-9._+-]+)+")


def find_directory(tree: HostTree, named: str | None) -> HostPath:
    """The directory that node-exporter reads.

    Raises:
        Refusal: there is none, or a unit cannot contain its name.
    """
    if named is None:
        found = next((place for place in DIRECTORIES if _is_directory(tree, place)), None)
        if found is not None:
            return found
        message = f"no directory for metrics found: none of {', '.join(DIRECTORIES)}"
        remedy = (
            "name the directory that node-exporter reads (--collector.textfile.directory): "
            "vfiomgr metrics install --directory DIR"
        )
        refuse("metrics-directory", "", message, remedy)
    directory = HostPath(named.rstrip("/"))
    if not _PLAIN.fullmatch(directory) or "/../" in f"{directory}/":
        message = f"cannot write a systemd unit for {named!r}: not an absolute path, or unsupported"
        remedy = "name an absolute path with only letters, digits and ._+-"
        refuse("metrics-directory", named, f"{message} characters", remedy)
    if f"{directory}/".startswith(_TEMPORARY):
        message = f"the service cannot write to {directory}: it has a /tmp and /var/tmp of its own"
        remedy = "name a directory that node-exporter reads elsewhere, e.g. below /var/lib"
        refuse("metrics-directory", directory, message, remedy)
    if not _is_directory(tree, directory):
        message = f"directory not found: {directory}"
        refuse("metrics-directory", directory, message, f"create it: mkdir -p {directory}")
    return directory


def _is_directory(tree: HostTree, path: HostPath) -> bool:
    status = tree.status(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def render_service(program: str, output: HostPath) -> str:
    """Render the unit that writes the metrics once.

    It changes nothing else but its records of devices, so the host is read-only for it.
    ProtectKernelModules= would hide /usr/lib/modules, which a check reads; modules cannot be
    loaded without CAP_SYS_MODULE.

    Raises:
        Refusal: a unit cannot contain the path of the program.
    """
    return sealed(f"""\
{_HEAD}[Unit]
Description=Write metrics of PCI devices for node-exporter
ConditionPathIsDirectory={output.parent}

[Service]
Type=oneshot
TimeoutStartSec=300
ExecStart={require_plain(program)} metrics --output {output}
{SANDBOX}CapabilityBoundingSet=~CAP_SYS_MODULE CAP_CHOWN CAP_FOWNER CAP_MKNOD
CapabilityBoundingSet=CAP_SYSLOG
ProtectKernelLogs=no
ProtectKernelTunables=yes
ReadWritePaths=
ReadWritePaths={output.parent}
RuntimeDirectory={RUNTIME.name}
RuntimeDirectoryPreserve=yes
SystemCallFilter=~@module
""")


def render_timer() -> str:
    """Render the timer: a minute after boot, then every five minutes."""
    return sealed(f"""\
{_HEAD}[Unit]
Description=Write metrics of PCI devices for node-exporter every five minutes

[Timer]
OnBootSec=1min
OnUnitActiveSec=5min
AccuracySec=30s
""")


def render_wanted() -> str:
    """Render the drop-in that starts the timer at boot."""
    return sealed(f"{_HEAD}[Unit]\nWants={TIMER.name}\n")


def installation(tree: HostTree, named: str | None, program: str | None) -> ChangeFiles:
    """The request to install the timer.

    Raises:
        Refusal: systemd does not run this host, vfiomgr is not an installed command, the
            directory is not found, or a unit was edited.
    """
    directory = find_directory(tree, named)
    edited = next((path for path in FILES if _is_edited(tree.read_text(path))), None)
    if edited is not None:
        message = f"cannot replace {edited}: it differs from what vfiomgr writes"
        refuse("metrics-edited", edited, message, f"check it, then: rm {edited}")
    if program is None:
        message = "cannot install a timer: systemd not found, or vfiomgr is not installed"
        remedy = f"run `vfiomgr metrics --output {directory}/{NAME}` regularly, e.g. with cron"
        refuse("not-installed", "vfiomgr", message, remedy)
    output = directory / NAME
    texts = (render_service(program, output), render_wanted(), render_timer())
    changes = [
        FileChange(path, tree.read_text(path), text)
        for path, text in zip(FILES, texts, strict=True)
    ]
    before = installed_output(tree)
    if before not in (None, output):
        changes.append(FileChange(before, tree.read_text(before), None))
    changes = [change for change in changes if change.before != change.after]
    already = (f"the timer is already installed and writes {output}",)
    summary = f"write metrics to {output} every five minutes"
    return ChangeFiles(summary, tuple(changes), (LOCK,), already=already)


def removal(tree: HostTree) -> ChangeFiles:
    """The request to remove the timer, its metrics, and the record of devices."""
    changes = tuple(removals(tree))
    already = ("the timer for metrics is not installed",)
    notes = tuple(edited_notes(tree))
    return ChangeFiles("remove the timer for metrics", changes, (LOCK,), notes, already)


def removals(tree: HostTree) -> Iterator[FileChange]:
    """The removal of each file, the timer first; units that were edited stay."""
    output = installed_output(tree)
    for path in (*reversed(FILES), *((output,) if output else ()), DEVICES):
        text = tree.read_text(path)
        if text is not None and not (path in FILES and _is_edited(text)):
            yield FileChange(path, text, None)


def edited_notes(tree: HostTree) -> Iterator[str]:
    """A note for each unit that stays, as it was edited."""
    for path in FILES:
        if _is_edited(tree.read_text(path)):
            yield f"{path} stays: it differs from what vfiomgr writes; check it, then: rm {path}"


def _is_edited(text: str | None) -> bool:
    return text is not None and not is_sealed(text)


def installed_output(tree: HostTree) -> HostPath | None:
    """The file that the installed service writes."""
    found = _OUTPUT.search(tree.read_text(SERVICE) or "")
    return None if found is None else HostPath(found[1])
