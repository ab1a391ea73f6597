"""The VFIO backend of new hostdevs, on a fake kernel with and without iommufd."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

GPU, NIC = "0000:01:00.0", "0000:04:00.0"
GUEST = ("libvirt", "domain", "win", "--memory", "4G", "--vcpus", "2")
UNKNOWN = "using VFIO groups: QEMU's version is unknown (set --qemu-version)\n"
SAID = "using iommufd: /dev/iommu, libvirt 12.2.0 and QEMU 9.0.0 support it (--no-iommufd for VFIO"


@pytest.fixture
def programs(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """A kernel, a libvirt and a QEMU that have iommufd, by what the programs print."""
    kernel.vfio.has_cdev = True
    kernel.sysfs.put("/dev/iommu", "")
    said: dict[str, str | None] = {
        "libvirtd": "libvirtd (libvirt) 12.2.0\n",
        "qemu-system-x86_64": "QEMU emulator version 9.0.0\n",
    }
    runs = kernel.run

    def run(command: tuple[str, ...], *limit: float) -> str | None:
        return said[command[0]] if command[0] in said else runs(command, *limit)

    monkeypatch.setattr(kernel, "run", run)
    return said


def configure(kernel: FakeKernel) -> None:
    """The kernel's configuration shows that functions get nodes."""
    kernel.sysfs.put("/proc/sys/kernel/osrelease", "6.12.1\n")
    kernel.sysfs.put("/boot/config-6.12.1", "CONFIG_VFIO_DEVICE_CDEV=y\n")


@pytest.mark.usefixtures("programs")
def test_new_hostdevs_use_iommufd_where_kernel_libvirt_and_qemu_have_it(run: Run) -> None:
    assert run("bind", GPU).status == 0
    made = run("libvirt", "hostdev", GPU)
    assert made.stdout.count("iommufd='yes'") == 2
    assert made.stderr.startswith(SAID)
    groups = run("libvirt", "hostdev", GPU, "--no-iommufd")
    assert ("iommufd" in groups.stdout, "iommufd" in groups.stderr) == (False, False)
    elsewhere = run("libvirt", "hostdev", GPU, "--libvirt-version", "12.8")
    assert "iommufd" not in elsewhere.stdout + elsewhere.stderr, "nothing is known of that host"
    assert UNKNOWN in elsewhere.stderr
    for_both = ("--libvirt-version", "12.8", "--qemu-version", "11.1")
    known = run("libvirt", "hostdev", GPU, *for_both)
    assert (known.stdout, UNKNOWN in known.stderr) == (made.stdout, False)
    needed = "using iommufd: the kernel of the other host needs /dev/iommu, which this host has"
    assert known.stderr.startswith(f"{needed} (--no-iommufd for VFIO groups)\n")


@pytest.mark.usefixtures("programs")
def test_a_snapshot_has_the_versions_and_the_kernel_of_its_host(run: Run, tmp_path: Path) -> None:
    assert run("bind", GPU).status == 0
    recorded = tmp_path / "host.json"
    recorded.write_text(run("snapshot").stdout)
    of_snapshot = ("--snapshot", str(recorded))
    for command in (("libvirt", "hostdev", GPU), (*GUEST, "--device", GPU)):
        live, told = run(*command), run(*of_snapshot, *command)
        assert "iommufd" in live.stdout
        assert (told.stdout, told.stderr) == (live.stdout, live.stderr)
        elsewhere = run(*of_snapshot, *command, "--libvirt-version", "12.8")
        assert ("iommufd" in elsewhere.stdout, UNKNOWN in elsewhere.stderr) == (False, True)
        versions = ("--libvirt-version", "12.8", "--qemu-version", "11.1")
        known = run(*of_snapshot, *command, *versions)
        supported = "using iommufd: /dev/iommu, libvirt 12.8.0 and QEMU 11.1.0 support it"
        assert supported in known.stderr, "the snapshot can be that of the other host"
        older = run(*of_snapshot, *command, "--qemu-version", "8.2")
        assert "iommufd" not in older.stdout + older.stderr


@pytest.mark.parametrize(
    ("missing", "kept"),
    [
        ({"libvirt": "12.0.0", "qemu": "11.1.0"}, {}),
        ({"libvirt": "12.8.0", "qemu": None}, {}),
        ({}, {"readiness": None}),
        ({}, {"guest_support": None}),
    ],
)
@pytest.mark.usefixtures("programs")
def test_what_a_snapshot_does_not_record_is_unknown(
    run: Run, tmp_path: Path, missing: dict[str, str], kept: dict[str, None]
) -> None:
    assert run("bind", GPU).status == 0
    document = json.loads(run("snapshot").stdout)
    document["guest_support"].update(missing)
    recorded = tmp_path / "host.json"
    recorded.write_text(json.dumps({**document, **kept}))
    told = run("--snapshot", str(recorded), "libvirt", "hostdev", GPU)
    assert (told.status, "iommufd" in told.stdout) == (0, False)
    assert (UNKNOWN in told.stderr) is ("qemu" in missing and missing["qemu"] is None)


@pytest.mark.usefixtures("programs")
def test_before_the_bind_the_device_numbers_in_a_snapshot_count(
    run: Run, kernel: FakeKernel, tmp_path: Path
) -> None:
    recorded = tmp_path / "host.json"
    for has_cdevs in (True, False):
        if not has_cdevs:
            kernel.sysfs.drop("/proc/devices")
        recorded.write_text(run("snapshot").stdout)
        made = run("--snapshot", str(recorded), "libvirt", "hostdev", GPU)
        assert ("iommufd='yes'" in made.stdout) is has_cdevs


MISSING = "iommufd needs /dev/iommu, which this host does not have"
OPTIONS = "CONFIG_IOMMUFD and CONFIG_VFIO_DEVICE_CDEV"


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("command", ["hostdev", "domain", "edit"])
def test_a_missing_dev_iommu_is_refused_here_and_said_for_another_host(
    run: Run, kernel: FakeKernel, tmp_path: Path, command: str, *, is_recorded: bool
) -> None:
    file = tmp_path / "guest.xml"
    file.write_text("<domain><name>g</name><devices/></domain>")
    words = {
        "hostdev": ("libvirt", "hostdev", GPU),
        "domain": (*GUEST, "--device", GPU),
        "edit": ("libvirt", "edit", str(file), "--add", GPU, "--dry-run"),
    }[command]
    for is_there in (False, True):
        if not is_there:
            kernel.sysfs.drop("/dev/iommu")
        else:
            kernel.sysfs.put("/dev/iommu", "")
        recorded = tmp_path / "host.json"
        recorded.write_text(run("snapshot").stdout)
        source = ("--snapshot", str(recorded)) if is_recorded else ()
        here = run(*source, *words, "--iommufd")
        assert (here.status, MISSING in here.stderr) == ((0, False) if is_there else (4, True))
        assert is_there or OPTIONS in here.stderr
        both = ("--libvirt-version", "12.2", "--qemu-version", "11.1")
        elsewhere = run(*source, *words, "--iommufd", *both)
        note = f"{MISSING}: the kernel of the other host needs {OPTIONS}\n"
        assert (elsewhere.status, note in elsewhere.stderr) == (0, not is_there)
        assert "iommufd" in elsewhere.stdout


@pytest.mark.usefixtures("programs")
def test_a_recording_without_dev_says_nothing_about_dev_iommu(
    run: Run, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.sysfs.drop("/dev/iommu")
    children = kernel.children
    monkeypatch.setattr(kernel, "children", lambda path: [] if path == "/dev" else children(path))
    made = run("libvirt", "hostdev", GPU, "--iommufd")
    assert (made.status, MISSING in made.stderr) == (0, False)


@pytest.mark.usefixtures("programs")
def test_a_copy_of_dev_iommu_counts_for_check_domain_as_for_the_xml(
    run: Run, kernel: FakeKernel, tmp_path: Path
) -> None:
    configure(kernel)
    file = tmp_path / "guest.xml"
    file.write_text(run(*GUEST, "--device", GPU, "--iommufd").stdout)
    check = ("check", "domain", str(file))
    found = run(*check)
    assert found.stdout
    assert "/dev/iommu does not exist" not in found.stdout
    kernel.sysfs.drop("/dev/iommu")
    assert "/dev/iommu does not exist" in run(*check).stdout


def test_a_given_qemu_replaces_the_installed_one_and_not_libvirt(
    run: Run, programs: dict[str, str | None]
) -> None:
    programs["qemu-system-x86_64"] = "QEMU emulator version 8.2.4\n"
    assert run("bind", GPU).status == 0
    planned = ("libvirt", "hostdev", GPU, "--qemu-version")
    assert "/dev/iommu, libvirt 12.2.0 and QEMU 10.0.0" in run(*planned, "10.0").stderr
    assert "iommufd" not in run(*planned, "8.2").stdout


@pytest.mark.usefixtures("programs")
def test_a_new_domain_uses_it_as_a_whole_and_gives_the_reason(run: Run) -> None:
    assert run("bind", GPU).status == 0
    made = run(*GUEST, "--device", GPU, "--explain")
    assert made.stdout.count("iommufd='yes'") == 0
    (before, _, after) = made.stdout.partition("<iommufd enabled='yes'/>")
    assert after
    assert before.rstrip().endswith("of each function instead of its group -->")
    assert SAID in made.stderr
    groups = run(*GUEST, "--device", GPU, "--no-iommufd")
    assert "iommufd" not in groups.stdout + groups.stderr


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("libvirtd", "libvirtd (libvirt) 12.0.0\n"),
        ("libvirtd", None),
        ("qemu-system-x86_64", "QEMU emulator version 8.2.4\n"),
        ("qemu-system-x86_64", None),
    ],
)
def test_what_one_of_them_lacks_is_not_used(
    run: Run, programs: dict[str, str | None], program: str, said: str | None
) -> None:
    programs[program] = said
    assert run("bind", GPU).status == 0
    made = run("libvirt", "hostdev", GPU)
    assert (made.status, "iommufd" in made.stdout + made.stderr) == (0, False)
    assert (UNKNOWN in made.stderr) is (program != "libvirtd" and said is None)


@pytest.mark.usefixtures("programs")
def test_a_function_on_vfio_without_a_node_shows_that_the_kernel_has_none(
    run: Run, kernel: FakeKernel
) -> None:
    kernel.vfio.has_cdev = False
    assert run("bind", GPU).status == 0
    assert "iommufd" not in run("libvirt", "hostdev", GPU).stdout


@pytest.mark.usefixtures("programs")
def test_before_the_bind_the_device_numbers_of_vfio_count_and_then_the_kernels_configuration(
    run: Run, kernel: FakeKernel
) -> None:
    assert run("libvirt", "hostdev", GPU).stdout.count("iommufd='yes'") == 2
    kernel.sysfs.drop("/proc/devices")
    assert "iommufd" not in run("libvirt", "hostdev", GPU).stdout
    configure(kernel)
    assert run("libvirt", "hostdev", GPU).stdout.count("iommufd='yes'") == 2


@pytest.mark.usefixtures("programs")
def test_devices_that_may_reach_each_others_memory_stay_with_groups(
    run: Run, kernel: FakeKernel
) -> None:
    """QEMU maps no BARs through iommufd (docs/devel/vfio-iommufd.rst)."""
    configure(kernel)
    made = run(*GUEST, "--device", GPU, "--device", f"{NIC},only")
    assert "iommufd" not in made.stdout
    assert f"with iommufd {GPU}, {NIC} could not access each other's memory" in made.stderr
    asked = run(*GUEST, "--device", GPU, "--device", f"{NIC},only", "--iommufd")
    assert "<iommufd enabled='yes'/>" in asked.stdout


@pytest.mark.usefixtures("programs")
def test_a_device_that_the_guest_does_not_get_has_no_backend(run: Run) -> None:
    assert run("bind", GPU).status == 0
    made = run(*GUEST, "--device", f"{GPU},unassigned")
    assert (made.status, "iommufd" in made.stdout) == (0, False)


@pytest.mark.usefixtures("programs")
def test_groups_that_the_kernel_does_not_have_cannot_be_asked_for(
    run: Run, kernel: FakeKernel
) -> None:
    kernel.vfio.has_groups = False
    assert run("bind", GPU).status == 0
    refused = run("libvirt", "hostdev", GPU, "--no-iommufd")
    assert refused.status == 2
    assert "this kernel has none (CONFIG_VFIO_GROUP)" in refused.stderr


@pytest.mark.usefixtures("programs")
def test_the_kernel_itself_counts_before_the_file_of_its_configuration(
    kernel: FakeKernel, run: Run
) -> None:
    configure(kernel)
    kernel.vfio.has_cdev = False
    kernel.sysfs.put("/sys/class/vfio-dev/.keep", "")
    kernel.sysfs.put("/proc/devices", "Character devices:\n 10 misc\n")
    assert "iommufd" not in run("libvirt", "hostdev", GPU).stdout
