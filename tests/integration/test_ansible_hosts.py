"""ansible-playbook over SSH on two guests of the laboratory, from the installation to the removal.

`VFIOMGR_LAB_EVERY_MOMENT=1 pytest tests/integration/test_ansible_hosts.py -rP` also shows what the
playbooks print.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.test_ansible import Ansible, installed_collection
from tests.lab.libvirtd import URI
from tests.lab.ssh import Host, hosts
from tests.lab.topology import ALL, CURRENT_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.installed import Built

pytestmark = pytest.mark.thorough
_PLAYBOOKS = Path(__file__).parent / "playbooks"
_GPUS = (ALL.addresses["gpu"], ALL.addresses["twin"])
_PLACES = (
    "/etc /usr/bin /usr/lib/vfiomgr /usr/lib/systemd /usr/share/doc /usr/share/man/man1"
    " /usr/share/bash-completion /usr/share/zsh /usr/share/fish"
    " /var/lib/vfiomgr /var/cache/vfiomgr /run/vfiomgr"
)
"""Where the package and the commands write."""
_DOMAIN = "win"
_REST = """\
<memory unit='MiB'>64</memory>
<os><type arch='x86_64' machine='q35'>hvm</type></os>
<features><acpi/></features>
"""
_OF_DPKG = {"/etc/ld.so.cache"}
_AT_WORK = (
    "until [ $(cat /var/lib/vfiomgr/journal/*.jsonl 2>/dev/null"
    ' | grep -c \'"event":"done"\') -ge 4 ]; do sleep 0.05; done; '
)
"""Waits until vfiomgr is in the middle of a run."""
_UNREACHABLE = 4
"""Exit status of ansible-playbook if a host is unreachable, even if tasks failed on others."""
_KILL = _AT_WORK + "kill -9 $(pgrep -f 'vfiomgr --[f]ormat')"
_CUT = _AT_WORK + "kill -9 $(pgrep -f 'sshd: root@[p]ts')"
"""The brackets keep a pattern from the shell that has it as an argument."""
_RECAP = re.compile(
    r"^(?P<host>\w+) +: ok=\d+ +changed=(\d+) +unreachable=(\d+) +failed=(\d+)", re.MULTILINE
)


class Fleet:
    """Two hosts, and the playbooks that run on them."""

    def __init__(self, ansible: Ansible, found: list[Host]) -> None:
        self.hosts = found
        self._ansible = ansible
        self.before = self.files()
        inventory = {"all": {"hosts": {host.name: host.variables for host in found}}}
        self._inventory = ansible.place / "inventory.json"
        self._inventory.write_text(json.dumps(inventory))

    def play(self, name: str, *options: str, status: int = 0) -> str:
        """What a playbook prints, which is shown too."""
        command = ("ansible-playbook", "-i", str(self._inventory), str(_PLAYBOOKS / name))
        said = self._ansible.run(*command, *options, status=status)
        print(f"$ ansible-playbook {name} {' '.join(options)}\n{said}")
        return said

    def domain(self) -> str:
        """The definition of the domain on the first host."""
        return self.hosts[0].run(f"virsh --connect {URI} dumpxml --inactive {_DOMAIN}")

    def files(self) -> list[set[str]]:
        """The files of each host."""
        listing = f"find {_PLACES} 2>/dev/null"
        return [set(host.run(listing, must_work=False).split()) - _OF_DPKG for host in self.hosts]

    def drivers(self) -> list[str]:
        """The drivers of the graphics cards of all hosts."""
        links = " ".join(f"/sys/bus/pci/devices/{address}/driver" for address in _GPUS)
        text = "".join(host.run(f"readlink {links}") for host in self.hosts)
        return [Path(line).name for line in text.split()]


def recap(said: str) -> dict[str, tuple[int, int, int]]:
    """By host, how many tasks changed something, did not reach it, and failed."""
    found = _RECAP.findall(said)
    return {host: (int(changed), int(lost), int(failed)) for host, changed, lost, failed in found}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two guests, and Ansible with the collection as it is built."""
    ansible = installed_collection(tmp_path_factory.mktemp("ansible"))
    with hosts(ALL, tmp_path_factory.mktemp("keys"), "one", "two") as found:
        define(found[0])
        yield Fleet(ansible, found)


def define(host: Host) -> None:
    """Start libvirtd on a host, with a domain that has no device."""
    root = Path(__file__).parents[2]
    environment = f"{CURRENT_VARIABLE}={ALL.name}"
    host.run(f"cd {root} && {environment} {sys.executable} -m tests.lab.libvirtd")
    definition = f"<domain type='qemu'><name>{_DOMAIN}</name>{_REST}</domain>"
    host.run(f'echo "{definition}" > /run/lab/domain.xml')
    host.run(f"virsh --connect {URI} define /run/lab/domain.xml")


def test_a_layout_is_completed_after_a_kill_and_a_cut_and_then_left_alone(fleet: Fleet) -> None:
    """With the command of this checkout, which the guests see."""
    options = ("-e", f"program={Path(sys.executable).with_name('vfiomgr')}")
    planned = fleet.play("layout.yaml", "--check", "--diff", *options)
    assert recap(planned) == {"one": (2, 0, 0), "two": (2, 0, 0)}
    assert planned.count("+0000:01:00.0 (") == len(fleet.hosts)
    assert set(fleet.drivers()) == {"bochs-drm"}

    one, two = fleet.hosts
    accidents = [one.start(_KILL), two.start(_CUT)]
    broken = fleet.play("layout.yaml", *options, status=_UNREACHABLE)
    assert recap(broken) == {"one": (0, 0, 1), "two": (0, 1, 0)}
    assert "vfiomgr was killed by signal 9. Remedy: run the task again" in broken
    for accident in accidents:
        accident.wait()

    mended = recap(fleet.play("layout.yaml", *options))
    assert {(lost, failed) for _, lost, failed in mended.values()} == {(0, 0)}
    assert set(fleet.drivers()) == {"vfio-pci"}
    assert recap(fleet.play("layout.yaml", *options)) == {"one": (0, 0, 0), "two": (0, 0, 0)}


def test_a_domain_gets_a_device_once_and_can_start_with_it(fleet: Fleet) -> None:
    """And loses it once."""
    program = Path(sys.executable).with_name("vfiomgr")
    options = [f"program={program}", f"domain={_DOMAIN}", f"device={_GPUS[0]}"]

    def play(state: str, *more: str) -> dict[str, tuple[int, int, int]]:
        named = [word for each in (*options, f"state={state}") for word in ("-e", each)]
        return recap(fleet.play("device.yaml", *named, *more))

    before = fleet.domain()
    assert play("present", "--check") == {"one": (1, 0, 0)}
    assert fleet.domain() == before
    assert play("present") == {"one": (1, 0, 0)}
    assert fleet.domain().count("<hostdev ") == len(("display", "audio"))
    assert play("present") == {"one": (0, 0, 0)}
    assert play("absent") == {"one": (1, 0, 0)}
    assert play("absent") == {"one": (0, 0, 0)}
    assert "<hostdev " not in fleet.domain()


def test_nothing_is_left_after_the_removal(fleet: Fleet, built: Built) -> None:
    """Of the package, and of what the test before has left on the hosts."""
    fleet.play("install.yaml", "-e", f"package={built.deb}")
    assert all("/usr/bin/vfiomgr" in files for files in fleet.files())
    fleet.play("remove.yaml")
    assert set(fleet.drivers()) == {"bochs-drm"}
    after = fleet.files()
    for host, there, left in zip(fleet.hosts, fleet.before, after, strict=True):
        print(f"{host.name}: {len(there)} files before, {len(left)} after the removal")
    assert after == fleet.before
