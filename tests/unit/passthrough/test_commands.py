from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ruamel.yaml import YAML

from vfiomgr.errors import NeedsRoot

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Matches, Run

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("bind-plan", ["bind", "0000:01:00.0"]),
        ("vgpu-create-plan", ["vgpu", "create", "--parent", "mbochs", "--type", "mbochs-small"]),
    ],
)
def test_plans_are_golden_and_change_nothing(
    run: Run, kernel: FakeKernel, matches: Matches, name: str, arguments: list[str]
) -> None:
    if "create" in arguments:
        arguments = [*arguments, UUID]
    matches(f"{name}.txt", run(*arguments, "--dry-run").stdout)
    matches(f"{name}.json", run(*arguments, "--dry-run", "--format", "json").stdout)
    assert kernel.operations == []


def test_bind_says_what_it_did_and_how_to_undo_it(run: Run) -> None:
    answer = run("bind", "02:00.0")
    assert answer.status == 0
    assert answer.stdout.splitlines() == [
        "also binding 0000:02:00.1 (Device 10de:22ba) (same slot)",
        "0000:02:00.0 is on vfio-pci, VFIO node: /dev/vfio/11",
        "0000:02:00.1 is on vfio-pci, VFIO node: /dev/vfio/11",
    ]
    assert answer.stderr.splitlines() == [
        "undo with: vfiomgr unbind 0000:02:00.0",
        "until reboot; keep it with: vfiomgr bind --persist 0000:02:00.0",
    ]
    again = run("bind", "02:00.0")
    assert again.status == 0
    assert again.stdout.splitlines() == [
        "0000:02:00.0 (Device 10de:2684) is already on vfio-pci",
        "0000:02:00.1 (Device 10de:22ba) is already on vfio-pci",
        "nothing to do",
    ]
    assert run("unbind", "02:00.0").stdout.splitlines()[1:] == [
        "0000:02:00.0 is on nvidia",
        "0000:02:00.1 is on snd_hda_intel",
    ]


def test_outcomes_are_documents_too(run: Run) -> None:
    document = json.loads(run("bind", "02:00.0", "--format", "json").stdout)
    assert (document["kind"], document["changed"]) == ("Outcome", True)
    assert document["devices"][0] == {
        "address": "0000:02:00.0",
        "driver": "vfio-pci",
        "driver_override": "vfio-pci",
        "iommu_group": 11,
        "node": "/dev/vfio/11",
        "nodes": ["/dev/vfio/11"],
    }
    assert json.loads(run("bind", "02:00.0", "--format", "json").stdout)["changed"] is False


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("0000:00:02.0", "is the console's display"),
        ("0000:04:00.0", "carries the default route: interface enp4s0"),
        ("0000:04:02.0", "IOMMU group 20 also holds 0000:04:00.0"),
        ("0000:03:00.0", "is a bridge"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_refusals_name_their_rules(run: Run, address: str, words: str, *, dry: bool) -> None:
    answer = run("bind", address, *(["--dry-run"] if dry else []))
    assert answer.status == 4
    assert answer.stdout == ""
    *reasons, rule = answer.stderr.splitlines()
    assert any(words in line for line in reasons)
    assert any(line.lstrip().startswith("remedy: ") for line in reasons)
    for line in rule.removeprefix("  explain: ").split("; "):
        assert "  meaning  " in run(*line.split()[1:]).stdout


def test_an_allowed_guard_lets_pass(run: Run, kernel: FakeKernel) -> None:
    kernel.default_route("enp5s0")
    assert run("bind", "0000:05:00.0").status == 4
    assert run("bind", "0000:05:00.0", "--allow", "default-route").status == 0


def test_a_failure_exits_1_with_cause_and_remedy(run: Run, kernel: FakeKernel) -> None:
    kernel.fail_writes("drivers_probe", errno.EINVAL)
    answer = run("bind", "0000:01:00.0")
    assert answer.status == 1
    assert "everything is as it was before" in answer.stderr
    assert "Traceback" not in answer.stderr
    kernel.fail_writes("drivers/nvidia/bind", errno.EBUSY)
    assert run("bind", "0000:01:00.0").status == 5


def test_without_rights_nothing_is_tried(
    run: Run, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfiomgr.engine.locks.os.access", lambda *_: False)
    monkeypatch.setattr("vfiomgr.engine.locks.os.geteuid", lambda: 1000)
    answer = run("bind", "0000:01:00.0")
    assert answer.status == NeedsRoot.exit_code == 1
    assert "requires root" in answer.stderr
    assert "sudo" in answer.stderr
    assert kernel.operations == []
    assert run("bind", "0000:01:00.0", "--dry-run").status == 0


def test_a_snapshot_cannot_be_changed(run: Run, kernel: FakeKernel) -> None:
    file = f"{kernel.root}.json"
    with open(file, "w") as target:
        target.write(run("snapshot").stdout)
    answer = run("--snapshot", file, "bind", "0000:01:00.0")
    assert answer.status == 2
    assert "a snapshot cannot be changed" in answer.stderr


def test_a_vgpu_from_its_making_to_its_end(run: Run) -> None:
    made = run("vgpu", "create", "--parent", "mbochs", "--type", "mbochs-large")
    assert made.status == 0
    uuid = made.stdout.strip()
    (item,) = json.loads(run("vgpu", "list", "--format", "json").stdout)["items"]
    assert (item["uuid"], item["parent"], item["type"]) == (uuid, "mbochs", "mbochs-large")
    assert f"uuid='{uuid}'" in run("libvirt", "hostdev", uuid).stdout
    assert run("vgpu", "remove", uuid).stdout == f"removed {uuid}\n"
    again = run("vgpu", "remove", uuid)
    assert (again.status, again.stdout) == (0, f"vGPU not found: {uuid}\nnothing to do\n")
    assert run("vgpu", "list").stderr == "no active vGPUs\n"
    full = [run("vgpu", "create", "--parent", "mbochs", "--type", "mbochs-large") for _ in "12345"]
    assert [answer.status for answer in full] == [0, 0, 0, 0, 4]
    assert "no capacity" in full[-1].stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["bind", "0000:02:00.0"],
        ["unbind", "0000:02:00.0"],
        ["vgpu", "create", "--parent", "mbochs", "--type", "mbochs-small", UUID],
        ["vgpu", "remove", UUID],
    ],
)
def test_yaml_says_what_json_says(run: Run, arguments: list[str]) -> None:
    yaml = YAML(typ="safe")
    for options in (["--dry-run"], []):
        answer = run(*arguments, *options, "--format", "yaml")
        assert answer.status == 0
        assert yaml.load(answer.stdout)["kind"] in ("Plan", "Outcome")
    expected = run(*arguments, "--format", "json").stdout
    assert yaml.load(run(*arguments, "--format", "yaml").stdout) == json.loads(expected)


def test_the_uuid_is_all_that_create_prints_also_the_second_time(run: Run) -> None:
    create = ["vgpu", "create", "--parent", "mbochs", "--type", "mbochs-small", UUID]
    assert run(*create).stdout == run(*create).stdout == f"{UUID}\n"
    assert "already exists: nothing to do" in run(*create).stderr


def test_an_override_is_asked_for_on_a_terminal(
    run: Run, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfiomgr.engine.changes.sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.confirm", lambda *_, **__: False)
    kernel.default_route("enp5s0")
    bind = ["bind", "0000:05:00.0", "--allow", "default-route"]
    refused = run(*bind)
    assert refused.status == 4
    assert "was not confirmed" in refused.stderr
    assert run(*bind, "--yes").status == 0


def test_a_process_that_has_the_gpu_open_is_named(run: Run, kernel: FakeKernel) -> None:
    descriptors = Path(kernel.root, "proc/812/fd")
    descriptors.mkdir(parents=True)
    (descriptors / "7").symlink_to("/dev/nvidiactl")
    (descriptors.parent / "comm").write_text("python3\n")
    refused = run("bind", "0000:02:00.0")
    assert refused.status == 4
    assert "is in use by: python3 (PID 812)" in refused.stderr
    assert "in use by        python3 (PID 812)" in run("show", "0000:02:00.0").stdout


@pytest.mark.parametrize(
    ("place", "node"),
    [("infiniband_verbs/uverbs0", "/dev/infiniband/uverbs0"), ("uio/uio0", "/dev/uio0")],
)
def test_an_adapter_that_a_program_drives_by_a_node_is_refused(
    run: Run, kernel: FakeKernel, place: str, node: str
) -> None:
    """RDMA, and DPDK on uio_pci_generic or igb_uio."""
    kernel.sysfs.make(f"/sys/bus/pci/devices/0000:05:00.0/{place}")
    kernel.sysfs.put("/proc/813/comm", "dpdk-testpmd")
    kernel.sysfs.link_absolute("/proc/813/fd/3", node)
    refused = run("bind", "0000:05:00.0")
    assert refused.status == 4
    assert "is in use by: dpdk-testpmd (PID 813)" in refused.stderr
    assert run("bind", "0000:05:00.0", "--allow", "in-use").status == 0


@pytest.mark.parametrize("place", ["i2c-9", "drm/card2/card2-DP-1/i2c-9"])
def test_a_display_is_refused_while_a_program_has_its_monitors_bus_open(
    run: Run, kernel: FakeKernel, place: str
) -> None:
    """The unbind waits until it is closed, as with audio."""
    kernel.sysfs.make(f"/sys/bus/pci/devices/0000:02:00.0/{place}/i2c-dev/i2c-9")
    kernel.sysfs.make("/sys/bus/pci/devices/0000:02:00.0/i2c-10")  # without a node
    kernel.sysfs.put("/proc/813/comm", "org_kde_powerde")
    kernel.sysfs.link_absolute("/proc/813/fd/3", "/dev/i2c-9")
    kernel.sysfs.put("/proc/814/comm", "sensors")
    kernel.sysfs.link_absolute("/proc/814/fd/3", "/dev/i2c-10")
    refused = run("bind", "0000:02:00.0")
    assert refused.status == 4
    assert "is in use by: org_kde_powerde (PID 813)" in refused.stderr
    assert "sensors" not in refused.stderr
    assert "org_kde_powerde" in run("list", "--columns", "address,used-by").stdout


def test_what_a_whole_group_takes_to_undo_is_told(run: Run) -> None:
    allow = ["--allow", "mounted-disk", "--allow", "default-route"]
    bound = run("bind", "0000:04:02.0", "--with-group", *allow)
    assert bound.stderr.startswith("undo with: vfiomgr unbind 0000:04:02.0 --with-group\n")
    way = "to unbind 0000:04:00.0, 0000:04:01.0 too: --with-group"
    assert f"  {way}\n" in run("unbind", "0000:04:02.0", "--dry-run").stdout
    planned = run("unbind", "0000:04:02.0", "--dry-run", "--format", "json").stdout
    assert way in json.loads(planned)["notes"]
    alone = run("unbind", "0000:04:02.0").stdout
    assert "--with-group" not in alone, "a choice that is past"
    assert "still on VFIO in IOMMU group 20: 0000:04:00.0, 0000:04:01.0" in alone
    assert "0000:04:02.0 is on xhci_hcd\n" in alone
    document = json.loads(run("unbind", "0000:04:02.0", "--format", "json").stdout)
    assert document["notes"] == ["still on VFIO in IOMMU group 20: 0000:04:00.0, 0000:04:01.0"]
    run("unbind", "0000:04:02.0", "--with-group")
    assert run("unbind", "0000:04:00.0").stdout.endswith("nothing to do\n")


def test_libvirt_does_not_get_to_bind_what_vfiomgr_would_not(run: Run) -> None:
    assert run("libvirt", "hostdev", "0000:00:02.0", "--managed").status == 4
    told = run("libvirt", "hostdev", "0000:00:02.0")
    assert told.status == 0
    assert told.stderr == (
        "0000:00:02.0 (Device 8086:4680) is on i915; vfiomgr bind refuses it: it is the "
        "console's display (boot_vga is 1)\n  remedy: make another display the primary one in the "
        "firmware setup, or see whether the desktop can release it: vfiomgr check console "
        "0000:00:02.0, or, if you can reach this host over the network, pass --allow "
        "boot-display\n"
    )
    after = "bind it with: vfiomgr bind"
    assert run("libvirt", "hostdev", "0000:02:00.0").stderr.splitlines() == [
        f"0000:02:00.0 (Device 10de:2684) is on nvidia; {after} 0000:02:00.0",
        f"0000:02:00.1 (Device 10de:22ba) is on snd_hda_intel; {after} 0000:02:00.1",
    ]


def test_libvirt_does_not_get_to_bind_what_somebody_uses(run: Run, kernel: FakeKernel) -> None:
    managed = ("libvirt", "hostdev", "10000:01:00.0", "--managed")
    kernel.disks.mount_privately("/dev/nvme1n1", "/mnt/x", pid=77, command="sh")
    assert "/dev/nvme1n1 on /mnt/x in the mount namespace of sh (PID 77)" in run(*managed).stderr
    kernel.disks.end("/dev/nvme1n1", pid=77)
    kernel.sysfs.link_absolute("/proc/78/fd/3", "/dev/nvme1n1")
    kernel.sysfs.put("/proc/78/comm", "qemu-kvm")
    assert "is in use by: qemu-kvm (PID 78)" in run(*managed).stderr
    kernel.sysfs.drop("/proc/78")
    assert run(*managed).status == 0


@pytest.mark.parametrize(
    "command", [["libvirt", "hostdev"], ["kata", "config", "--kata-version", "4.1"]]
)
def test_each_problem_of_a_device_for_a_guest_has_a_line_and_is_told_once(
    run: Run, command: list[str]
) -> None:
    answer = run(*command, "0000:04:00.0", "0000:04:01.0")
    assert answer.status == 0
    nic, disk = "0000:04:00.0 (Device 8086:10d3)", "0000:04:01.0 (Device 144d:a808)"
    refuses = "vfiomgr bind refuses it:"
    begins = [
        f"{nic} is on e1000e; {refuses} it carries the default route: interface enp4s0",
        f"{nic} is on e1000e; {refuses} IOMMU group 20 also holds {disk} on nvme, ",
        f"{disk} is on nvme; {refuses} it has a disk that the host uses: /dev/nvme0n1p2 on /",
        f"{disk} is on nvme; {refuses} IOMMU group 20 also holds {nic} on e1000e, ",
    ]
    lines = answer.stderr.splitlines()
    assert len(lines) == 2 * len(begins)
    assert all(line.startswith("  remedy: ") for line in lines[1::2])
    for line, begin in zip(lines[::2], begins, strict=True):
        assert line.startswith(begin)


def test_the_functions_of_a_slot_share_one_reason(run: Run, kernel: FakeKernel) -> None:
    kernel.sysfs.put("/sys/bus/pci/devices/0000:01:00.0/boot_vga", "1")
    first, _, second = run("libvirt", "hostdev", "0000:01:00.0").stderr.splitlines()
    assert "is on nvidia; vfiomgr bind refuses it: it is the console's display" in first
    assert second.endswith("is on snd_hda_intel; vfiomgr bind refuses it for the same reason")


def test_a_uuid_is_not_taken_for_a_name(run: Run) -> None:
    answer = run("bind", UUID)
    assert answer.status == 2
    first, second = answer.stderr.splitlines()
    assert first == f"vfiomgr: error: not a PCI address: {UUID} is a UUID"
    assert second.endswith(f"assign the vGPU with this UUID: vfiomgr libvirt hostdev {UUID}")
