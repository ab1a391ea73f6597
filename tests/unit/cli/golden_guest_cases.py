"""What is typed for the golden files about guests: libvirt, Kata, CDI, runtimes and bundles."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.fakes.containerd import Containerd
from tests.fakes.hosts import workstation
from tests.fakes.libvirt_node import node_uri
from tests.fakes.vgpu_hosts import t4_host
from tests.unit.adapters.domain_texts import RECORDED
from tests.unit.adapters.oci_texts import TEXTS
from tests.unit.cli.goldens import Place, Scenario
from tests.unit.cli.test_kata_config import install
from tests.unit.cli.test_libvirt_hook import xml as hooked
from tests.unit.cli.test_libvirt_nodedev import ACTIVE, IDLE, Libvirt
from tests.unit.kata_nodes import POD, KataNode
from tests.unit.planner.cdi.cases import edits
from tests.unit.planner.preflight.situations import xml
from tests.unit.runtimes import CONFIGURATION, MAIN, SHIM, V3

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.adapters.libvirt.nodedev import MdevState

CONNECTION = "vfiomgr.adapters.libvirt.connection.Connection"
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
WISH = "guest --memory 2G --vcpus 2 --libvirt-version 9.0"
NODE = {SHIM.lstrip("/"): "", CONFIGURATION.lstrip("/"): "", MAIN.lstrip("/"): V3}
PGPU = "--kind nvidia.com/pgpu"
CDI = {
    "etc/cdi/nvidia.yaml": edits("0.7.0", env=["A=1"], additionalGids=[44]),
    "etc/cdi/broken.json": "{",
}


def with_libvirt(place: Place) -> None:
    """Libvirt's test driver with two domains, on a host whose first GPU is bound."""
    uri = node_uri(place.directory)
    node = place.directory / "libvirt-node.xml"
    node.write_text(node.read_text().replace("</node>", f"{WIN}</node>"))
    place.patch.setenv("VFIOMGR_CONNECT", uri)
    for name in ("attach", "detach"):  # which the test driver has not
        place.patch.setattr(
            f"vfiomgr.adapters.libvirt.connection.Connection.{name}", lambda *_: None
        )


def with_mdev(state: MdevState) -> Callable[[Place], None]:
    """A libvirt that knows one mediated device."""

    def prepare(place: Place) -> None:
        fake = Libvirt(state)

        @contextmanager
        def connected(_uri: str, **_options: object) -> Iterator[Libvirt]:
            yield fake

        place.patch.setattr("vfiomgr.cli.libvirt_nodedev.connected", connected)

    return prepare


def with_containerd(place: Place) -> None:
    """A containerd that reads what is written, and an OCI runtime; a copy has a fixed name."""
    Containerd("2.1.9").install(place.kernel)
    place.kernel.sysfs.put_bytes("/usr/bin/crun", b"", 0o755)
    place.kernel.sysfs.put_bytes(SHIM, b"", 0o755)
    place.patch.setattr("vfiomgr.executor.runtimes._stamp", lambda: "20261121T120000Z")


def kata_host(directory: Path) -> FakeKernel:
    """A node of a cluster with a GPU for pods and one on its driver."""
    node = KataNode(directory, "go")
    node.add_gpus(1, with_audio=True)
    node.add_gpu(2, driver="nvidia", numa_node=0)
    node.publish()
    return node.kernel


def kata_build_host(directory: Path) -> FakeKernel:
    """A workstation with Kata's own build."""
    kernel = workstation(directory)
    install(kernel)
    return kernel


def with_bundle(place: Place) -> None:
    """A bundle as `runc spec` makes it."""
    (place.directory / "bundle").mkdir()
    (place.directory / "bundle/config.json").write_text(TEXTS["runc spec"])


LIBVIRT_SCENARIOS = (
    Scenario(
        "libvirt hostdev",
        """
        libvirt hostdev 02:00.0
        .bind 02:00.0
        libvirt hostdev 02:00.0
        libvirt hostdev 02:00.0 --only --boot-order 1 --rom off
        libvirt hostdev 00:02.0 --managed
        libvirt hostdev 02:00.0 --iommufd --libvirt-version 9.0
        libvirt hostdev 99:00.0
        """,
    ),
    Scenario(
        "libvirt domain",
        f"""
        libvirt domain {WISH} --device 02:00.0
        libvirt domain {WISH} --device 02:00.0 --os windows --tpm --disk /vm/a.qcow2 --explain
        libvirt domain {WISH} --device 00:02.0,managed
        libvirt domain {WISH} --device 02:00.0,fast
        """,
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
    ),
    Scenario(
        "libvirt preflight",
        "libvirt preflight good.xml\n.bind 0000:01:00.0\nlibvirt preflight good.xml"
        "\nlibvirt preflight bad.xml\nlibvirt preflight",
        files={"good.xml": xml(before=""), "bad.xml": "<domain"},
    ),
    Scenario(
        "libvirt define",
        """
        libvirt define fresh.xml --dry-run
        libvirt define fresh.xml
        libvirt define fresh.xml
        libvirt define bad.xml
        """,
        files={"fresh.xml": FRESH, "bad.xml": "<domain"},
        prepare=with_libvirt,
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
    ),
    Scenario(
        "libvirt detach",
        """
        libvirt detach win 02:00.0 --config --dry-run
        libvirt detach win 02:00.0 --config
        libvirt detach win 0000:01:00.0 --config
        """,
        prepare=with_libvirt,
    ),
    Scenario(
        "libvirt hook disable",
        "libvirt hook disable win --dry-run\nlibvirt hook disable win\nlibvirt hook disable none",
        prepare=with_libvirt,
    ),
    Scenario(
        "libvirt hook enable",
        "libvirt hook enable win --dry-run\nlibvirt hook enable win\nlibvirt hook enable none",
        prepare=with_libvirt,
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
        journals={"uninstall-hook": "uninstall-hook"},
    ),
    Scenario(
        "libvirt nodedev define",
        f"""
        libvirt nodedev define {UUID} --parent 21:00.0 --type nvidia-231 --dry-run
        libvirt nodedev define {UUID} --parent 21:00.0 --type nvidia-9
        libvirt nodedev define x --parent 21:00.0 --type nvidia-231
        """,
        t4_host,
        prepare=with_mdev(IDLE),
    ),
    Scenario("libvirt nodedev list", "libvirt nodedev list", t4_host, prepare=with_mdev(ACTIVE)),
    Scenario(
        "libvirt nodedev list",
        "libvirt nodedev list",
        t4_host,
        prepare=with_libvirt,
        case="none",
    ),
    *(
        Scenario(
            f"libvirt nodedev {verb}",
            f"""
            libvirt nodedev {verb} {UUID} --dry-run
            libvirt nodedev {verb} {UUID}
            libvirt nodedev {verb} {UUID.replace("f", "0")}
            """,
            t4_host,
            prepare=with_mdev(state),
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
    ),
)
KATA_SCENARIOS = (
    Scenario(
        "kata config",
        """
        kata config 02:00.0
        .bind 02:00.0
        kata config 02:00.0 --runtime go --dry-run --output 50.toml
        kata config 02:00.0 --runtime go --output 50.toml
        kata config 03:00.0
        kata config --kata-version x
        """,
        kata_build_host,
    ),
    Scenario(
        "kata install",
        """
        kata install --dry-run
        kata install
        kata install
        kata install --handler other
        kata install --for crio
        """,
        host_files=NODE,
        prepare=with_containerd,
        journals={"change-files": "change-files"},
    ),
    Scenario("kata install", "kata install", case="absent"),
    Scenario(
        "kata uninstall",
        """
        .kata install
        kata uninstall --dry-run
        kata uninstall
        kata uninstall
        kata uninstall --handler A
        """,
        host_files=NODE,
        prepare=with_containerd,
    ),
    Scenario(
        "kata runtimeclass",
        """
        kata runtimeclass --any-node
        kata runtimeclass --handler kata-vfio --default-memory 4G --node-selector a=b
        kata runtimeclass --handler A
        """,
    ),
    Scenario(
        "kata pod",
        """
        kata pod
        .bind 02:00.0
        kata pod 02:00.0 --deployment --name train --memory 16G
        kata pod 03:00.0
        kata pod --count 17
        """,
    ),
    Scenario(
        "kata explain",
        "kata explain pod.yaml\nkata explain 41:00.0\nkata explain 42:00.0\nkata explain none.yaml",
        kata_host,
        files={"pod.yaml": POD},
    ),
    Scenario(
        "kata run-command",
        """
        kata run-command 02:00.0
        .bind 02:00.0
        kata run-command 02:00.0 --image ubuntu --command 'ls /'
        kata run-command 02:00.0 --with docker
        kata run-command 03:00.0
        kata run-command 99:00.0
        """,
    ),
    Scenario("kata check-image", "kata check-image --all", kata_host),
    Scenario("kata check-image", "kata check-image 0000:01:00.0", case="absent"),
)
CONTAINER_SCENARIOS = (
    Scenario(
        "cdi generate",
        f"""
        cdi generate 02:00.0
        .bind 02:00.0
        cdi generate 02:00.0
        cdi generate {PGPU} --write --dry-run
        cdi generate {PGPU} --write
        cdi generate {PGPU} --write
        cdi generate --output pgpu.json --dry-run
        cdi generate --lifetime dynamic
        """,
        journals={"write-cdi": "write-cdi"},
    ),
    Scenario(
        "cdi list",
        f"cdi list\n.bind 02:00.0\n.cdi generate {PGPU} --write\ncdi list",
        host_files=CDI,
    ),
    Scenario(
        "cdi check",
        f".bind 02:00.0\n.cdi generate {PGPU} --write\ncdi check\ncdi check none.json",
        host_files=CDI,
    ),
    Scenario("cdi check", "cdi check", case="none"),
    Scenario(
        "cdi remove",
        f"""
        .bind 02:00.0 0000:01:00.0
        .cdi generate {PGPU} --write
        cdi remove 0000:01:00.0 --dry-run
        cdi remove 0000:01:00.0
        cdi remove --stale
        cdi remove --all
        cdi remove
        """,
        journals={"remove-cdi": "remove-cdi"},
    ),
    Scenario(
        "runtime configure",
        """
        runtime configure crun --path /usr/bin/crun --cdi --dry-run
        runtime configure crun --path /usr/bin/crun --cdi
        runtime configure crun --path /usr/bin/crun --cdi
        runtime configure none --path /usr/bin/none
        runtime configure a/b --path /usr/bin/crun
        """,
        host_files=NODE,
        prepare=with_containerd,
    ),
    Scenario(
        "runtime unconfigure",
        """
        .runtime configure crun --path /usr/bin/crun
        runtime unconfigure crun --dry-run
        runtime unconfigure crun
        runtime unconfigure crun
        runtime unconfigure a/b
        """,
        host_files=NODE,
        prepare=with_containerd,
    ),
    Scenario(
        "oci inject",
        """
        oci inject bundle 02:00.0
        .bind 02:00.0
        oci inject bundle 02:00.0 --dry-run
        oci inject bundle 02:00.0
        oci inject bundle 02:00.0
        oci inject none 02:00.0
        """,
        prepare=with_bundle,
    ),
    Scenario(
        "oci eject",
        """
        .bind 02:00.0
        .oci inject bundle 02:00.0
        oci eject bundle --dry-run
        oci eject bundle
        oci eject bundle
        oci eject none
        """,
        prepare=with_bundle,
    ),
)
GUEST_SCENARIOS = (*LIBVIRT_SCENARIOS, *KATA_SCENARIOS, *CONTAINER_SCENARIOS)
