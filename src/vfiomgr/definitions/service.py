"""What starts vGPUs by themselves: units of systemd, and a rule of udev (mdevctl has its own).

The service is for all vGPUs, once a boot. Its instance is for one parent, when that registers with
the kernel (mdev_register_parent sends a `change` event with MDEV_STATE): what a person has stopped
on another parent since stays stopped.
"""

from __future__ import annotations

from vfiomgr.persistence.model import RULES, SANDBOX, UNITS, require_plain

SERVICE = UNITS / "vfiomgr-vgpu.service"
INSTANCE = UNITS / "vfiomgr-vgpu@.service"
WANTED = UNITS / "multi-user.target.d" / "vfiomgr-vgpu.conf"
"""Has systemd start the service at boot; a file, where `systemctl enable` would make a link."""
RULE = RULES / "61-vfiomgr-vgpu.rules"
FILES = (SERVICE, INSTANCE, WANTED, RULE)

_HEAD = "# vfiomgr: removed with the last vGPU that is defined to start by itself.\n"
_AFTER = "systemd-modules-load.service nvidia-vgpud.service nvidia-vgpu-mgr.service"
_BEFORE = (
    "libvirtd.service virtqemud.service virtnodedevd.service "
    "kubelet.service containerd.service crio.service"
)


def render_service(program: str) -> str:
    """The unit for a boot, before those who hand vGPUs to guests.

    Raises:
        Refusal: a path that would have to be quoted.

    """
    return f"""\
{_HEAD}[Unit]
Description=vGPUs that are defined to start by themselves
After={_AFTER}
Before={_BEFORE}

[Service]
Type=oneshot
ExecStart={require_plain(program)} vgpu restore --boot
{SANDBOX}"""


def render_instance(program: str) -> str:
    """The unit for one parent, whose name is the instance's.

    Raises:
        Refusal: a path that would have to be quoted.

    """
    return f"""\
{_HEAD}[Unit]
Description=vGPUs of %i that are defined to start by themselves
After={_AFTER}

[Service]
Type=oneshot
ExecStart={require_plain(program)} vgpu restore --boot --parent %i
{SANDBOX}"""


def render_wanted() -> str:
    """The drop-in that makes the service part of a boot."""
    return f"{_HEAD}[Unit]\nWants={SERVICE.name}\n"


def render_registration_rule() -> str:
    """The rule that starts an instance for each parent that has definitions.

    No SYSTEMD_WANTS: systemd acts on it when a device comes, and not when it registers again.
    """
    unit = INSTANCE.name.replace("@", "@$kernel")
    return f"""\
{_HEAD}ACTION=="change", ENV{{MDEV_STATE}}=="registered", TEST=="/etc/mdevctl.d/$kernel", \\
  RUN+="/bin/systemctl --no-block start {unit}"
"""
