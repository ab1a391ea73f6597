"""bind, unbind and vGPUs on a real kernel with real vfio-pci."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.lab import nested
from tests.lab.command import VFIOMGR, document, vfiomgr
from vfiomgr.engine.journal import Journal
from vfiomgr.engine.plan import Plan
from vfiomgr.engine.run import run
from vfiomgr.errors import RolledBack
from vfiomgr.host.tree import HostTree
from vfiomgr.host.udev import reload_rules
from vfiomgr.passthrough.steps import Bind, ChangeDriver
from vfiomgr.pci.drivers import DriverState
from vfiomgr.pci.facts import read_device
from vfiomgr.pci.function import Functions
from vfiomgr.pci.names import Names
from vfiomgr.persistence.steps import LoadModule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.topology import Topology
    from vfiomgr.pci.model import PciDevice

pytestmark = [
    pytest.mark.topology("workstation"),
]

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
_LATE = ("bochs-drm", "snd_hda_intel")
"""Drivers that have a function before it has nodes."""
_PROBE = 120.0
"""Seconds that they may take."""


def facts(address: str) -> PciDevice:
    """All facts of a function but those that change by themselves.

    Two looks are equal, with what udev has to do in between, before a late driver has made all.
    """
    tree = HostTree("/")
    deadline = time.monotonic() + _PROBE
    before: PciDevice | None = None
    while True:
        device = read_device(Functions(tree), address, Names(tree, tree))
        assert device is not None
        device = replace(device, power_state=None, runtime_status=None)
        is_ready = device.driver not in _LATE or (bool(device.nodes) and device == before)
        if is_ready or time.monotonic() > deadline:
            return device
        before = device
        time.sleep(0.2)
        subprocess.run(["udevadm", "settle"], check=True)


@pytest.fixture
def restored(topology: Topology) -> Iterator[Topology]:
    """The topology, given back by vfiomgr after the test."""
    yield topology
    vfiomgr("unbind", topology.addresses["gpu"], topology.addresses["twin"])


@pytest.mark.platforms("debian13", topology="all")
def test_bind_takes_the_slot_and_unbind_restores_every_fact(restored: Topology) -> None:
    pair = [restored.addresses["gpu"], restored.addresses["gpu_audio"]]
    first = [facts(address) for address in pair]
    assert [device.driver for device in first] == ["bochs-drm", "snd_hda_intel"]
    outcome = document("bind", pair[0])
    assert outcome["changed"] is True
    (node,) = {device["node"] for device in outcome["devices"]}
    assert Path(node).is_char_device()
    for address in pair:
        device = Path("/sys/bus/pci/devices", address)
        assert (device / "driver").resolve().name == "vfio-pci"
        assert (device / "driver_override").read_text() == "vfio-pci\n"
    again = document("bind", pair[0])
    assert (again["changed"], again["steps"]) == (False, [])
    vfiomgr("unbind", pair[1])
    assert [facts(address) for address in pair] == first
    assert "nothing to do" in vfiomgr("unbind", pair[0]).stdout


def test_the_node_has_the_owner_that_udev_gives_it_when_bind_returns(restored: Topology) -> None:
    rule = Path("/run/udev/rules.d/99-lab.rules")
    rule.parent.mkdir(exist_ok=True)
    rule.write_text('SUBSYSTEM=="vfio", PROGRAM=="/bin/sleep 3", OWNER="65534"\n')
    reload_rules(HostTree("/"), 60)
    try:
        (node, *_) = [d["node"] for d in document("bind", restored.addresses["twin"])["devices"]]
        assert Path(node).stat().st_uid == 65534
    finally:
        rule.unlink()
        reload_rules(HostTree("/"), 60)


def test_only_the_named_twin_moves(restored: Topology) -> None:
    vfiomgr("bind", restored.addresses["twin"])
    assert facts(restored.addresses["twin"]).driver == "vfio-pci"
    assert facts(restored.addresses["gpu"]).driver == "bochs-drm"


def test_an_override_of_somebody_else_comes_back(restored: Topology) -> None:
    override = Path("/sys/bus/pci/devices", restored.addresses["gpu"], "driver_override")
    override.write_text("bochs-drm\n")
    try:
        vfiomgr("bind", restored.addresses["gpu"])
        vfiomgr("unbind", restored.addresses["gpu"])
        assert override.read_text() == "bochs-drm\n"
        assert facts(restored.addresses["gpu"]).driver == "bochs-drm"
    finally:
        override.write_text("\n")


def test_what_must_stay_is_refused(topology: Topology) -> None:
    for name, words in {
        "console": "is the console's display",
        "bridge": "is a bridge",
        "edu": "also holds",
    }.items():
        refused = vfiomgr("bind", topology.addresses[name], status=4)
        assert words in refused.stderr
        reasons = 2 if name == "bridge" else 1  # its group is not viable either
        lines = 3 if reasons == 1 else 2 + 2 * reasons
        assert len(refused.stderr.splitlines()) == lines, "reasons and remedies, rules"
    foreign = vfiomgr("bind", topology.addresses["edu"], status=4).stderr
    for peer in ("peer", "peer2"):
        assert topology.addresses[peer] in foreign
        assert facts(topology.addresses[peer]).driver == topology.drivers[peer]


def test_a_group_goes_whole_with_consent_and_comes_back(topology: Topology) -> None:
    names = ("edu", "peer", "peer2")
    first = [facts(topology.addresses[name]).driver for name in names]
    vfiomgr("bind", topology.addresses["edu"], "--with-group")
    on = {facts(topology.addresses[name]).driver for name in names}
    assert on == {"vfio-pci"}
    vfiomgr("unbind", topology.addresses["edu"], "--with-group")
    assert [facts(topology.addresses[name]).driver for name in names] == first


@pytest.mark.thorough
def test_two_at_once_wait_for_each_other(restored: Topology) -> None:
    gpu, audio = restored.addresses["gpu"], restored.addresses["gpu_audio"]
    for command in ("bind", "unbind"):
        both = [
            subprocess.Popen(
                [VFIOMGR, command, address, "--format", "json"],
                stdout=subprocess.PIPE,
                text=True,
            )
            for address in (gpu, audio)
        ]
        answers = [json.loads(process.communicate()[0]) for process in both]
        assert [process.returncode for process in both] == [0, 0]
        assert sorted(answer["changed"] for answer in answers) == [False, True]
    assert facts(gpu).driver == "bochs-drm"


def test_a_driver_that_refuses_is_explained_and_everything_rolled_back(topology: Topology) -> None:
    """vfio-pci takes no bridge; a foreign driver, forced upon a device, makes the kernel oops."""
    names = ("gpu", "gpu_audio", "bridge")
    first = [facts(topology.addresses[name]) for name in names]
    steps = [
        ChangeDriver(
            device.identity,
            DriverState(device.driver, device.driver_override, device.power_control),
            DriverState("vfio-pci", "vfio-pci"),
        )
        for device in first
    ]
    tree = HostTree("/")
    plan = Plan("a plan that cannot succeed", (LoadModule("vfio-pci", "vfio-pci"), *steps))
    intent = Bind(tuple(device.address for device in first))
    with Journal.create(tree, plan, intent, "boot") as journal, pytest.raises(RolledBack) as caught:
        run(plan, tree=tree, journal=journal)
    assert "vfio-pci supports neither bridges" in caught.value.message
    assert "everything is as it was before" in caught.value.message
    assert [facts(topology.addresses[name]) for name in names] == first


@pytest.mark.parametrize("parent", ["mtty", "mbochs"])
def test_a_vgpu_is_made_listed_and_removed(parent: str) -> None:
    types = document("vgpu", "list", "--types", "--parent", parent)["items"]
    kind = types[0]["id"]
    vfiomgr("vgpu", "create", "--parent", parent, "--type", kind, UUID)
    (item,) = document("vgpu", "list")["items"]
    assert (item["uuid"], item["parent"], item["type"]) == (UUID, parent, kind)
    assert Path(f"/dev/vfio/{item['iommu_group']}").is_char_device()
    left = {t["id"]: t["available_instances"] for t in types}[kind]
    after = document("vgpu", "list", "--types", "--parent", parent)["items"]
    assert {t["id"]: t["available_instances"] for t in after}[kind] < left
    assert f"uuid='{UUID}'" in vfiomgr("libvirt", "hostdev", UUID).stdout
    vfiomgr("vgpu", "create", "--parent", parent, "--type", kind, UUID)
    vfiomgr("vgpu", "remove", UUID)
    assert document("vgpu", "list")["items"] == []
    assert document("vgpu", "list", "--types", "--parent", parent)["items"] == types


def test_a_full_parent_is_refused() -> None:
    made = []
    try:
        for _ in range(4):
            create = ("vgpu", "create", "--parent", "mbochs", "--type", "mbochs-large")
            made.append(vfiomgr(*create).stdout.strip())
        assert "no capacity" in vfiomgr(*create, status=4).stderr
    finally:
        vfiomgr("vgpu", "remove", *made)


def test_a_snapshot_replays_what_the_host_said(tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    file.write_text(vfiomgr("snapshot").stdout)
    for command in (["list", "--all"], ["groups"], ["vgpu", "list", "--types"]):
        replayed = vfiomgr("--snapshot", str(file), *command).stdout
        assert replayed == vfiomgr(*command).stdout


def test_without_root_there_is_one_clear_message(topology: Topology) -> None:
    result = subprocess.run(
        ["setpriv", "--reuid=65534", "--clear-groups", VFIOMGR, "bind", topology.addresses["gpu"]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "requires root" in result.stderr.splitlines()[0]
    assert len(result.stderr.splitlines()) == 2


@pytest.mark.usefixtures("libvirtd")
@pytest.mark.platforms("debian13", topology="all")
def test_libvirt_hands_pair_and_vgpu_to_a_guest_that_keeps_them(restored: Topology) -> None:
    gpu, audio = restored.addresses["gpu"], restored.addresses["gpu_audio"]
    vfiomgr("bind", gpu)
    vfiomgr("vgpu", "create", "--parent", "mbochs", "--type", "mbochs-small", UUID)
    try:
        file = nested.write_domain(vfiomgr("libvirt", "hostdev", gpu, UUID).stdout)
        created = nested.call("virsh", "create", str(file), "--validate")
        assert created.returncode == 0, created.stderr
        assert nested.await_displays({"pair": 1, "lone": 1})
        for held in (["unbind", audio], ["vgpu", "remove", UUID]):
            refused = vfiomgr(*held, status=4).stderr
            assert "is in use by: guest guest (qemu-system-x86, PID " in refused
        assert facts(audio).driver == "vfio-pci"
        assert "qemu-system" in vfiomgr("show", gpu).stdout
    finally:
        nested.call("virsh", "destroy", nested.NAME)
        vfiomgr("vgpu", "remove", UUID)
