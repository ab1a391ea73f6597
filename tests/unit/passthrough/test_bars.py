"""`bind --bar`: refusals, what is written, what leads back; with a fault at every operation."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes.bars import ENOTSUPP, FakeBar
from tests.fakes.hosts import network_adapter, workstation
from tests.fakes.sysfs import READ_ONLY
from tests.unit.devices import host_of, pci_device, with_facts
from tests.unit.engine.faults import Course, Courses, EveryFault
from vfiomgr.engine.registry import plan
from vfiomgr.errors import Refusal, RolledBack, UsageError
from vfiomgr.passthrough.named import Bind as NamedBind
from vfiomgr.passthrough.steps import Bind, ChangeDriver, Unbind
from vfiomgr.pci.bars import BarSize
from vfiomgr.pci.drivers import DriverState, OriginalState, read_origins
from vfiomgr.pci.function import present_bars
from vfiomgr.pci.model import Bar, PciAddress
from vfiomgr.pci.model import pci_device as directory_of
from vfiomgr.users.model import DeviceUser

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.paths import HostPath
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

MIB, GIB = 1 << 20, 1 << 30
NIC = PciAddress.parse("0000:05:00.0")
CARD = PciAddress.parse("0000:01:00.0")
OFFERED = (256 * MIB, GIB, 16 * GIB)
LARGE, SMALL = BarSize(1, 16 * GIB), BarSize(1, 256 * MIB)
BAR = Bar(1, 1 << 40, 256 * MIB, True, True, True, OFFERED)  # noqa: FBT003 - the kinds of a BAR
GPU = replace(pci_device(), bars=(BAR,))
BOUND = replace(GPU, driver="vfio-pci", driver_override="vfio-pci")


def refused(host: HostSnapshot, *bars: BarSize) -> tuple[str, str]:
    with pytest.raises(Refusal) as caught:
        plan(host, Bind((GPU.address,), bars=bars or (LARGE,)))
    (found,) = caught.value.diagnostics
    assert found.rule == "bar-size"
    return found.summary, found.remedy


def of_kernel(release: str, device: PciDevice = GPU) -> HostSnapshot:
    return with_facts(host_of(device), kernel_release=release)


def test_the_sizes_are_parts_of_the_step_between_unbind_and_bind() -> None:
    made = plan(host_of(GPU), Bind((GPU.address,), bars=(LARGE,)))
    (step,) = (one for one in made.steps if isinstance(one, ChangeDriver))
    assert (step.before.bars, step.after.bars) == ((SMALL,), (LARGE,))
    assert step.describe().endswith(", BAR 1 256M -> 16G")
    place = f"/sys/bus/pci/devices/{GPU.address}"
    assert step.commands()[1:] == (
        f"echo {GPU.address} > {place}/driver/unbind",
        f"echo 14 > {place}/resource1_resize",
        f"echo {GPU.address} > /sys/bus/pci/drivers_probe",
    )
    assert f"echo 8 > {place}/resource1_resize" in step.inverse().commands()


def test_no_size_is_chosen_or_recorded_unless_it_is_asked_for() -> None:
    for step in plan(host_of(GPU), Bind((GPU.address,))).steps:
        if isinstance(step, ChangeDriver):
            assert step.before.bars == step.after.bars == ()


def test_a_bar_that_shrinks_makes_room_first() -> None:
    other = replace(BAR, index=3, size=16 * GIB)
    host = host_of(replace(GPU, bars=(BAR, other)))
    made = plan(host, Bind((GPU.address,), bars=(LARGE, BarSize(3, GIB))))
    (step,) = (one for one in made.steps if isinstance(one, ChangeDriver))
    assert step.describe().endswith(", BAR 3 16G -> 1G, BAR 1 256M -> 16G")


def test_a_size_that_is_not_offered_is_refused_with_those_that_are() -> None:
    summary, remedy = refused(host_of(GPU), BarSize(1, 32 * GIB))
    assert summary.endswith("does not offer 32G")
    assert remedy == "use one of: 256M, 1G, 16G"


def test_a_bar_that_cannot_be_resized_is_refused_with_those_that_can() -> None:
    for index in (0, 3):
        host = host_of(replace(GPU, bars=(replace(BAR, index=0, sizes=()), BAR)))
        summary, remedy = refused(host, BarSize(index, GIB))
        assert summary.startswith(f"BAR {index} of ")
        assert summary.endswith("cannot be resized")
        assert remedy == "resizable BARs: --bar 1: 256M 1G 16G"
    assert refused(host_of(replace(GPU, bars=())))[1] == "leave out --bar"


def test_a_function_that_sleeps_is_woken_first() -> None:
    asleep = replace(GPU, bars=(replace(BAR, sizes=None),), runtime_status="suspended")
    summary, remedy = refused(host_of(asleep))
    assert "are unknown, because the function is suspended" in summary
    assert f"echo on > /sys/bus/pci/devices/{GPU.address}/power/control" in remedy


def test_an_old_kernel_is_named() -> None:
    plain = replace(GPU, bars=(replace(BAR, sizes=()),))
    assert refused(of_kernel("6.0.12", plain)) == (
        "Linux 6.0.12 cannot resize BARs",
        "boot Linux 6.1 or later",
    )
    assert refused(of_kernel("6.1.0", plain))[0].endswith("cannot be resized")


def test_a_device_that_is_bound_with_another_size_is_unbound_first() -> None:
    again = f"vfiomgr unbind {GPU.address}; vfiomgr bind --bar 1=16G {GPU.address}"
    summary, remedy = refused(host_of(BOUND))
    assert summary.endswith("it is on vfio-pci, with 256M")
    assert remedy == again
    unread = replace(BAR, sizes=None)
    asleep = replace(BOUND, bars=(unread,), runtime_status="suspended")
    assert refused(host_of(asleep)) == (summary, again)
    same = replace(asleep, bars=(replace(unread, size=16 * GIB),))
    assert plan(host_of(same), Bind((GPU.address,), bars=(LARGE,))).is_empty


def test_a_record_without_the_size_could_not_lead_back() -> None:
    origin = OriginalState(GPU.identity, DriverState("nvidia", None, "on"), "nvidia", "boot")
    half_way = replace(GPU, driver=None, driver_override="vfio-pci")
    summary, remedy = refused(with_facts(host_of(half_way), origins=(origin,)))
    assert summary.endswith("its saved state does not include the size of the BAR")
    assert remedy.startswith("vfiomgr unbind ")
    kept = replace(origin, state=replace(origin.state, bars=(SMALL,)))
    known = with_facts(host_of(half_way), origins=(kept,))
    assert not plan(known, Bind((GPU.address,), bars=(LARGE,))).is_empty


def test_a_kernel_that_unlocks_what_it_has_not_locked_is_refused() -> None:
    on_root = replace(GPU, bridge_path="pci0000:00")
    for release in ("6.19.0", "7.2.4"):
        summary, remedy = refused(of_kernel(release, on_root))
        assert "on a root bus" in summary
        assert remedy.startswith("boot Linux 7.3 or later")
    for host in (*(of_kernel(good, on_root) for good in ("6.18.0", "7.3.0")), of_kernel("6.19.0")):
        assert not plan(host, Bind((GPU.address,), bars=(LARGE,))).is_empty


def test_virtual_functions_are_removed_first() -> None:
    host = host_of(replace(GPU, virtual_functions=(PciAddress(0, 4, 0, 4),)))
    with pytest.raises(Refusal, match="has 1 active virtual function"):
        plan(host, Bind((GPU.address,), bars=(LARGE,)))


def test_a_bind_with_sizes_is_not_offered_for_the_next_boot() -> None:
    user = DeviceUser("/dev/nvidia0", 7, "Xorg")
    host = with_facts(host_of(replace(GPU, nodes=("/dev/nvidia0",))), users=(user,))
    for bars, is_offered in (((), True), ((LARGE,), False)):
        with pytest.raises(Refusal, match="Xorg") as caught:
            plan(host, Bind((GPU.address,), bars=bars))
        assert ("--at-boot" in caught.value.hint) is is_offered


# ---- as a person writes it


@pytest.mark.parametrize("text", ["1", "1=", "6=16G", "x=16G", "1=3G", "1=0", "1=16Q", "-1=16G"])
def test_what_is_no_size_of_a_bar(text: str) -> None:
    with pytest.raises(UsageError, match="is not the number of a BAR with its size"):
        BarSize.parse(text)


@pytest.mark.parametrize(
    ("text", "wanted", "encoded"),
    [("1=16G", "1=16G", "14"), ("0=256", "0=256M", "8"), ("5=1024M", "5=1G", "10")],
)
def test_sizes_are_written_like_those_of_memory(text: str, wanted: str, encoded: str) -> None:
    found = BarSize.parse(text)
    assert (str(found), found.encoded) == (wanted, encoded)


def named(tmp_path: Path, **options: Any) -> Bind:
    return NamedBind(str(NIC), **options).request(api.host_at(network_adapter(tmp_path)))


def test_the_library_takes_the_same_words(tmp_path: Path) -> None:
    assert named(tmp_path, bars=("1=16G",)).bars == (LARGE,)
    with pytest.raises(UsageError, match="two sizes for BAR 1"):
        named(tmp_path, bars=("1=16G", "1=256M"))


@pytest.mark.parametrize("option", ["persist", "at_boot"])
def test_rules_for_the_next_boot_do_not_resize(tmp_path: Path, option: str) -> None:
    with pytest.raises(UsageError, match="no udev rule resizes it"):
        named(tmp_path, bars=("1=16G",), **{option: True})


# ---- on the fake kernel


def resizable(tmp_path: Path) -> FakeKernel:
    kernel = network_adapter(tmp_path)
    return kernel.add_bars(str(NIC), FakeBar(1, 256, (256, 1024, 16384)), FakeBar(3, 64, (32, 64)))


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return resizable(tmp_path)


def sizes(kernel: FakeKernel, address: PciAddress = NIC) -> dict[int, int]:
    return {bar.index: bar.size // MIB for bar in present_bars(kernel, address)}


BOTH = Bind((NIC,), bars=(LARGE, BarSize(3, 32 * MIB)))


def test_sizes_last_as_long_as_the_binding(kernel: FakeKernel) -> None:
    before = kernel.read_text(directory_of(NIC) / "resource")
    outcome = api.apply(BOTH, tree=kernel)
    assert sizes(kernel) == {0: 16, 1: 16384, 3: 32}
    resized = [path.name for path, _ in kernel.writes if path.name.endswith("_resize")]
    assert resized == ["resource3_resize", "resource1_resize"], "what shrinks makes room"
    assert outcome.is_changed
    assert not api.apply(BOTH, tree=kernel).is_changed
    (origin,) = read_origins(kernel)
    assert origin.state.bars == (SMALL, BarSize(3, 64 * MIB))
    api.apply(Unbind((NIC,)), tree=kernel)
    assert kernel.driver_of(str(NIC)) == "igb"
    assert kernel.read_text(directory_of(NIC) / "resource") == before


def test_sizes_survive_that_somebody_else_unbound_it(kernel: FakeKernel) -> None:
    api.apply(BOTH, tree=kernel)
    kernel.write(directory_of(NIC) / "driver/unbind", str(NIC))
    api.apply(Unbind((NIC,)), tree=kernel)
    assert (kernel.driver_of(str(NIC)), sizes(kernel)[1]) == ("igb", 256)


def test_a_plain_unbind_does_not_resize(kernel: FakeKernel) -> None:
    api.apply(Bind((NIC,)), tree=kernel)
    kernel.bars.is_preserved = True
    api.apply(Unbind((NIC,)), tree=kernel)
    assert not any(path.name.endswith("_resize") for path, _ in kernel.writes)


def test_only_the_named_function_of_a_card_is_resized(tmp_path: Path) -> None:
    kernel = workstation(tmp_path, vfio_loaded=True)
    kernel.add_bars(str(CARD), FakeBar(1, 256, (256, 16384)))
    api.apply(Bind((CARD,), bars=(LARGE,)), tree=kernel)
    assert kernel.driver_of("0000:01:00.1") == "vfio-pci"
    assert sizes(kernel, CARD)[1] == 16384
    api.apply(Unbind((CARD,)), tree=kernel)
    assert (kernel.driver_of(str(CARD)), sizes(kernel, CARD)[1]) == ("nvidia", 256)


def no_room(kernel: FakeKernel) -> None:
    kernel.bars.room[str(NIC)] = 8192


def shared(kernel: FakeKernel) -> None:
    kernel.bars.pinned.add(str(NIC))


def preserved(kernel: FakeKernel) -> None:
    kernel.bars.is_preserved = True


@pytest.mark.parametrize(
    ("obstacle", "number", "cause", "remedy"),
    [
        (no_room, errno.ENOSPC, "have no room", "choose a smaller size"),
        (shared, errno.ENOENT, "another BAR is in it", "firmware setup"),
        (preserved, ENOTSUPP, "keeps the addresses of BARs", "firmware setup"),
    ],
)
def test_what_the_kernel_refuses_is_explained_and_undone(
    kernel: FakeKernel,
    obstacle: Callable[[FakeKernel], None],
    number: int,
    cause: str,
    remedy: str,
) -> None:
    before = kernel.state(modules=False)
    obstacle(kernel)
    with pytest.raises(RolledBack, match=cause) as caught:
        api.apply(Bind((NIC,), bars=(LARGE,)), tree=kernel)
    assert f"BAR 1 of {NIC} to 16G" in caught.value.message
    assert remedy in caught.value.hint
    assert os.strerror(number) in caught.value.message
    assert kernel.state(modules=False) == before


@pytest.mark.parametrize(
    ("how", "cause"),
    [("ignored", "to 16G: it has 256M"), ("lost", "no address for BAR 3")],
)
def test_success_is_only_what_resource_shows(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, how: str, cause: str
) -> None:
    show = kernel.bars.show

    def pretend(directory: HostPath, wanted: dict[int, int]) -> None:
        """Report success, and change nothing, or find no address for another BAR."""
        if wanted[1] == 256:
            show(directory, wanted)
        elif how == "lost":
            show(directory, wanted)
            lines = kernel.sysfs.get(directory / "resource").splitlines()
            lines[3] = f"0x{0:016x} 0x{64 * MIB - 1:016x} 0x000000002014220c"
            kernel.sysfs.put(directory / "resource", "\n".join(lines), READ_ONLY)

    monkeypatch.setattr(kernel.bars, "show", pretend)
    with pytest.raises(RolledBack, match=cause):
        api.apply(Bind((NIC,), bars=(LARGE,)), tree=kernel)
    assert (kernel.driver_of(str(NIC)), sizes(kernel)[1]) == ("igb", 256)


def enlarging(tmp_path: Path) -> FakeKernel:
    """A host driver that enlarges the BAR when it binds, as amdgpu does."""
    kernel = resizable(tmp_path)

    def enlarge(driver: Any, address: str) -> None:
        if (driver.name, address) == ("igb", str(NIC)):
            kernel.bars.add(address, [FakeBar(1, 16384)])

    kernel.drivers.when_bound.append(enlarge)
    return kernel


def test_what_the_host_driver_does_to_a_bar_is_left(tmp_path: Path) -> None:
    kernel = enlarging(tmp_path)
    api.apply(Bind((NIC,), bars=(BarSize(1, GIB),)), tree=kernel)
    assert sizes(kernel)[1] == 1024
    api.apply(Unbind((NIC,)), tree=kernel)
    assert (kernel.driver_of(str(NIC)), sizes(kernel)[1]) == ("igb", 16384)
    assert read_origins(kernel) == ()


def unbind(kernel: FakeKernel) -> None:
    api.apply(Unbind((NIC,)), tree=kernel)


def bound(tmp_path: Path) -> Course:
    return Course(tmp_path, lambda place: (resizable(place), BOTH), unbind)


def enlarged_by_the_driver(tmp_path: Path) -> Course:
    def prepared(place: Path) -> tuple[FakeKernel, Bind]:
        kernel = enlarging(place)
        kernel.bars.add(str(NIC), [FakeBar(1, 16384)])
        return kernel, Bind((NIC,), bars=(SMALL,))

    return Course(tmp_path, prepared, unbind)


def unbound(tmp_path: Path) -> Course:
    def prepared(place: Path) -> tuple[FakeKernel, Unbind]:
        kernel = resizable(place)
        api.apply(BOTH, tree=kernel)
        return kernel, Unbind((NIC,))

    return Course(tmp_path, prepared)


class TestFaults(EveryFault):
    """A failure, and a death, at each operation."""

    courses: ClassVar[Courses] = {
        "bound": bound,
        "shrunk": enlarged_by_the_driver,
        "unbound": unbound,
    }
