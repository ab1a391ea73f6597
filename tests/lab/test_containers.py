"""Devices in containers: real containerd, runc and cgroups, on functions that vfiomgr bound."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.lab import containers
from tests.lab.command import document, vfiomgr

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.topology import Topology

pytestmark = pytest.mark.topology("workstation")

_PROBE = """
cd /dev
for node in vfio/*; do busybox stat -c "%n %t:%T" $node; done
(: <>vfio/$1) && echo "opened vfio/$1"
busybox mknod other c $2 $3 && echo made another
(: <>other) && echo opened another
busybox true
"""


@dataclass(frozen=True)
class Node:
    """A node of VFIO in this guest."""

    path: str
    major: int
    minor: int

    @property
    def name(self) -> str:
        """Below /dev/vfio."""
        return Path(self.path).name

    @property
    def shown(self) -> str:
        """As busybox's stat shows it: the numbers are hexadecimal."""
        return f"vfio/{self.name} {self.major:x}:{self.minor:x}"


@pytest.fixture(scope="module")
def nodes(topology: Topology) -> Iterator[tuple[Node, Node]]:
    """Those of two bound devices: the first is given to a container, the other is not."""
    named = [topology.addresses[name] for name in ("gpu", "twin")]
    bound = document("bind", *named)["devices"]
    paths = dict.fromkeys(device["node"] for device in bound)
    yield _node(next(iter(paths))), _node(list(paths)[-1])
    vfiomgr("unbind", *named)


def _node(path: str) -> Node:
    number = os.stat(path).st_rdev
    return Node(path, os.major(number), os.minor(number))


def _probe(own: Node, other: Node) -> list[str]:
    """A command for a container that has one of them."""
    busybox = 'busybox() { /bin/busybox "$@"; }\n'
    numbers = [own.name, str(other.major), str(other.minor)]
    return ["/bin/busybox", "sh", "-c", busybox + _PROBE, "probe", *numbers]


def _expect_own_alone(said: str, own: Node) -> None:
    """The node has its numbers and opens; another one is there, and the cgroup keeps it shut."""
    assert own.shown in said.splitlines()
    assert f"opened vfio/{own.name}" in said
    assert "made another" in said
    assert "opened another" not in said


def test_a_container_of_ctr_has_the_node_and_no_other(nodes: tuple[Node, Node]) -> None:
    own, other = nodes
    containers.start()
    flags = ["--rm", "--snapshotter", "native", "--device", own.path]
    answer = containers.ctr("run", *flags, containers.IMAGE, "first", *_probe(own, other))
    assert answer.returncode == 0, answer.stderr
    _expect_own_alone(answer.stdout, own)
    assert "Operation not permitted" in answer.stderr
    assert other.shown not in answer.stdout


def test_ctr_takes_the_command_that_is_printed(
    nodes: tuple[Node, Node], topology: Topology
) -> None:
    """With runc's shim behind the name of Kata's: flags and nodes are real, the guest is not."""
    own, _ = nodes
    containers.start()
    ask = ("kata", "run-command", topology.addresses["gpu"], "--image", containers.IMAGE)
    program, *words = document(*ask, "--command", "/bin/busybox ls /dev/vfio")["command"]
    assert program == "ctr"
    words.remove("--tty")  # the guest has no terminal to give
    words.insert(1, "--snapshotter=native")
    answer = containers.ctr(*words)
    assert (answer.returncode, answer.stdout.split()) == (0, [own.name]), answer.stderr


def test_a_bundle_has_it_after_inject_and_not_after_eject(
    nodes: tuple[Node, Node], topology: Topology, tmp_path: Path
) -> None:
    own, other = nodes
    bundle = tmp_path / "bundle"
    containers.make_root(bundle / "rootfs")
    _specify(bundle, _probe(own, other))
    before = (bundle / "config.json").read_bytes()
    assert own.shown not in _run(bundle)

    added = document("oci", "edit", str(bundle), "--add", topology.addresses["gpu"])["added"]
    assert [node["path"] for node in added[0]["nodes"]] == ["/dev/vfio/vfio", own.path]
    said = _run(bundle)
    _expect_own_alone(said, own)
    assert "vfio/vfio a:c4" in said.splitlines()
    assert other.shown not in said
    again = document("oci", "edit", str(bundle), "--add", topology.addresses["gpu_audio"])
    assert again["changed"] is False

    vfiomgr("oci", "edit", str(bundle), "--remove-all")
    assert (bundle / "config.json").read_bytes() == before
    assert own.shown not in _run(bundle)


def test_without_the_cgroup_rule_runc_keeps_the_node_shut(
    nodes: tuple[Node, Node], topology: Topology, tmp_path: Path
) -> None:
    """What `oci edit` adds to linux.resources.devices is what opens it."""
    own, other = nodes
    bundle = tmp_path / "bundle"
    containers.make_root(bundle / "rootfs")
    _specify(bundle, _probe(own, other))
    vfiomgr("oci", "edit", str(bundle), "--add", topology.addresses["gpu"])
    config = bundle / "config.json"
    body: dict[str, Any] = json.loads(config.read_text())
    rules = body["linux"]["resources"]["devices"]
    rules.remove(
        {"allow": True, "type": "c", "major": own.major, "minor": own.minor, "access": "rwm"}
    )
    config.write_text(json.dumps(body))
    said = _run(bundle)
    assert own.shown in said
    assert f"opened vfio/{own.name}" not in said


def _specify(bundle: Path, command: list[str]) -> None:
    """`runc spec`, for a container that may make nodes, and open those that it is given."""
    subprocess.run(["runc", "spec", "--bundle", bundle], check=True)
    config = bundle / "config.json"
    body: dict[str, Any] = json.loads(config.read_text())
    body["process"] |= {"terminal": False, "args": command}
    for granted in body["process"]["capabilities"].values():
        granted.append("CAP_MKNOD")
    body["linux"]["resources"]["devices"].append({"allow": True, "type": "c", "access": "m"})
    config.write_text(json.dumps(body, indent="\t"))


def _run(bundle: Path) -> str:
    command = ["runc", "--root", "/run/lab/runc", "run", "--bundle", str(bundle), "bundle"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout
