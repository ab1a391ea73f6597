from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.containers.oci_texts import TEXTS
from vfiomgr.containers.oci.nodes import read_node
from vfiomgr.errors import HostError
from vfiomgr.host.owners import NodeAccess
from vfiomgr.host.tree import HostTree
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Matches, Run

GPU = ("0000:01:00.0", "0000:01:00.1")
TWIN = ("0000:02:00.0", "0000:02:00.1")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """As `runc spec` makes it."""
    directory = tmp_path / "bundle"
    directory.mkdir()
    (directory / "config.json").write_text(TEXTS["runc spec"])
    (directory / "config.json").chmod(0o640)
    return directory


def devices(bundle: Path) -> dict[str, Any]:
    body = json.loads((bundle / "config.json").read_text())
    return {entry["path"]: entry for entry in body["linux"].get("devices", ())}


def adding(*names: str) -> tuple[str, ...]:
    """The options that add devices."""
    return tuple(word for name in names for word in ("--add", name))


def test_a_bound_slot_is_put_in_and_taken_out_to_the_byte(run: Run, bundle: Path) -> None:
    config = bundle / "config.json"
    run("bind", GPU[0])
    answer = run("oci", "edit", str(bundle), "--add", GPU[1])
    assert (answer.status, answer.stderr) == (0, "")
    assert answer.stdout == f"added {GPU[0]}: /dev/vfio/vfio (10:196), /dev/vfio/10 (240:10)\n"
    assert devices(bundle)["/dev/vfio/10"]["fileMode"] == 0o600
    assert devices(bundle)["/dev/vfio/vfio"]["fileMode"] == 0o666
    assert config.stat().st_mode & 0o777 == 0o640
    inode = config.stat().st_ino
    again = run("oci", "edit", str(config), "--add", GPU[0])
    assert again.stdout == f"{GPU[0]} is already in {config}\n{config} is unchanged\n"
    assert config.stat().st_ino == inode
    gone = run("oci", "edit", str(bundle), "--remove", "01:00.1")
    assert gone.stdout == f"removed {GPU[0]}\n"
    assert config.read_text() == TEXTS["runc spec"]
    nothing = run("oci", "edit", str(bundle), "--remove", GPU[0])
    assert nothing.status == 0
    assert nothing.stdout.startswith(f"{GPU[0]} was not added to ")
    assert sorted(os.listdir(bundle)) == ["config.json"]


def test_the_difference_is_shown_and_nothing_written(
    run: Run, bundle: Path, matches: Matches
) -> None:
    run("bind", GPU[0])
    answer = run("--dry-run", "oci", "edit", str(bundle), "--add", GPU[0])
    matches("oci-inject.diff", answer.stdout.replace(str(bundle), "bundle"))
    assert answer.stderr.startswith(f"would add {GPU[0]}: ")
    assert (bundle / "config.json").read_text() == TEXTS["runc spec"]
    (bundle / "config.json").write_text(TEXTS["containerd"])
    compact = run("--dry-run", "oci", "edit", str(bundle), "--add", GPU[0]).stdout
    assert '+        "path": "/dev/vfio/10",' in compact.splitlines()
    run("oci", "edit", str(bundle), "--add", GPU[0])
    back = run("--dry-run", "oci", "edit", str(bundle), "--remove-all")
    assert back.stderr == f"would remove {GPU[0]}\n"
    other = run("--dry-run", "oci", "edit", str(bundle), "--remove", TWIN[0])
    assert other.stderr == (
        f"{TWIN[0]} was not added to {bundle}/config.json by vfiomgr\n"
        f"{bundle}/config.json is unchanged\n"
    )


def test_json_tells_all(run: Run, bundle: Path, matches: Matches) -> None:
    run("bind", GPU[0])
    run("bind", TWIN[0])
    answer = run(
        *("oci", "edit", str(bundle), *adding(*GPU, TWIN[0]), "--format", "json"),
        *("--cdi", "nvidia.com/pgpu=10", "--cdi", "nvidia.com/audio=10", "--cdi", "x.io/gpu=11"),
    )
    matches("oci-inject.json", answer.stdout.replace(str(bundle), "bundle"))
    annotations = json.loads((bundle / "config.json").read_text())["annotations"]
    assert annotations["cdi.k8s.io/vfiomgr"] == (
        "nvidia.com/pgpu=10,nvidia.com/audio=10,x.io/gpu=11"
    )
    back = json.loads(
        run("oci", "edit", str(bundle), "--remove", TWIN[1], "--format", "json").stdout
    )
    assert (back["kind"], back["removed"], back["changed"]) == ("OciEdit", [TWIN[0]], True)


def test_what_is_not_bound_is_refused_with_the_command_that_binds_it(
    run: Run, bundle: Path
) -> None:
    answer = run("oci", "edit", str(bundle), "--add", GPU[0])
    assert answer.status == 4
    assert f"{GPU[0]} (Device 10de:2684) is on nvidia" in answer.stderr
    assert f"remedy: vfiomgr bind {GPU[0]}\n" in answer.stderr
    run("bind", GPU[0])
    assert run("unbind", GPU[1], "--function-only").status == 0
    part = run("oci", "edit", str(bundle), "--add", GPU[0], "--function-only")
    assert part.status == 4
    assert f"also contains {GPU[1]}" in part.stderr
    assert "--with-group" in part.stderr
    assert (bundle / "config.json").read_text() == TEXTS["runc spec"]


def test_what_comes_along_in_the_group_is_told(run: Run, bundle: Path) -> None:
    allowed = ("--allow", "default-route", "--allow", "mounted-disk", "--yes")
    assert run("bind", "0000:04:02.0", "--with-group", *allowed).status == 0
    answer = run("oci", "edit", str(bundle), "--add", "0000:04:02.0")
    assert answer.status == 0
    told = answer.stderr.splitlines()
    assert [line.split()[4] for line in told] == ["0000:04:00.0", "0000:04:01.0"]
    assert all(line.endswith(": it is in IOMMU group 20") for line in told)
    read = run("oci", "edit", str(bundle), "--add", "0000:04:02.0", "--format", "json")
    assert json.loads(read.stdout)["notes"] == [line.removeprefix("note: ") for line in told]
    by_hand = run("kata", "run-command", "0000:04:02.0").stderr
    assert set(told) <= set(by_hand.splitlines())


def test_a_mediated_device_is_not_for_kata(run: Run, kernel: FakeKernel, bundle: Path) -> None:
    kernel.load_module("vfio-pci")
    made = run("vgpu", "create", "--parent", "mbochs", "--type", "mbochs-small")
    uuid = made.stdout.strip()
    for runtime, lifted in (((), True), (("--runtime", "kata"), False)):
        refused = run("oci", "edit", str(bundle), "--add", uuid, *runtime)
        assert refused.status == 4
        assert (
            ", which Kata does not support: the Go runtime passes a wrong address or the entire "
            "parent, runtime-rs finds no PCI device ("
        ) in refused.stderr
        assert "vfiomgr libvirt hostdev" in refused.stderr
        assert ("--runtime runc" in refused.stderr) is lifted
    assert run("oci", "edit", str(bundle), "--add", uuid, "--runtime", "runc").status == 0
    (own,) = set(devices(bundle)) - {"/dev/vfio/vfio"}
    assert run("oci", "edit", str(bundle), "--remove", uuid.upper()).status == 0
    assert (bundle / "config.json").read_text() == TEXTS["runc spec"]
    assert own.startswith("/dev/vfio/")


def test_cdevs_come_with_dev_iommu_unless_kata_opens_that(
    kernel: FakeKernel, bundle: Path, run: Run
) -> None:
    kernel.vfio.has_cdev = True
    run("bind", GPU[0])
    kernel.sysfs.put("/sys/class/misc/iommu/dev", "10:261", 0o444)
    assert (
        "modprobe iommufd"
        in run("oci", "edit", str(bundle), "--add", GPU[0], "--node", "cdev").stderr
    )
    kernel.sysfs.put_bytes("/dev/iommu", b"", 0o600)
    inject = ("oci", "edit", str(bundle), "--add", GPU[0], "--node", "cdev")
    assert run(*inject, "--runtime", "kata").status == 0
    assert list(devices(bundle)) == ["/dev/vfio/devices/vfio0", "/dev/vfio/devices/vfio1"]
    run("oci", "edit", str(bundle), "--remove-all")
    assert run(*inject).status == 0
    assert next(iter(devices(bundle))) == "/dev/iommu"


def test_a_group_takes_the_place_of_a_cdev(kernel: FakeKernel, bundle: Path, run: Run) -> None:
    kernel.vfio.has_cdev = True
    run("bind", GPU[0])
    inject = ("oci", "edit", str(bundle), "--add", GPU[0], "--runtime", "kata")
    assert run(*inject, "--node", "cdev").status == 0
    assert run(*inject).status == 0
    assert list(devices(bundle)) == ["/dev/vfio/vfio", "/dev/vfio/10"]


def test_a_bundle_without_its_host_is_emptied_all_the_same(
    run: Run, bundle: Path, tmp_path: Path
) -> None:
    run("bind", GPU[0])
    run("oci", "edit", str(bundle), "--add", GPU[0])
    (tmp_path / "bare" / "sys").mkdir(parents=True)
    answer = run("--root", str(tmp_path / "bare"), "oci", "edit", str(bundle), "--remove", GPU[0])
    assert answer.status == 0
    assert (bundle / "config.json").read_text() == TEXTS["runc spec"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("{bundle}/nix", *adding(GPU[0])), 2, "cannot read bundle"),
        (("{bundle}", *adding("0000:99:00.0")), 2, "no such PCI device"),
        (("{bundle}", *adding("0000:00:01.0")), 4, "is a bridge"),
        (("{bundle}", *adding(GPU[0]), "--cdi", "gpu"), 2, "invalid CDI device name: --cdi"),
        (
            ("{bundle}", *adding(*GPU), "--cdi", "a.b/gpu=d"),
            2,
            "--cdi is given 1 times, but there are 2 devices",
        ),
        (("{bundle}", *adding(GPU[0]), "--node", "cdev"), 4, "has no node below"),
    ],
)
def test_mistakes_are_told(
    run: Run, bundle: Path, arguments: tuple[str, ...], status: int, words: str
) -> None:
    run("bind", GPU[0])
    answer = run("oci", "edit", *(part.format(bundle=bundle) for part in arguments))
    assert (answer.status, answer.stdout) == (status, "")
    assert words in answer.stderr
    assert "remedy: " in answer.stderr


def test_a_malformed_bundle_is_told_by_its_line(run: Run, bundle: Path) -> None:
    run("bind", GPU[0])
    config = bundle / "config.json"
    for data, place in (
        (b'{"linux": {}\n"a": 1}', "2:1"),
        (b'{\n "a": "\xff"}', "2: not UTF-8 text"),
    ):
        config.write_bytes(data)
        for change in (adding(GPU[0]), ("--remove-all",)):
            answer = run("oci", "edit", str(bundle), *change)
            assert answer.status == 65
            assert f"{config}:{place}" in answer.stderr
        assert config.read_bytes() == data


def test_a_snapshot_holds_no_numbers(run: Run, bundle: Path, tmp_path: Path) -> None:
    run("bind", GPU[0])
    (tmp_path / "host.json").write_text(run("snapshot").stdout)
    answer = run(
        "--snapshot", str(tmp_path / "host.json"), "oci", "edit", str(bundle), "--add", GPU[0]
    )
    assert answer.status == 2
    assert (
        "a snapshot does not have the numbers of device nodes, which change at each boot"
        in answer.stderr
    )


def test_a_host_that_tells_no_numbers_is_no_guess(
    run: Run, kernel: FakeKernel, bundle: Path
) -> None:
    run("bind", GPU[0])
    kernel.sysfs.drop("/sys/class/vfio")
    kernel.sysfs.make("/sys/class/vfio")
    answer = run("oci", "edit", str(bundle), "--add", GPU[0])
    assert answer.status == 1
    assert "is not a device node here, and sysfs does not have its numbers" in answer.stderr
    assert (bundle / "config.json").read_text() == TEXTS["runc spec"]


def test_a_recorded_host_without_a_node_and_its_numbers(tmp_path: Path) -> None:
    with pytest.raises(HostError) as caught:
        read_node(HostTree(str(tmp_path)), "/dev/vfio/38")
    assert caught.value.message == (
        f"no device numbers of /dev/vfio/38: neither the node nor /sys/class below {tmp_path}"
    )
    assert caught.value.hint == "run the command on the host itself"


def test_a_pipe_is_no_bundle(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    for place in (tmp_path, tmp_path / "config.json"):
        answer = run("oci", "edit", str(place), "--remove-all")
        assert answer.status == 2
        assert f"{tmp_path}/config.json: not a regular file" in answer.stderr


@pytest.mark.parametrize("change", [("--add", GPU[0]), ("--remove-all",)])
@pytest.mark.parametrize("form", ["symbolic", "hard"])
def test_a_config_that_is_linked_from_elsewhere_is_not_changed(
    run: Run, bundle: Path, tmp_path: Path, change: tuple[str, ...], form: str
) -> None:
    """Whoever has the bundle could lead root to any file of the machine."""
    run("bind", GPU[0])
    victim = tmp_path / "victim.json"
    if change == ("--remove-all",):
        run("oci", "edit", str(bundle), "--add", GPU[0])
    text = (bundle / "config.json").read_text()
    (bundle / "config.json").rename(victim)
    if form == "hard":
        (bundle / "config.json").hardlink_to(victim)
    else:
        (bundle / "config.json").symlink_to(victim)
    answer = run("oci", "edit", str(bundle), *change)
    assert answer.status == 2
    why = "2 names (hard links)" if form == "hard" else f"it is a symbolic link to {victim}"
    assert f"cannot use {bundle}/config.json: " in answer.stderr
    assert why in answer.stderr
    assert victim.read_text() == text


def test_what_lifts_a_refusal_of_bind_is_told_as_its_command(
    run: Run, kernel: FakeKernel, bundle: Path
) -> None:
    kernel.sysfs.put(f"/sys/bus/pci/devices/{GPU[0]}/boot_vga", "1", 0o444)
    answer = run("oci", "edit", str(bundle), "--add", GPU[0])
    assert answer.status == 4
    assert f", run vfiomgr bind {GPU[0]} --allow boot-display\n" in answer.stderr


def test_mode_and_owner_of_a_node_are_brought_up_to_date(
    run: Run, kernel: FakeKernel, bundle: Path
) -> None:
    run("bind", GPU[0])
    run("oci", "edit", str(bundle), "--add", GPU[0])
    kernel.change_access(HostPath("/dev/vfio/10"), NodeAccess(0, 0, 0o644))
    kernel.change_access(HostPath("/dev/vfio/vfio"), NodeAccess(0, 0, 0o640))
    again = run("oci", "edit", str(bundle), "--add", GPU[0])
    assert again.stdout.startswith(f"added {GPU[0]}: ")
    found = devices(bundle)
    assert [found[p]["fileMode"] for p in ("/dev/vfio/10", "/dev/vfio/vfio")] == [0o644, 0o640]
    assert "is unchanged" in run("oci", "edit", str(bundle), "--add", GPU[0]).stdout
    run("oci", "edit", str(bundle), "--remove-all")
    assert (bundle / "config.json").read_text() == TEXTS["runc spec"]


def test_a_node_that_two_devices_share_is_brought_up_to_date(
    run: Run, kernel: FakeKernel, bundle: Path
) -> None:
    run("bind", GPU[0], TWIN[0])
    run("oci", "edit", str(bundle), "--add", GPU[0], "--add", TWIN[0])
    kernel.change_access(HostPath("/dev/vfio/vfio"), NodeAccess(0, 0, 0o640))
    run("oci", "edit", str(bundle), "--add", GPU[0])
    assert devices(bundle)["/dev/vfio/vfio"]["fileMode"] == 0o640
    assert (
        "is unchanged" in run("oci", "edit", str(bundle), "--add", GPU[0], "--add", TWIN[0]).stdout
    )


def test_nodes_that_a_recording_does_not_have_are_told(
    run: Run, kernel: FakeKernel, bundle: Path, tmp_path: Path
) -> None:
    run("bind", GPU[0])
    recorded = tmp_path / "recorded"
    shutil.copytree(kernel.root, recorded, symlinks=True)
    line = ("oci", "edit", str(bundle), "--add", GPU[0], "--root", str(recorded), "--dry-run")
    told = run(*line).stderr
    assert f"not checked: /dev/vfio/10 is not a device node below {recorded}" in told
    (recorded / "dev/vfio/10").unlink()
    assert f"not checked: /dev/vfio/10 is missing below {recorded}" in run(*line).stderr


def test_a_name_that_no_specification_has_is_told(run: Run, bundle: Path) -> None:
    run("bind", GPU[0])
    line = ("oci", "edit", str(bundle), "--add", GPU[0], "--cdi", f"nvidia.com/pgpu={GPU[0]}")
    assert f"no CDI specification of this host has nvidia.com/pgpu={GPU[0]}" in run(*line).stderr
    run("cdi", "generate", "--kind", "nvidia.com/pgpu", "--write")
    assert run(*line).stderr == ""
