"""systemd units and a udev rule that start autostart vGPUs (mdevctl has its own rule).

The service starts all vGPUs once per boot. Its instance starts those of one parent when it
registers with the kernel (mdev_register_parent sends a `change` event with MDEV_STATE), so that
vGPUs stopped on other parents stay stopped.
"""

from __future__ import annotations

from vfiomgr.persistence.model import RULES, SANDBOX, UNITS, require_plain

SERVICE = UNITS / "vfiomgr-vgpu.service"
INSTANCE = UNITS / "vfiomgr-vgpu@.service"
WANTED = UNITS / "multi-user.target.d" / "vfiomgr-vgpu.conf"
"""Starts the service at boot; a file instead of the link that `systemctl enable` creates."""
RULE = RULES / "61-vfiomgr-vgpu.rules"
FILES = (SERVICE, INSTANCE, WANTED, RULE)

_HEAD = "# vfiomgr: removed with the last autostart vGPU.\n"
_AFTER = "systemd-modules-load.service nvidia-vgpud.service nvidia-vgpu-mgr.service"
_BEFORE = (
    "libvirtd.service virtqemud.service virtnodedevd.service "
    "kubelet.service containerd.service crio.service"
)


def render_service(program: str) -> str:
    """Render the unit for the boot, which runs before services that assign vGPUs to guests.

    Raises:
        Refusal: the path would need quoting.

    """
    return f"""\
{_HEAD}[Unit]
Description=Start all autostart vGPUs
After={_AFTER}
Before={_BEFORE}

[Service]
Type=oneshot
ExecStart={require_plain(program)} vgpu restore --boot
{SANDBOX}"""


def render_instance(program: str) -> str:
    """Render the unit for one parent, named by the instance.

    Raises:
        Refusal: the path would need quoting.

    """
    return f"""\
{_HEAD}[Unit]
Description=Start all autostart vGPUs of %i
After={_AFTER}

[Service]
Type=oneshot
ExecStart={require_plain(program)} vgpu restore --boot --parent %i
{SANDBOX}"""


def render_wanted() -> str:
    """Render the drop-in that starts the service at boot."""
    return f"{_HEAD}[Unit]\nWants={SERVICE.name}\n"


def render_registration_rule() -> str:
    """Render the rule that starts an instance for each parent with definitions.

    SYSTEMD_WANTS is not used: it applies when a device appears, not when it registers again.
    """
    unit = INSTANCE.name.replace("@", "@$kernel")
    return f"""\
{_HEAD}ACTION=="change", ENV{{MDEV_STATE}}=="registered", TEST=="/etc/mdevctl.d/$kernel", \\
  RUN+="/bin/systemctl --no-block start {unit}"
"""
