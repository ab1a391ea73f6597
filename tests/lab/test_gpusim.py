"""The manners of gpusim, the GPU that makes vGPUs, on a real kernel (see gpusim/README.md)."""

from __future__ import annotations

import errno
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab import gpusim
from vfiomgr.host.tree import HostTree
from vfiomgr.host.udev import reload_rules

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = pytest.mark.topology("sriov")

UUIDS = [f"f715f63c-0d00-4007-9c5a-b07b0c6c05d{number}" for number in range(4)]
MDEVS = Path("/sys/bus/mdev/devices")
HEADING = "ID    : vGPU Name\n"
_QEMU = ("qemu-system-x86_64", "-nodefaults", "-display", "none", "-machine", "q35", "-m", "64")
_BLOCKED = 2.0
"""Seconds that a write takes which waits for a guest; others take far less."""


@pytest.fixture(scope="module", autouse=True)
def _nvme_is_given_back() -> Iterator[None]:
    yield
    gpusim.unload()


@pytest.fixture
def mdev() -> tuple[Path, ...]:
    """Three virtual functions that are parents of mediated devices."""
    gpusim.load(family="mdev")
    return _functions(3)


@pytest.fixture
def vendor() -> tuple[Path, ...]:
    """Three virtual functions that become vGPUs themselves."""
    gpusim.load(family="vendor")
    return _functions(3)


@pytest.fixture
def tools() -> Iterator[None]:
    """The stand-ins for NVIDIA's programs."""
    gpusim.install_tools()
    yield
    gpusim.remove_tools()


def _functions(count: int) -> tuple[Path, ...]:
    return tuple(Path("/sys/bus/pci/devices", address) for address in gpusim.enable(count))


def _gpu() -> Path:
    return Path("/sys/bus/pci/devices", gpusim.gpu())


def _failure(path: Path, text: str | None = None) -> int:
    """The errno that a write, or a read, fails with; 0 where it does not."""
    try:
        if text is None:
            path.read_text()
        else:
            gpusim.write(path, text)
    except OSError as error:
        return error.errno or -1
    return 0


def _available(function: Path) -> dict[str, int]:
    """What the types of a parent say, by the number of each."""
    types = (function / "mdev_supported_types").iterdir()
    return {
        each.name.removeprefix("nvidia-"): int((each / "available_instances").read_text())
        for each in types
    }


def _create(function: Path, number: int) -> Path:
    return function / f"mdev_supported_types/nvidia-{number}/create"


def _creatable(function: Path) -> list[str]:
    text = (function / "nvidia/creatable_vgpu_types").read_text()
    assert text.startswith(HEADING)
    return text.removeprefix(HEADING).splitlines()


@contextmanager
def _guest(device: str, shows: str) -> Iterator[subprocess.Popen[str]]:
    """A nested guest with a device, once it runs and its monitor shows the device."""
    command = [*_QEMU, "-accel", "tcg", "-monitor", "stdio", "-device", f"vfio-pci,{device}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write("info status\ninfo pci\n")
            process.stdin.flush()
            told = ""
            while shows not in told:
                line = process.stdout.readline()
                assert line, told
                told += line
            assert "VM status: running" in told
            yield process
        finally:
            process.kill()


@contextmanager
def _waiting(path: Path, text: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose write the kernel does not return from."""
    script = 'printf %s "$1" >"$2"'
    with subprocess.Popen(["sh", "-c", script, "sh", text, str(path)]) as writer:
        time.sleep(_BLOCKED)
        assert writer.poll() is None
        yield writer


def _told(command: Sequence[str | Path], status: int = 0) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_an_event_that_is_being_handled_does_not_load_nvme_again() -> None:
    gpusim.unload()
    rule = Path("/run/udev/rules.d/70-lab-slow.rules")
    rule.parent.mkdir(parents=True, exist_ok=True)
    rule.write_text('SUBSYSTEM=="pci", ACTION=="add", PROGRAM="/bin/sleep 1"\n')
    reload_rules(HostTree("/"), 60)
    try:
        subprocess.run(["udevadm", "trigger", "--action=add", _gpu()], check=True)
        gpusim.load(family="mdev")
    finally:
        rule.unlink()
        reload_rules(HostTree("/"), 60)
    subprocess.run(["udevadm", "settle"], check=True)
    assert not Path("/sys/module/nvme").exists()


def test_functions_come_to_the_driver_without_an_override_and_the_gpu_is_given_back() -> None:
    gpusim.load(family="vendor", totalvfs=4)
    assert (_gpu() / "sriov_totalvfs").read_text() == "4\n"
    functions = [_gpu(), *_functions(2)]
    assert [gpusim.driver(each.name) for each in functions] == ["nvidia"] * 3
    assert {(each / "driver_override").read_text() for each in functions} == {"(null)\n"}
    assert len({(each / "iommu_group").resolve() for each in functions}) == 3
    assert [(each / "nvidia").exists() for each in functions] == [False, True, True]
    gpusim.unload()
    assert gpusim.driver(gpusim.gpu()) == "nvme"
    assert (_gpu() / "sriov_totalvfs").read_text() == "60\n"
    assert gpusim.virtual_functions() == ()


def test_an_mdev_parent_has_the_types_of_a_real_gpu(mdev: tuple[Path, ...]) -> None:
    kind = mdev[0] / "mdev_supported_types/nvidia-555"
    assert (kind / "name").read_text() == "NVIDIA A40-1B\n"
    assert (kind / "device_api").read_text() == "vfio-pci\n"
    assert (kind / "description").read_text() == (
        "num_heads=4, frl_config=45, framebuffer=1024M, max_resolution=5120x2880, max_instance=32\n"
    )
    numbers = {str(number) for number in (*range(555, 577), *range(581, 588))}
    for function in mdev:
        assert _available(function) == dict.fromkeys(numbers, 1)
        assert Path("/sys/class/mdev_bus", function.name).exists()


def test_the_first_mdev_decides_the_size_and_fills_its_function(mdev: tuple[Path, ...]) -> None:
    first, second, third = mdev
    before = _available(first)
    _create(first, 558).write_text(UUIDS[0])
    assert (MDEVS / UUIDS[0]).resolve().parent.name == first.name
    assert _available(first) == dict.fromkeys(before, 0)
    same = {"556": 1, "558": 1, "568": 1}
    assert _available(second) == _available(third) == dict.fromkeys(before, 0) | same
    assert _failure(_create(second, 555), UUIDS[1]) == errno.EINVAL
    assert _failure(_create(first, 558), UUIDS[1]) == errno.EUSERS
    assert _failure(_create(second, 558), UUIDS[0]) == errno.EEXIST
    _create(second, 568).write_text(UUIDS[1])
    for uuid in UUIDS[:2]:
        (MDEVS / uuid / "remove").write_text("1")
    assert _available(first) == before


def test_a_gpu_is_full_by_its_framebuffer() -> None:
    gpusim.load(family="mdev", framebuffer=2048)
    functions = _functions(3)
    for function, uuid in zip(functions, UUIDS[:2], strict=False):
        _create(function, 557).write_text(uuid)
    assert set(_available(functions[2]).values()) == {0}
    assert _failure(_create(functions[2], 557), UUIDS[2]) == errno.ENOSPC


def test_parameters_of_an_mdev_are_replaced_whole(mdev: tuple[Path, ...]) -> None:
    _create(mdev[0], 558).write_text(UUIDS[0])
    attributes = MDEVS / UUIDS[0] / "nvidia"
    params = attributes / "vgpu_params"
    assert params.read_text() == "\n"
    for text in ("frame_rate_limiter=0, disable_vnc=1", "enable_uvm=1"):
        params.write_text(text)
        assert params.read_text() == f"{text}\n"
    for wrong in ("enable_uvm", "=1", "a=1,", "a=1,,b=2"):
        assert _failure(params, wrong) == errno.EINVAL
    assert params.read_text() == "enable_uvm=1\n"
    params.write_text(" ")
    assert params.read_text() == "\n"
    assert (attributes / "placement_id").read_text() == "Not Applicable\n"
    assert _failure(attributes / "placement_id", "0") == errno.EINVAL


def test_a_heterogeneous_gpu_carries_all_sizes_until_its_functions_are_remade(
    mdev: tuple[Path, ...],
) -> None:
    first, second, third = mdev
    mode = _gpu() / "gpusim/heterogeneous"
    mode.write_text("1")
    for function, number, uuid in zip(mdev, (557, 565, 558), UUIDS, strict=False):
        _create(function, number).write_text(uuid)
    placements = [(MDEVS / uuid / "nvidia/placement_id") for uuid in UUIDS[:3]]
    assert [each.read_text() for each in placements] == ["0\n", "24\n", "2\n"]
    assert _failure(placements[2], "3") == errno.EINVAL
    assert _failure(placements[2], "24") == errno.EINVAL
    placements[2].write_text("22")
    assert placements[2].read_text() == "22\n"
    assert _failure(mode, "0") == errno.EBUSY
    (MDEVS / UUIDS[2] / "remove").write_text("1")
    # 12 GiB fit between the two that are there; 16 GiB would, were it not for their places.
    available = _available(third)
    assert [available[number] for number in ("557", "563", "564", "566")] == [1, 1, 0, 0]
    gpusim.disable()
    assert mode.read_text() == "0\n"
    assert not list(MDEVS.iterdir())
    assert gpusim.enable(3) == (first.name, second.name, third.name)
    assert mode.read_text() == "0\n"


def test_a_guest_has_an_mdev_and_its_removal_waits_for_it(mdev: tuple[Path, ...]) -> None:
    _create(mdev[0], 558).write_text(UUIDS[0])
    device = MDEVS / UUIDS[0]
    assert (device / "driver").resolve().name == "nvidia-vgpu-vfio"
    with (
        _guest(f"sysfsdev={device}", shows="PCI device 10de:2235") as guest,
        _waiting(device / "remove", "1") as writer,
    ):
        guest.kill()
        assert writer.wait() == 0
    assert not device.exists()
    assert set(_available(mdev[0]).values()) == {1}


def test_a_type_is_written_once_and_cleared_once(vendor: tuple[Path, ...]) -> None:
    first, second, _ = vendor
    current = first / "nvidia/current_vgpu_type"
    before = _creatable(first)
    assert before[0] == "1145  : NVIDIA L40S-1B"
    assert "1148  : NVIDIA L40S-2Q" in before
    assert len(before) == 23
    assert current.read_text() == "0\n"
    assert _failure(current, "0") == errno.EPERM
    for malformed in ("x", "-1", "1148x", "0x47c"):
        assert _failure(current, malformed) == errno.EINVAL
    assert _failure(current, "558") == errno.EIO
    current.write_text("1148")
    assert current.read_text() == "1148\n"
    assert _creatable(first) == []
    assert _creatable(second) == [
        "1146  : NVIDIA L40S-2B",
        "1148  : NVIDIA L40S-2Q",
        "1158  : NVIDIA L40S-2A",
    ]
    assert _failure(current, "1148") == _failure(current, "1145") == errno.EPERM
    assert _failure(second / "nvidia/current_vgpu_type", "1145") == errno.EIO
    current.write_text("0")
    assert _creatable(first) == before


def test_what_the_driver_fills_in_is_missing_until_then(vendor: tuple[Path, ...]) -> None:
    attributes = vendor[0] / "nvidia"
    assert _failure(attributes / "gpu_instance_id") == errno.ENXIO
    assert _failure(attributes / "placement_id") == errno.ENXIO
    assert _failure(attributes / "vgpu_params", "enable_uvm=1") == errno.EPERM
    (attributes / "current_vgpu_type").write_text("1148")
    assert (attributes / "placement_id").read_text() == "Not Applicable\n"
    (attributes / "vgpu_params").write_text("enable_uvm=1\n")
    assert (attributes / "vgpu_params").read_text() == "enable_uvm=1\n"
    (attributes / "current_vgpu_type").write_text("0")
    assert (attributes / "vgpu_params").read_text() == "\n"


@pytest.mark.usefixtures("tools")
def test_a_function_without_a_type_cannot_be_opened_and_an_open_one_not_be_cleared(
    vendor: tuple[Path, ...],
) -> None:
    first, *_ = vendor
    current = first / "nvidia/current_vgpu_type"
    refused = _told([*_QEMU, "-device", f"vfio-pci,host={first.name}"], status=1)
    assert "No such device" in refused
    current.write_text("1148")
    with _guest(f"host={first.name}", shows="PCI device 1b36:0010"):
        assert _failure(current, "0") == errno.EBUSY
        assert _failure(current, "1148") == errno.EPERM
        held = _told([gpusim.SRIOV_MANAGE, "-d", gpusim.gpu()], status=1)
        assert f"Cannot obtain unbindLock for {gpusim.gpu()}" in held
    current.write_text("0")


def test_a_function_that_was_unbound_does_not_answer_until_it_is_remade(
    vendor: tuple[Path, ...],
) -> None:
    first, second, _ = vendor
    (first / "nvidia/current_vgpu_type").write_text("1148")
    driver = Path("/sys/bus/pci/drivers/nvidia")
    with (
        _guest(f"host={first.name}", shows="PCI device 1b36:0010") as guest,
        _waiting(driver / "unbind", first.name) as writer,
    ):
        guest.kill()
        assert writer.wait() == 0
    assert _failure(driver / "bind", first.name) == errno.ENODEV
    Path("/sys/bus/pci/drivers_probe").write_text(first.name)
    assert gpusim.driver(first.name) is None
    assert len(_creatable(second)) == 23
    gpusim.disable()
    gpusim.enable(3)
    assert gpusim.driver(first.name) == "nvidia"
    Path("/sys/module/gpusim/parameters/wedge").write_text("0")
    for name in ("unbind", "bind"):
        (driver / name).write_text(first.name)
    assert (first / "nvidia/current_vgpu_type").read_text() == "0\n"


@pytest.mark.usefixtures("tools")
def test_only_sriov_manage_makes_functions() -> None:
    gpusim.load(family="vendor", totalvfs=3)
    number, address = _gpu() / "sriov_numvfs", gpusim.gpu()
    assert _failure(number, "2") == errno.EPERM
    for option, count in (("-e", "3"), ("-e", "3"), ("-d", "0"), ("-d", "0")):
        _told([gpusim.SRIOV_MANAGE, option, address])
        assert number.read_text().strip() == count
    _told([gpusim.SRIOV_MANAGE, "-e", "ALL"])
    assert _failure(number, "0") == errno.EPERM
    assert number.read_text() == "3\n"
    held = Path("/run/gpusim/held")
    held.parent.mkdir(exist_ok=True)
    held.touch()
    try:
        assert "Cannot obtain unbindLock" in _told([gpusim.SRIOV_MANAGE, "-d", address], status=1)
    finally:
        held.unlink()
    Path("/sys/module/gpusim/parameters/reject_raw").write_text("0")
    number.write_text("0")


@pytest.mark.usefixtures("tools")
def test_nvidia_smi_answers_as_the_real_one() -> None:
    gpusim.load(family="vendor")
    function, *_ = _functions(1)
    smi, gpu = gpusim.NVIDIA_SMI, f"0000{gpusim.gpu()}"
    fields = "pci.bus_id,persistence_mode,name,memory.total,mig.mode.current"
    query = (smi, f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    assert _told(query) == f"{gpu}, Disabled, NVIDIA L40S, 49152, [N/A]\n"
    whole = _told([smi, "-q", "-i", gpu])
    assert "Heterogenous Multi-vGPU           : Supported\n" in whole
    assert "vGPU Heterogeneous Mode           : Disabled\n" in whole
    _told([smi, "vgpu", "-shm", "1", "-i", gpu])
    assert "vGPU Heterogeneous Mode           : Enabled\n" in _told([smi, "-q", "-i", gpu])
    (function / "nvidia/current_vgpu_type").write_text("1156")
    busy = _told([smi, "vgpu", "-shm", "0", "-i", gpu], status=19)
    assert "In use by another client" in busy
    types = _told([smi, "vgpu", "-s", "-v", "-i", gpu])
    assert types.startswith(f"GPU {gpu}\n    vGPU Type ID                      : 0x479\n")
    assert types.count("        Max Instances                 : ") == 23
    assert _told([smi, "vgpu", "-c", "-v", "-i", gpu]) == f"GPU {gpu}\n"
    _told([smi, "-q", "-i", "00000000:99:00.0"], status=6)


@pytest.mark.usefixtures("tools")
def test_with_mig_a_vgpu_needs_a_gpu_instance() -> None:
    gpusim.load(family="vendor", model="A100")
    smi, gpu = gpusim.NVIDIA_SMI, gpusim.gpu()
    whole = _told([smi, "-q", "-i", gpu])
    assert "Heterogenous Multi-vGPU           : Not Supported\n" in whole
    _told([smi, "vgpu", "-shm", "1", "-i", gpu], status=3)
    _told([smi, "-mig", "1", "-i", gpu])
    first, second = _functions(2)
    assert _creatable(first) == []
    assert _failure(first / "nvidia/current_vgpu_type", "474") == errno.EIO
    _told([smi, "mig", "-cgi", "14,19", "-C", "-i", gpu])
    assert _creatable(first) == ["474   : GRID A100-1-5C", "475   : GRID A100-2-10C"]
    (first / "nvidia/current_vgpu_type").write_text("474")
    assert (first / "nvidia/gpu_instance_id").read_text() == "2\n"
    assert _failure(second / "nvidia/current_vgpu_type", "474") == errno.EIO
    assert _failure(second / "nvidia/current_vgpu_type", "468") == errno.EIO
    gpusim.disable()
    gpusim.enable(1)
    assert _creatable(first) == []
