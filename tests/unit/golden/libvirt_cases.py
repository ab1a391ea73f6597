"""What is typed for the golden files about libvirt; tests/golden/commands has the answers."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.fakes.libvirt_node import node_uri
from tests.fakes.vgpu_hosts import t4_host
from tests.unit.golden.hosts import tunable_host
from tests.unit.golden.transcripts import Place, Scenario
from tests.unit.libvirt.domain_texts import RECORDED
from tests.unit.libvirt.migration.hosts import OTHER_VF, network, network_host, vgpu_host
from tests.unit.libvirt.migration.test_migration import ONE_VF, ONE_VGPU
from tests.unit.libvirt.preflight.situations import xml
from tests.unit.libvirt.test_hook_commands import OPTED_IN
from tests.unit.libvirt.test_hook_commands import xml as hooked
from tests.unit.libvirt.test_nodedev_commands import ACTIVE, IDLE, Libvirt
from vfiomgr.snapshot.document import write_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vfiomgr.libvirt.client.connection import MdevState, NodeMdev

TUNED = OPTED_IN.replace("bind=", "isolate-cpus='yes' hugepages='yes' interrupts='yes' bind=") + (
    "<memoryBacking><hugepages/></memoryBacking>"
    "<vcpu>1</vcpu><cputune><vcpupin vcpu='0' cpuset='2-3'/></cputune>"
)
CONNECTION = "vfiomgr.libvirt.client.connection.Connection"
UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
DOMAIN = """\
<domain type='test'>
  <name>{name}</name>
  <uuid>{uuid}</uuid>
  <memory unit='MiB'>64</memory>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <devices>
    <controller type='pci' index='0' model='pcie-root'/>
    <controller type='pci' index='1' model='pcie-root-port'/>
    <controller type='pci' index='2' model='pcie-root-port'/>
    {devices}
  </devices>
</domain>
"""
HOSTDEV = """\
<hostdev mode='subsystem' type='pci' managed='no'>
      <source><address domain='0' bus='0x02' slot='0x00' function='0x{}'/></source>
    </hostdev>"""
WIN = DOMAIN.format(
    name="win",
    uuid="5d7e9c3a-6b0f-4f0e-9a43-0e2f5a1b7c11",
    devices="".join(map(HOSTDEV.format, "01")),
)
FRESH = DOMAIN.format(name="fresh", uuid="5d7e9c3a-6b0f-4f0e-9a43-0e2f5a1b7c12", devices="")
REQUEST = "guest --memory 2G --vcpus 2 --libvirt-version 9.0"


def as_command(place: Place) -> None:
    """An installed vfiomgr, which services can run."""
    place.patch.setattr("vfiomgr.tuning.apply.own_program", lambda: "/usr/bin/vfiomgr")


def with_libvirt(place: Place) -> None:
    """Libvirt's test driver with two domains, on a host whose first GPU is bound."""
    uri = node_uri(place.directory)
    node = place.directory / "libvirt-node.xml"
    node.write_text(node.read_text().replace("</node>", f"{WIN}</node>"))
    place.patch.setenv("VFIOMGR_CONNECT", uri)
    for name in ("attach", "detach"):  # which the test driver has not
        place.patch.setattr(f"vfiomgr.libvirt.client.connection.Connection.{name}", lambda *_: None)


class Defining(Libvirt):
    """A libvirt that keeps the mediated device once it is told of it."""

    def mdevs(self) -> tuple[NodeMdev, ...]:
        """None, until then."""
        return super().mdevs() if self.calls else ()

    def define_mdev(self, _element: str, uuid: str, *, autostart: bool) -> None:
        """Asked for."""
        self.calls.append(f"define {uuid} {autostart}")


def with_mdev(state: MdevState, kind: type[Libvirt] = Libvirt) -> Callable[[Place], None]:
    """A libvirt that knows one mediated device."""

    def prepare(place: Place) -> None:
        fake = kind(state)

        @contextmanager
        def connected(_uri: str, **_options: object) -> Iterator[Libvirt]:
            yield fake

        place.patch.setattr("vfiomgr.libvirt.commands.nodedev.connected", connected)

    return prepare


LIBVIRT_SCENARIOS = (
    Scenario(
        "libvirt hostdev",
        """
        libvirt hostdev 02:00.0
        .bind 02:00.0
        libvirt hostdev 02:00.0
        libvirt hostdev 02:00.0 --function-only --boot-order 1 --rom off
        libvirt hostdev 00:02.0 --managed
        libvirt hostdev 02:00.0 --iommufd --libvirt-version 9.0
        libvirt hostdev 99:00.0
        """,
        in_json=True,
    ),
    Scenario(
        "libvirt domain",
        f"""
        libvirt domain {REQUEST} --device 02:00.0
        libvirt domain {REQUEST} --device 02:00.0 --os windows --tpm --disk /vm/a.qcow2 --explain
        libvirt domain {REQUEST} --device 02:00.0 --desktop --looking-glass 2560x1440
        libvirt domain {REQUEST} --device 00:02.0,managed
        libvirt domain {REQUEST} --device 02:00.0,fast
        """,
    ),
    Scenario(
        "qemu args",
        """
        qemu args 02:00.0 --qemu-version 9.2
        qemu args 02:00.0,rom=off --readconfig --firmware bios --accel qemu --qemu-version 9.2
        qemu args 02:00.0 --check
        qemu args 02:00.0,managed --qemu-version 9.2
        """,
        in_json=True,
    ),
    Scenario(
        "libvirt edit",
        """
        libvirt edit win11.xml --add 02:00.0 --dry-run
        libvirt edit win11.xml --add 02:00.0
        libvirt edit win11.xml --add 02:00.0
        libvirt edit win11.xml --remove 02:00.0
        libvirt edit none.xml --add 02:00.0
        """,
        files={"win11.xml": RECORDED["virt-manager"].decode()},
        in_json=True,
    ),
    Scenario(
        "check domain",
        "check domain good.xml\n.bind 0000:01:00.0\ncheck domain good.xml"
        "\ncheck domain bad.xml\ncheck domain",
        files={"good.xml": xml(before=""), "bad.xml": "<domain"},
    ),
    Scenario(
        "check migration",
        """
        check migration one.xml --snapshot host1.json --to host2.json --to host3.json
        check migration one.xml --snapshot host1.json --to host1.json
        check migration vgpu.xml --snapshot gpu1.json --to gpu2.json
        check migration good.xml
        .bind 0000:01:00.0
        check migration good.xml
        """,
        files={
            "good.xml": xml(before=""),
            "one.xml": ONE_VF,
            "vgpu.xml": ONE_VGPU,
            "host1.json": write_snapshot(network_host(boot_id="e5a0")),
            "host2.json": write_snapshot(network_host(network(OTHER_VF, driver="mlx5_core"))),
            "host3.json": write_snapshot(network_host()),
            "gpu1.json": write_snapshot(vgpu_host(2)),
            "gpu2.json": write_snapshot(vgpu_host(version="590.10")),
        },
    ),
    Scenario(
        "libvirt edit",
        """
        libvirt edit fresh.xml --define --dry-run
        libvirt edit fresh.xml --define
        libvirt edit fresh.xml --define
        libvirt edit bad.xml --define
        """,
        files={"fresh.xml": FRESH, "bad.xml": "<domain"},
        prepare=with_libvirt,
        case="define",
        in_json=True,
    ),
    Scenario(
        "libvirt attach",
        """
        libvirt attach win 05:00.0 --config
        .bind 0000:01:00.0
        libvirt attach win 0000:01:00.0 --config --dry-run
        libvirt attach win 0000:01:00.0 --config
        libvirt attach none 0000:01:00.0
        """,
        prepare=with_libvirt,
        in_json=True,
    ),
    Scenario(
        "libvirt detach",
        """
        libvirt detach win 02:00.0 --config --dry-run
        libvirt detach win 02:00.0 --config
        libvirt detach win 0000:01:00.0 --config
        libvirt detach none 02:00.0
        """,
        prepare=with_libvirt,
        in_json=True,
    ),
    Scenario(
        "libvirt hook uninstall",
        """
        libvirt hook uninstall win --dry-run
        libvirt hook uninstall win
        libvirt hook uninstall none
        """,
        prepare=with_libvirt,
        case="domain",
    ),
    Scenario(
        "libvirt hook install",
        "libvirt hook install win --isolate-cpus --hugepages --interrupts",
        prepare=with_libvirt,
        case="tuned",
    ),
    Scenario(
        "libvirt hook install",
        """
        libvirt hook install win --dry-run
        libvirt hook install win
        libvirt hook install none
        """,
        prepare=with_libvirt,
        case="domain",
        in_json=True,
    ),
    Scenario(
        "libvirt hook install",
        """
        libvirt hook install --dry-run
        libvirt hook install
        libvirt hook install
        """,
        journals={"install-hook": "install-hook"},
    ),
    Scenario(
        "libvirt hook run",
        """
        libvirt hook run win prepare begin -
        list
        libvirt hook run win release end -
        libvirt hook run win started begin -
        """,
        stdin=hooked("0000:01:00.0"),
    ),
    Scenario(
        "libvirt hook run",
        "libvirt hook run win prepare begin -",
        stdin=hooked("0000:01:00.0"),
        case="prepared",
        keeps=True,
    ),
    Scenario(
        "libvirt hook run",
        """
        libvirt hook run win prepare begin -
        libvirt hook run win release end -
        """,
        tunable_host,
        prepare=as_command,
        stdin=hooked("0000:01:00.0", TUNED),
        case="tuned",
        journals={"tune-host": "tune-host", "restore-host": "restore-host"},
    ),
    Scenario(
        "libvirt hook run",
        "libvirt hook run win prepare begin -",
        stdin=hooked("0000:00:02.0"),
        case="refused",
    ),
    Scenario(
        "libvirt hook uninstall",
        """
        .libvirt hook install
        libvirt hook uninstall --dry-run
        libvirt hook uninstall
        libvirt hook uninstall
        """,
        prepare=with_libvirt,
        journals={"uninstall-hook": "uninstall-hook"},
    ),
    Scenario(
        "vgpu define",
        f"""
        vgpu define {UUID} --libvirt --parent 21:00.0 --type nvidia-231 --dry-run
        vgpu define {UUID} --libvirt --parent 21:00.0 --type nvidia-231
        vgpu define {UUID} --libvirt --parent 21:00.0 --type nvidia-231
        vgpu define {UUID} --libvirt --parent 21:00.0 --type nvidia-232
        vgpu define {UUID} --libvirt --parent 21:00.0 --type nvidia-9
        vgpu define x --libvirt --parent 21:00.0 --type nvidia-231
        """,
        t4_host,
        prepare=with_mdev(IDLE, Defining),
        case="libvirt",
        in_json=True,
    ),
    Scenario(
        "vgpu list",
        "vgpu list --libvirt",
        t4_host,
        prepare=with_mdev(ACTIVE),
        case="libvirt",
        in_json=True,
    ),
    Scenario(
        "vgpu list",
        "vgpu list --libvirt\nvgpu list --connect foo:///bar",
        t4_host,
        prepare=with_libvirt,
        case="libvirt-none",
    ),
    *(
        Scenario(
            f"vgpu {verb}",
            f"""
            vgpu {verb} {UUID} --libvirt --dry-run
            vgpu {verb} {UUID} --libvirt
            vgpu {verb} {UUID.replace("f", "0")} --libvirt
            """,
            t4_host,
            prepare=with_mdev(state),
            case="libvirt",
        )
        for verb, state in (("start", IDLE), ("stop", ACTIVE), ("undefine", IDLE))
    ),
    Scenario(
        "libvirt list",
        """
        libvirt list
        libvirt list --domain test
        libvirt list --domain none
        """,
        prepare=with_libvirt,
        in_json=True,
    ),
)
