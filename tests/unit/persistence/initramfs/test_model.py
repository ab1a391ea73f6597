from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tests.unit.devices import pci_device
from vfiomgr.persistence.model import (
    Initramfs,
    PersistedBinding,
    render_hook,
    render_rule,
    rule_file,
)

if TYPE_CHECKING:
    from pathlib import Path

GPU = pci_device()
BINDING = PersistedBinding(GPU.identity, "vfio-pci", "vfio_pci")
SHELL = shutil.which("sh") or "/bin/sh"


def test_what_an_initramfs_brings() -> None:
    image = Initramfs("dracut", ("bochs",), ("03", "0c03"), ("nvidia_drm",))
    assert image.brings("bochs", "ff0000")
    assert image.brings("nvidia", "030200")
    assert image.brings(None, "0c0330")
    assert not image.brings("nvidia-drm", "030200")
    assert not image.brings("snd_hda_intel", "040300")
    assert not Initramfs("dracut").brings("nvidia", "030200")


def test_hooks_name_the_rules_and_the_drivers() -> None:
    dracut = render_hook("dracut", [BINDING])
    assert f'install_items+=" {rule_file(GPU.address)} "' in dracut
    assert 'add_drivers+=" vfio_pci "' in dracut
    assert "MODULES+=(vfio_pci)" in render_hook("mkinitcpio", [BINDING])


def test_transactional_update_has_the_hook_of_dracut() -> None:
    assert render_hook("transactional-update", [BINDING]) == render_hook("dracut", [BINDING])


def test_the_hook_of_initramfs_tools_copies_rules_and_their_drivers(tmp_path: Path) -> None:
    """The script runs as it is, below another root."""
    source, target = tmp_path / "rules.d", tmp_path / "image"
    source.mkdir()
    name = rule_file(GPU.address).name
    (source / name).write_text(render_rule(replace(BINDING, module="mlx5_vfio_pci")))
    functions = tmp_path / "hook-functions"
    functions.write_text('manual_add_modules() { echo "$@"; }\n')
    text = render_hook("initramfs-tools", [BINDING])
    text = text.replace("/usr/share/initramfs-tools/hook-functions", str(functions))
    text = text.replace("in /etc/udev/rules.d", f"in {source}")
    script = tmp_path / "hook"
    script.write_text(text)
    environment = {"DESTDIR": str(target), "PATH": "/usr/bin:/bin"}

    def run(*arguments: str) -> str:
        command = [SHELL, "-eu", str(script), *arguments]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert run("prereqs") == "udev\n"
    assert run("") == "mlx5_vfio_pci\n"
    assert (target / "etc/udev/rules.d" / name).read_text() == (source / name).read_text()
