"""What is typed for the golden files about hosts; tests/golden/commands has the answers."""

from __future__ import annotations

import errno
import json
import shutil
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.bars import FakeBar
from tests.fakes.desktop import gnome
from tests.fakes.faults import PowerCut
from tests.fakes.hosts import vector_adapter, without_iommu, workstation
from tests.fakes.laptop import laptop
from tests.fakes.rom import rom_image
from tests.fakes.servers import vgpu_server
from tests.unit.golden.transcripts import Scenario
from tests.unit.layout.test_apply_commands import RULES
from tests.unit.layout.test_watch_command import Ending
from vfiomgr.diagnostic import Diagnostic, as_remedies, blocker
from vfiomgr.passthrough import watch
from vfiomgr.passthrough.steps import Bind
from vfiomgr.paths import PCI_DEVICES, STATE
from vfiomgr.pci.model import PciAddress
from vfiomgr.snapshot.document import write_snapshot
from vfiomgr.snapshot.source import HostSource
from vfiomgr.users.node_agent import ClaimStatus, DeviceStatus, NodeStatus, ResourceStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.golden.transcripts import Place
    from vfiomgr.host.tree import HostTree
from tests.unit.golden.hosts import (
    MBOCHS,
    PERSIST,
    SYSTEMD,
    arc_host,
    released_host,
    small_a40_host,
    small_divided_host,
    two_card_host,
    two_l40s_host,
)

LAYOUT = {
    "layout.yaml": json.dumps(
        {"version": "vfiomgr/v1", "layouts": {"lab": {"devices": RULES}}}, indent=1
    ),
    "absent.yaml": json.dumps(
        {
            "version": "vfiomgr/v1",
            "layouts": {
                "gone": {
                    "devices": [{"select": {"address": "0000:99:00.0"}, "state": "passthrough"}]
                }
            },
        }
    ),
    "bad.yaml": "version: vfiomgr/v1\nlayouts:\n  a:\n    devices: [{select: all, at_least: 1}]\n",
}
DRIVERCTL = {**SYSTEMD, "etc/driverctl.d/0000:01:00.0": "vfio-pci\n"}
DEVICE_MANAGER = """\
version: v1
vgpu-configs:
  default:
  - devices: all
    vgpu-devices: {A40-12Q: 2}
  odd:
  - devices: [0]
    vgpu-devices: {X-1: 1}
"""


FLEET = """\
version: vfiomgr/v1
layouts:
  fleet:
    devices:
      - {{select: {{id: 10de:26b9}}, state: vgpu, vgpus: {}}}
"""


def create_vgpus_by_hand(place: Place) -> None:
    """One on each GPU, as a script does it."""
    for function in ("0000:21:00.4", "0000:41:00.4"):
        place.kernel.write(PCI_DEVICES / function / "nvidia/current_vgpu_type", "1150")


def cut_off(place: Place) -> None:
    """Leave a bind half done."""
    place.kernel.kill(at=8)
    with pytest.raises(PowerCut):
        api.apply(Bind((PciAddress.parse("0000:01:00.0"),)), tree=place.kernel)
    place.kernel.revive()


def with_rom(place: Place) -> None:
    """Give a GPU a ROM for a BIOS and for UEFI."""
    image = partial(rom_image, "10de:2684")
    place.kernel.roms.add("0000:02:00.0", image(kind=0, last=0) + image(machine=0x8664))


def _has_resizable_bar(place: Place) -> None:
    """Give the network adapter a BAR of several sizes."""
    place.kernel.add_bars("0000:05:00.0", FakeBar(1, 256, (256, 1024, 16384)))


def refuse_probes(place: Place) -> None:
    """Have the kernel probe no driver."""
    place.kernel.fail_writes("drivers_probe", errno.EINVAL)


def bind_by_hand(place: Place) -> None:
    """Have a GPU on vfio-pci, and no record of its original driver."""
    api.apply(Bind((PciAddress.parse("0000:02:00.0"),)), tree=place.kernel)
    shutil.rmtree(place.kernel.locate(STATE))


def arrive_once(place: Place) -> None:
    """Have a persisted GPU come to its host driver, and a watch that looks once."""
    gpu = PciAddress.parse("0000:02:00.0")
    api.apply(Bind((gpu,), persist=True), tree=place.kernel)
    place.kernel.unplug(str(gpu))
    place.kernel.plug(str(gpu))

    def look(tree: HostTree, on_note: Callable[[str], None]) -> None:
        correct = partial(watch.put_right, tree=tree, on_note=on_note)
        thorough = watch.FullPath(tree, on_note, correct)
        thorough.arrived([gpu])
        thorough.settle()

    place.patch.setattr(watch, "SETTLE", 0.0)
    place.patch.setattr(watch, "watch", look)


def end_at_once(place: Place) -> None:
    """End a watch after its first look."""
    place.patch.setattr("vfiomgr.layout.commands.watch.DeviceChanges", Ending())


def with_agent(place: Place) -> None:
    """An agent answers, with a device that a pod has and one that is quarantined."""
    cause = Diagnostic(
        "reset-failed",
        "blocker",
        "0000:42:00.0",
        "cannot reset 0000:42:00.0: it does not answer",
        remedies=as_remedies(("vfiomgr node release 0000:42:00.0",)),
    )
    devices = (
        DeviceStatus(
            "0000:41:00.0", ("0000:41:00.0",), (0,), used_by="gpu/train-0/main", is_healthy=True
        ),
        DeviceStatus(
            "0000:42:00.0", ("0000:42:00.0",), (), used_by="", is_healthy=False, reasons=(cause,)
        ),
    )
    resource = ResourceStatus(
        "vfiomgr.io/GA102GL_A40", "default", is_registered=True, devices=devices
    )
    status = NodeStatus(
        4242, "/var/lib/kubelet/device-plugins", has_kubelet=True, resources=(resource,)
    )
    place.patch.setattr("vfiomgr.node.commands.status.read_status", lambda _: status)


CLAIMS = """\
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: gpu}
spec:
  spec:
    devices:
      requests:
      - name: gpu
        exactly:
          deviceClassName: vfio.vfiomgr.io
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: guest}
spec:
  replicas: 4
  template:
    spec:
      resourceClaims: [{name: gpu, resourceClaimTemplateName: gpu}]
      containers: [{name: guest, resources: {claims: [{name: gpu}]}}]
---
kind: Pod
metadata: {name: plain}
spec:
  nodeSelector: {zone: b}
  containers: [{name: guest, resources: {limits: {vfiomgr.io/PCI_10DE_2684: 1}}}]
---
kind: Node
metadata: {name: other, labels: {zone: b}}
"""
"""Pods with claims, and one with a limit of the device plugin."""


def with_nodes(place: Place) -> None:
    """Snapshots of a node with a GPU for guests."""
    api.apply(Bind((PciAddress.parse("0000:02:00.0"),)), tree=place.kernel)
    source = HostSource()
    source.root = place.kernel.root
    for name in ("worker.json", "other.json"):
        (place.directory / name).write_text(write_snapshot(source.scan()))


def with_claims(place: Place) -> None:
    """An agent that serves claims: of a GPU, a vGPU made for it, and a GPU bound for it."""
    gpu, made = "0000:41:00.0", "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
    lent, busy = "0000:42:00.0", "0000:43:00.0"
    in_use = blocker("in-use", busy, f"{busy} is in use by: python3 (PID 7)", "stop it")
    device = DeviceStatus(gpu, (gpu,), (0,), is_healthy=False, used_by="claim ml/train")
    resource = ResourceStatus("vfiomgr.io/GA102GL_A40", "default", True, (device,))  # noqa: FBT003
    status = NodeStatus(
        4242,
        "/var/lib/kubelet/device-plugins",
        has_kubelet=True,
        resources=(resource,),
        is_dra_registered=False,
        claims=(
            ClaimStatus(gpu, "ml/train"),
            ClaimStatus(made, "ml/infer"),
            ClaimStatus(lent, "ml/guest", "nvidia", 1767225600.0, returns=True),
        ),
        on_demand=(
            DeviceStatus(lent, (lent,), (1,), is_healthy=True, used_by="claim ml/guest"),
            DeviceStatus(busy, (busy,), (1,), False, "", "", (in_use,)),  # noqa: FBT003
        ),
    )
    place.patch.setattr("vfiomgr.node.commands.status.read_status", lambda _: status)


HOST_SCENARIOS = (
    Scenario(
        "node simulate",
        """
        node simulate worker.json=2 other.json --pods pods.yaml
        node simulate worker.json other.json=0 --pods pods.yaml
        node simulate other.json --pods bad.yaml
        """,
        prepare=with_nodes,
        files={"pods.yaml": CLAIMS, "bad.yaml": CLAIMS.replace("deviceClassName", "deviceClass")},
        in_json=True,
    ),
    Scenario("node run", ".bind 02:00.0\nnode run --once\nnode run --alias 10de", in_json=True),
    Scenario("node status", "node status", prepare=with_agent),
    Scenario("node status", "node status", case="no-agent"),
    Scenario(
        "node status",
        "node status\nnode status --format json",
        case="claims",
        prepare=with_claims,
        in_json=True,
    ),
    Scenario("node release", "node release 02:00.0"),
    Scenario("completion", "completion fish", is_document=True),
    Scenario("completion", "completion ksh", case="unknown-shell"),
    Scenario("list", "list\nlist --all\nlist --root nowhere", small_a40_host),
    Scenario(
        "show",
        """
        .vgpu create --type A40-8Q --parent 0000:21:00.4 f715f63c-0d00-4007-9c5a-b07b0c6c05de
        show 21:00.4
        show 21:00.0
        show 99:00.0
        """,
        small_a40_host,
    ),
    Scenario("groups", "groups\ngroups --root nowhere", without_iommu),
    Scenario("groups", "groups", small_a40_host, case="vgpu"),
    Scenario(
        "topology",
        """
        topology 82:00.0
        topology 82:00.0 --output host.svg
        topology 99:00.0
        topology --root nowhere
        """,
        vgpu_server,
        in_json=True,
    ),
    Scenario("check", "check --all\ncheck\ncheck --root nowhere"),
    Scenario("check", "check", without_iommu, case="iommu-off"),
    Scenario(
        "check console",
        "check console\ncheck console 0000:02:00.0\ncheck console 0000:01:00.1 --format json",
        lambda path: gnome(path, 2).kernel,
    ),
    Scenario(
        "laptop",
        """
        laptop
        laptop integrated --dry-run
        laptop integrated
        laptop vfio
        laptop
        laptop hybrid
        """,
        lambda path: laptop(path).kernel,
        journals={"laptop-off": "set-laptop-mode"},
        in_json=True,
    ),
    Scenario(
        "laptop",
        """
        laptop discrete
        laptop vfio
        laptop hybrid
        laptop
        """,
        lambda path: laptop(path, armoury=True).kernel,
        case="mux",
        journals={"laptop-mux": "set-laptop-mode"},
    ),
    Scenario(
        "explain", "explain boot-display\nexplain device-twice\nexplain boot-dsplay", in_json=True
    ),
    Scenario(
        "explain",
        """
        explain "vfio-pci 0000:02:00.0: not ready 65535ms after FLR; giving up"
        explain "the device melted"
        """,
        case="message",
        in_json=True,
    ),
    Scenario(
        "bind",
        """
        bind 02:00.0 --dry-run
        bind 02:00.0
        bind 02:00.0
        bind 00:02.0
        bind 04:02.0
        bind 99:00.0
        bind 02:00.0 --function-only --with-group
        """,
        keeps=True,
        journals={"bind": "bind"},
        in_json=True,
    ),
    Scenario(
        "bind",
        f"{PERSIST} --dry-run\n{PERSIST}",
        host_files=SYSTEMD,
        case="persist",
        keeps=True,
        journals={"bind-persist": "bind"},
    ),
    Scenario(
        "bind",
        "bind 05:00.0 --reset-method flr --no-d3cold --dry-run"
        "\nbind 05:00.0 --reset-method flr --no-d3cold",
        case="pinned",
        journals={"bind-pinned": "bind"},
    ),
    Scenario(
        "bind",
        "bind 01:00.0 --release --dry-run\nbind 01:00.0 --release\nunbind 01:00.0",
        released_host,
        case="release",
        journals={"bind-release": "bind"},
    ),
    Scenario(
        "bind",
        "check console 02:00.0\nbind 02:00.0 --release --dry-run\nbind 02:00.0 --release",
        two_card_host,
        case="release-second",
        journals={"bind-release-second": "bind"},
    ),
    Scenario(
        "bind",
        "show 05:00.0\nbind 05:00.0 --bar 1=16G --dry-run\nbind 05:00.0 --bar 1=16G"
        "\nbind 05:00.0 --bar 1=1G\nunbind 05:00.0",
        case="resized",
        prepare=_has_resizable_bar,
        journals={"bind-resized": "bind"},
    ),
    Scenario(
        "bind",
        f"{PERSIST} --update-initramfs --dry-run\n{PERSIST} --update-initramfs",
        host_files={
            **SYSTEMD,
            "etc/initramfs-tools/initramfs.conf": "MODULES=dep\nFRAMEBUFFER=y\n",
        },
        case="initramfs",
        journals={"bind-initramfs": "bind"},
    ),
    Scenario(
        "bind",
        "bind 02:00.0",
        prepare=refuse_probes,
        case="failed",
        journals={"bind-failed": "bind"},
    ),
    Scenario(
        "unbind",
        f"""
        .{PERSIST}
        unbind 02:00.0 --forget --dry-run
        unbind 02:00.0 --forget
        unbind 02:00.0
        unbind 99:00.0
        """,
        host_files=SYSTEMD,
        journals={"unbind": "unbind"},
    ),
    Scenario(
        "unbind",
        "unbind 02:00.0 --dry-run\nunbind 02:00.0",
        prepare=bind_by_hand,
        case="unrecorded",
        journals={"unbind-unrecorded": "unbind"},
    ),
    Scenario(
        "plan",
        """
        plan layout.yaml --output plan.json
        plan absent.yaml
        plan bad.yaml
        plan none.yaml
        """,
        files=LAYOUT,
        in_json=True,
    ),
    Scenario(
        "apply",
        """
        apply layout.yaml --dry-run
        apply layout.yaml
        apply layout.yaml
        apply absent.yaml
        apply absent.yaml --keep-going
        """,
        files=LAYOUT,
        keeps=True,
        journals={"apply-layout": "apply-layout"},
    ),
    Scenario(
        "apply",
        """
        apply fewer.yaml --adopt
        plan fleet.yaml --adopt
        apply fleet.yaml --adopt
        vgpu list
        """,
        two_l40s_host,
        files={
            "fleet.yaml": FLEET.format("[{type: L40S-4Q, per_gpu: 1}]"),
            "fewer.yaml": FLEET.format("[{type: L40S-4Q, count: 1}]"),
        },
        prepare=create_vgpus_by_hand,
        case="adopt",
        journals={"apply-layout-adopt": "apply-layout"},
    ),
    Scenario(
        "apply", "apply layout.yaml --keep-going", files=LAYOUT, case="keep-going", in_json=True
    ),
    Scenario(
        "layout assert",
        "layout assert layout.yaml\n.apply layout.yaml\n"
        "layout assert layout.yaml\nlayout assert absent.yaml",
        files=LAYOUT,
        in_json=True,
    ),
    Scenario(
        "layout export",
        """
        .apply layout.yaml
        layout export --for nova
        layout export --for kubevirt
        layout export --for proxmox --node pve1
        layout export --for incus
        layout export --for proxmox
        """,
        files=LAYOUT,
        case="for-managers",
    ),
    Scenario(
        "layout export",
        "layout export\n.apply layout.yaml\n"
        "layout export --name here\nlayout export --root nowhere",
        files=LAYOUT,
        in_json=True,
    ),
    Scenario(
        "layout revert",
        "layout revert\n.apply layout.yaml\nlayout revert --dry-run\nlayout revert\nlayout revert",
        files=LAYOUT,
        journals={"revert-layout": "revert-layout"},
    ),
    Scenario(
        "layout watch",
        "layout watch layout.yaml\nlayout watch layout.yaml --enforce\n"
        "layout watch layout.yaml\nlayout watch",
        files=LAYOUT,
        prepare=end_at_once,
        in_json=True,
    ),
    Scenario(
        "recover",
        "recover --dry-run\nrecover\nrecover\nrecover --undo --finish",
        prepare=cut_off,
        journals={"bind-undone": "bind"},
        in_json=True,
    ),
    Scenario(
        "recover",
        "list\nrecover --finish",
        prepare=cut_off,
        case="finish",
        journals={"bind-finished": "bind"},
    ),
    Scenario(
        "rom dump",
        "rom dump 02:00.0\n.bind 02:00.0\nrom dump 02:00.0\nrom dump 05:00.0\nrom dump 00:02.0",
        prepare=with_rom,
    ),
    Scenario(
        "rom check",
        """
        .bind 02:00.0
        .rom dump 02:00.0 --output gpu.rom
        rom check gpu.rom --device 02:00.0
        rom check gpu.rom --device 06:00.0
        rom check absent.rom
        """,
        prepare=with_rom,
        in_json=True,
    ),
    Scenario(
        "reset",
        """
        reset 05:00.0 --dry-run
        reset 05:00.0
        reset 04:02.0
        reset 00:02.0
        reset 03:00.0
        """,
        partial(workstation, network_driver="ice"),
        journals={"reset": "reset"},
    ),
    Scenario(
        "reset",
        "reset 05:00.0 --method bus --dry-run\nreset 05:00.0 --method bus",
        partial(workstation, network_driver="ice"),
        case="method",
        journals={"reset-method": "reset"},
    ),
    Scenario(
        "reset",
        """
        reset 05:00.0 --with-bus
        reset 0000:01:00.0 --with-bus --method flr
        bind 0000:01:00.0
        reset 0000:01:00.0 --with-bus --dry-run
        reset 0000:01:00.0 --with-bus
        """,
        case="bus",
        journals={"reset-bus": "reset"},
    ),
    Scenario(
        "sriov list", ".sriov set 05:00.0 2\n.bind 05:10.0\nsriov list\nsriov list --root nowhere"
    ),
    Scenario("sriov list", "sriov list", two_l40s_host, case="vendor"),
    Scenario(
        "sriov set",
        """
        sriov list 21:00.0
        .sriov set 21:00.0 2 --vf-memory 4G --exec-quantum 20
        sriov set 21:00.1 --exec-quantum 40 --dry-run
        sriov set 21:00.1 --exec-quantum 40
        sriov set 21:00.0 --vf-memory 40G
        sriov set 21:00.0 --physical
        sriov list 21:00.2
        """,
        arc_host,
        case="existing",
        journals={"change-quotas": "change-quotas"},
    ),
    Scenario(
        "sriov set",
        """
        sriov set 05:00.0 2 --vf-msix 16 --dry-run
        .sriov set 05:00.0 2 --vf-msix 16
        sriov set 05:10.4 --vf-msix 32 --dry-run
        sriov set 05:10.4 --vf-msix 32
        show 05:10.4
        sriov set 05:00.0 4 --vf-msix 17
        """,
        vector_adapter,
        case="msix",
        journals={"change-vectors": "change-vectors"},
    ),
    Scenario(
        "sriov set",
        """
        sriov set 05:00.0 2 --dry-run
        sriov set 05:00.0 2
        sriov set 05:00.0 2
        .bind 05:10.0
        sriov set 05:00.0 0
        sriov set 05:00.0 9
        sriov set 02:00.0 1
        """,
        journals={"set-virtual-functions": "set-virtual-functions"},
    ),
    Scenario(
        "sriov set",
        "sriov set 21:00.0 2 --vf-memory 4G --exec-quantum 20 --priority normal",
        arc_host,
        case="quotas",
        keeps=True,
        journals={"set-virtual-functions-quotas": "set-virtual-functions"},
    ),
    Scenario(
        "layout import",
        "layout import\nlayout import --vgpu-device-manager vdm.yaml\nlayout import --board x",
        small_a40_host,
        files={"vdm.yaml": DEVICE_MANAGER},
        host_files=DRIVERCTL,
    ),
    Scenario(
        "layout install",
        """
        layout install layout.yaml --enforce --dry-run
        layout install layout.yaml
        layout install layout.yaml
        layout install absent.yaml
        """,
        files=LAYOUT,
        host_files=SYSTEMD,
        keeps=True,
        journals={"install-layout": "install-layout"},
    ),
    Scenario("check layout", "check layout --schema", is_document=True, case="schema"),
    Scenario(
        "layout uninstall",
        """
        .layout install layout.yaml
        layout uninstall --dry-run
        layout uninstall
        layout uninstall
        """,
        files=LAYOUT,
        host_files=SYSTEMD,
        journals={"uninstall-layout": "uninstall-layout"},
    ),
    Scenario(
        "metrics",
        """
        metrics
        metrics --output vfiomgr.prom
        metrics --output nowhere/vfiomgr.prom
        metrics --output vfiomgr.prom install
        """,
        vgpu_server,
    ),
    Scenario(
        "metrics install",
        """
        metrics install
        metrics install --directory /srv/absent
        metrics install --directory srv/metrics
        metrics install --directory /srv/metrics --dry-run
        metrics install --directory /srv/metrics
        metrics install --directory /srv/metrics
        """,
        host_files=SYSTEMD | {"srv/metrics/.keep": ""},
        keeps=True,
        journals={"metrics-install": "change-files"},
    ),
    Scenario(
        "metrics uninstall",
        """
        .metrics install
        metrics uninstall --dry-run
        metrics uninstall
        metrics uninstall
        """,
        host_files={
            **SYSTEMD,
            "etc/systemd/system/.keep": "",
            "var/lib/prometheus/node-exporter/vfiomgr.prom": "",
        },
    ),
    Scenario(
        "metrics accept",
        """
        metrics accept --dry-run
        metrics accept
        metrics accept
        """,
    ),
    Scenario(
        "uninstall",
        """
        .layout install layout.yaml
        uninstall --dry-run
        uninstall --keep 0000:01:00.0
        uninstall
        uninstall
        """,
        files=LAYOUT,
        host_files=SYSTEMD,
        journals={"uninstall": "uninstall"},
    ),
    Scenario(
        "check layout",
        "check layout layout.yaml\ncheck layout bad.yaml",
        files=LAYOUT,
        in_json=True,
    ),
    Scenario(
        "bind",
        """
        bind --persist --driverctl --dry-run
        bind --persist --driverctl
        bind --persist --driverctl
        """,
        case="driverctl",
        host_files=DRIVERCTL,
        journals={"import-driverctl": "import-driverctl"},
    ),
    Scenario(
        "bind",
        """
        bind --reserve 02:00.0 --dry-run
        bind --reserve 02:00.0
        bind --reserve 02:00.0
        list --persistent
        bind --reserve 05:00.0
        bind --reserve 02:00.0 --persist
        unbind 02:00.0 --forget-only
        """,
        case="reserve",
        host_files=SYSTEMD,
        journals={"reserve": "reserve"},
    ),
    Scenario(
        "list",
        f"list --persistent\n.{PERSIST}\nlist --persistent\nlist --persistent --root nowhere",
        case="persistent",
        host_files=SYSTEMD,
    ),
    Scenario(
        "unbind",
        f"""
        .{PERSIST}
        unbind 02:00.0 --forget-only --dry-run
        unbind 02:00.1 --forget-only
        unbind --forget-only --all
        unbind --forget-only --all
        unbind --forget-only
        """,
        host_files=SYSTEMD,
        journals={"forget-persisted": "forget-persisted"},
        case="forget-only",
    ),
    Scenario(
        "persist watch",
        "persist watch\nlist\npersist watch --snapshot host.json\npersist watch --root nowhere",
        files={"host.json": "{}"},
        prepare=arrive_once,
    ),
    Scenario(
        "snapshot",
        f".vgpu create {MBOCHS}\n.{PERSIST}\nsnapshot",
        host_files=SYSTEMD,
        is_document=True,
    ),
    Scenario("snapshot", "snapshot", small_divided_host, case="mig", is_document=True),
)
