"""Starts the real libvirtd inside a guest: `python -m tests.lab.libvirtd`, or start()."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import DEVNULL

from tests.lab.errors import LabError
from tests.lab.progress import Patience
from tests.lab.topology import current

URI = "qemu:///system"
_CONFIGURATION = Path("/etc/libvirt")
_STATE = (Path("/var/log/libvirt"), Path("/var/lib/libvirt"), Path("/var/cache/libvirt"))
_LOG = Path("/run/lab/libvirtd.log")
PID = Path("/run/lab/libvirtd.pid")
_LOGGER_PID = Path("/run/lab/virtlogd.pid")
_ACCOUNT = "libvirt-qemu"
_LIMIT = 120.0
_OTHER_EMULATORS = (Path("/usr/bin/qemu-system-i386"),)
"""What libvirtd would ask all that they can, too, at its first domain: as long again."""
# Without systemd there is no machine to own a cgroup, and the guest's root is the only user.
_QEMU_CONF = """\
namespaces = []
cgroup_controllers = []
user = "root"
group = "root"
security_driver = "none"
"""
_LIBVIRTD_CONF = f"""\
unix_sock_group = "root"
auth_unix_ro = "none"
auth_unix_rw = "none"
log_outputs = "2:file:{_LOG}"
"""


def start() -> str:
    """Start virtlogd and libvirtd in this guest, and return the URI when they answer."""
    if current() is None:
        reason = "libvirtd is started inside a guest only, not on the machine"
        raise LabError(reason)
    if not _answers():
        _configure()
        for emulator in _OTHER_EMULATORS:
            emulator.unlink(missing_ok=True)
        _add_account("/etc/passwd", f"{_ACCOUNT}:x:64055:64055::/var/lib/libvirt:/usr/sbin/nologin")
        _add_account("/etc/group", f"{_ACCOUNT}:x:64055:")
        if not _runs(_LOGGER_PID):  # it stays where libvirtd was ended to start again
            subprocess.run(["virtlogd", "--daemon", "--pid-file", str(_LOGGER_PID)], check=True)
        subprocess.run(["libvirtd", "--daemon", "--pid-file", str(PID)], check=True)
        _wait()
        # The first that asks waits while QEMU is asked all that it can: longer than a user would.
        subprocess.run(["virsh", "--connect", URI, "domcapabilities"], check=True, stdout=DEVNULL)
    return URI


def stop() -> None:
    """End libvirtd where it runs, so that the next one finds what was installed since."""
    if not PID.exists():
        return
    process = Path("/proc", PID.read_text().strip())
    if process.exists():
        os.kill(int(process.name), signal.SIGTERM)
    patience = Patience(_LIMIT, int(process.name))
    while process.exists():
        if patience.is_over:
            reason = f"libvirtd did not end within {_LIMIT:.0f} s"
            raise LabError(reason)
        time.sleep(0.2)


def _add_account(database: str, line: str) -> None:
    """Add what libvirtd was compiled to look up, and libvirt-daemon-system would have made."""
    path = Path(database)
    present = path.read_text()
    if not any(entry.startswith(f"{_ACCOUNT}:") for entry in present.splitlines()):
        path.write_text(f"{present}{line}\n")


def _configure() -> None:
    """Write the daemons' configuration, into the memory of the guest."""
    for directory in (_CONFIGURATION, *_STATE):
        directory.mkdir(parents=True, exist_ok=True)
    (_CONFIGURATION / "qemu.conf").write_text(_QEMU_CONF)
    (_CONFIGURATION / "libvirtd.conf").write_text(_LIBVIRTD_CONF)


def _runs(pid_file: Path) -> bool:
    """Return whether the daemon of a pid file is there."""
    return pid_file.exists() and Path("/proc", pid_file.read_text().strip()).exists()


def _answers() -> bool:
    """Return whether libvirtd lists its domains."""
    command = ["virsh", "--connect", URI, "list"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _wait() -> None:
    """Return when libvirtd answers."""
    process = Path("/proc", PID.read_text().strip())
    patience = Patience(_LIMIT, int(process.name))
    while not _answers():
        # A driver that does not initialise ends the daemon after it has gone to the background.
        if not process.exists() or patience.is_over:
            log = _LOG.read_text(errors="replace") if _LOG.exists() else "(no log)"
            reason = f"libvirtd ended or did not answer within {_LIMIT:.0f} s:\n{log}"
            raise LabError(reason)
        time.sleep(0.2)


if __name__ == "__main__":
    print(start())
    sys.exit(0)
