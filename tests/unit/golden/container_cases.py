"""What is typed for the golden files about Kata, CDI, runtimes and bundles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fakes.containerd import Containerd
from tests.fakes.hosts import workstation
from tests.unit.containers.cdi_cases import edits
from tests.unit.containers.oci_texts import TEXTS
from tests.unit.golden.transcripts import Place, Scenario
from tests.unit.kata.test_config_command import install
from tests.unit.kata_nodes import POD, KataNode
from tests.unit.runtimes import CONFIGURATION, MAIN, SHIM, V3

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel

NODE = {SHIM.lstrip("/"): "", CONFIGURATION.lstrip("/"): "", MAIN.lstrip("/"): V3}
PGPU = "--kind nvidia.com/pgpu"
CDI = {
    "etc/cdi/nvidia.yaml": edits("0.7.0", env=["A=1"], additionalGids=[44]),
    "etc/cdi/broken.json": "{",
}


def with_containerd(place: Place) -> None:
    """A containerd that reads what is written, and an OCI runtime; a copy has a fixed name."""
    Containerd("2.1.9").install(place.kernel)
    place.kernel.sysfs.put_bytes("/usr/bin/crun", b"", 0o755)
    place.kernel.sysfs.put_bytes(SHIM, b"", 0o755)
    place.patch.setattr("vfiomgr.containers.runtimes.apply._stamp", lambda: "20261121T120000Z")


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


KATA_SCENARIOS = (
    Scenario(
        "kata config",
        """
        kata config 02:00.0
        .bind 02:00.0
        kata config 02:00.0 --kata-runtime go --dry-run --output 50.toml
        kata config 02:00.0 --kata-runtime go --output 50.toml
        kata config 03:00.0
        kata config --kata-version x
        """,
        kata_build_host,
        in_json=True,
    ),
    Scenario(
        "runtime install",
        """
        runtime install --kata --dry-run
        runtime install --kata
        runtime install --kata
        runtime install other --kata
        runtime install --kata --runtime crio
        """,
        host_files=NODE,
        prepare=with_containerd,
        keeps=True,
        case="kata",
        journals={"change-files": "change-files"},
    ),
    Scenario("runtime install", "runtime install --kata", case="kata-absent"),
    Scenario(
        "runtime uninstall",
        """
        .runtime install --kata
        runtime uninstall --kata --dry-run
        runtime uninstall --kata
        runtime uninstall --kata
        runtime uninstall A --kata
        """,
        host_files=NODE,
        prepare=with_containerd,
        case="kata",
    ),
    Scenario(
        "kata pod",
        """
        kata pod --runtimeclass --any-node
        kata pod --runtimeclass --handler kata-vfio --default-memory 4G --node-selector a=b
        kata pod --runtimeclass --handler A
        """,
        case="runtimeclass",
        in_json=True,
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
        "check pod",
        "check pod pod.yaml\ncheck pod 41:00.0\ncheck pod 42:00.0\ncheck pod none.yaml",
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
        in_json=True,
    ),
    Scenario("check kata", "check kata --all", kata_host, in_json=True),
    Scenario("check kata", "check kata 0000:01:00.0", case="absent"),
)
CONTAINER_SCENARIOS = (
    Scenario(
        "node manifests",
        """
        node manifests --image registry.example/vfiomgr-node:1 --namespace gpu --node-selector a=b
        node manifests --unit vfiomgr-node.service
        node manifests --unit vfiomgr-node-cdi.service
        node manifests --layout node
        """,
    ),
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
        "check cdi",
        f".bind 02:00.0\n.cdi generate {PGPU} --write\ncheck cdi\ncheck cdi none.json",
        host_files=CDI,
    ),
    Scenario("check cdi", "check cdi", case="none"),
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
        "runtime install",
        """
        runtime install crun --path /usr/bin/crun --cdi --dry-run
        runtime install crun --path /usr/bin/crun --cdi
        runtime install crun --path /usr/bin/crun --cdi
        runtime install none --path /usr/bin/none
        runtime install a/b --path /usr/bin/crun
        """,
        host_files=NODE,
        prepare=with_containerd,
    ),
    Scenario(
        "runtime uninstall",
        """
        .runtime install crun --path /usr/bin/crun
        runtime uninstall crun --dry-run
        runtime uninstall crun
        runtime uninstall crun
        runtime uninstall a/b
        """,
        host_files=NODE,
        prepare=with_containerd,
        in_json=True,
    ),
    Scenario(
        "oci edit",
        """
        oci edit bundle --add 02:00.0
        .bind 02:00.0
        oci edit bundle --add 02:00.0 --dry-run
        oci edit bundle --add 02:00.0
        oci edit bundle --add 02:00.0
        oci edit none --add 02:00.0
        """,
        prepare=with_bundle,
    ),
    Scenario(
        "oci edit",
        """
        .bind 02:00.0
        .oci edit bundle --add 02:00.0
        oci edit bundle --remove-all --dry-run
        oci edit bundle --remove-all
        oci edit bundle --remove-all
        oci edit none --remove-all
        """,
        prepare=with_bundle,
        case="remove",
        in_json=True,
    ),
)
