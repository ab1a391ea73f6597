from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import agent_of, host_of, pci_device, with_facts
from vfiomgr.diagnostic import OVERRIDES
from vfiomgr.engine.registry import plan
from vfiomgr.errors import Refusal
from vfiomgr.passthrough.reset import unavailable, working
from vfiomgr.passthrough.steps import Bind, RequireAnswer, Reset, ResetFunction, SetResetMethod
from vfiomgr.pci.capabilities import Offer, ResetCapabilities, ResetMethod
from vfiomgr.pci.model import PciAddress
from vfiomgr.users.model import DeviceUser, HostUse

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Override
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

GPU = replace(pci_device(), driver="nvme", nodes=("/dev/dri/card1",))
AUDIO = replace(pci_device("0000:04:00.1"), driver="snd_hda_intel", reset_method=())


def reset(
    host: HostSnapshot, method: ResetMethod | None = None, *allow: Override
) -> tuple[object, ...]:
    return plan(host, Reset(GPU.address, method, frozenset(allow))).steps


def saying(device: PciDevice, flr: Offer, af_flr: Offer, pm: Offer) -> HostSnapshot:
    """A host that could read the configuration space of one function."""
    said = ResetCapabilities(device.address, flr, af_flr, pm, "0600")
    return with_facts(host_of(device), reset_capabilities=(said,))


def test_the_kernel_chooses_where_nobody_does() -> None:
    assert reset(host_of(GPU)) == (ResetFunction(GPU.identity, None),)


def test_a_method_is_chosen_for_this_time_alone() -> None:
    choose = SetResetMethod(GPU.identity, before="flr bus", after="bus")
    assert reset(host_of(GPU), "bus") == (
        choose,
        ResetFunction(GPU.identity, None),
        choose.inverse(),
    )
    only = replace(GPU, reset_method=("bus",))
    assert reset(host_of(only), "bus") == (ResetFunction(GPU.identity, None),)


def test_a_reset_is_undone_by_looking_for_the_function() -> None:
    assert ResetFunction(GPU.identity, None).inverse() == RequireAnswer(GPU.identity, None)


def test_what_the_function_was_like_is_what_it_must_be_like_after() -> None:
    (step,) = reset(saying(GPU, "yes", "absent", "no"))
    assert step == ResetFunction(GPU.identity, "0600")


def test_a_native_driver_is_told_of() -> None:
    made = plan(host_of(GPU), Reset(GPU.address))
    assert "remains bound to nvme, which handles resets" in made.notes[0]
    assert made.locks == ("group-4",)
    bound = replace(GPU, driver="vfio-pci")
    assert plan(host_of(bound), Reset(GPU.address)).notes == ()


@pytest.mark.parametrize(
    ("driver", "release", "is_reset"),
    [
        ("nvidia", "7.2.0", False),
        ("xhci_hcd", "7.2.0", False),
        ("virtio-pci", "7.2.0", False),
        ("nvme", "6.1.0-56-amd64", True),
        ("nvme", "5.15.0-91-generic", False),
        ("nvme", None, False),
        ("idxd", "6.12.57", False),
        ("idxd", "7.2.13", True),
        ("vfio-pci", None, True),
        ("mlx5_vfio_pci", "6.1.0", True),
        (None, None, True),
    ],
)
def test_a_function_on_a_driver_that_is_not_known_to_handle_resets_is_not_reset(
    driver: str | None, release: str | None, *, is_reset: bool
) -> None:
    host = with_facts(host_of(replace(GPU, driver=driver)), kernel_release=release)
    if is_reset:
        assert plan(host, Reset(GPU.address)).steps == (ResetFunction(GPU.identity, None),)
        return
    with pytest.raises(Refusal, match=f"its driver {driver} is not known to handle resets"):
        plan(host, Reset(GPU.address, allow=frozenset(OVERRIDES)))


def test_a_gpu_that_a_reset_may_lose_is_noted() -> None:
    gpu = replace(GPU, vendor_id="1002", device_id="74a1", class_code="120000", driver="vfio-pci")
    for request in (Reset(gpu.address), Reset(gpu.address, "bus")):
        (note,) = plan(host_of(gpu), request).notes
        assert note.startswith("0000:04:00.0 may be lost by the reset, until the host reboots")
    for other in (
        replace(gpu, device_id="74a5"),
        replace(gpu, vendor_id="10de"),
        replace(gpu, physical_function=PciAddress.parse("0000:03:00.0")),
    ):
        assert plan(host_of(other), Reset(gpu.address)).notes == ()


def test_the_kernel_decides_whether_a_module_resets_a_gpu_of_amd() -> None:
    known = {"vendor_id": "1002", "device_id": "67df"}
    gpu = replace(GPU, **known, class_code="030000", driver="vfio-pci")
    assert reset(host_of(gpu), "device_specific")[0] == SetResetMethod(
        gpu.identity, before="flr bus", after="device_specific"
    )
    assert "vendor-reset" in unavailable(host_of(gpu), gpu)["device_specific"]
    free = host_of(replace(gpu, driver=None, nodes=()))
    made = plan(free, Bind((gpu.address,), reset_method="device_specific"))
    assert "device_specific" in str(made.steps)
    for other in ({"reset_method": ()}, {"class_code": "020000"}, {"device_id": "7550"}):
        with pytest.raises(Refusal, match="cannot be reset by device_specific"):
            reset(host_of(replace(gpu, **other)), "device_specific")


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("pm", r"pm: keeps its state \(NoSoftRst\)"),
        ("af_flr", "af_flr: no Advanced Features capability"),
        ("flr", "flr: not supported"),
        ("acpi", "acpi: the firmware has no _RST"),
        ("device_specific", "the kernel has no quirk"),
        ("cxl_bus", "no CXL port"),
    ],
)
def test_a_method_that_is_missing_is_refused_with_the_reason_and_those_there_are(
    method: ResetMethod, words: str
) -> None:
    host = saying(replace(GPU, reset_method=("bus",)), "no", "absent", "no")
    with pytest.raises(Refusal, match=words) as caught:
        reset(host, method)
    assert caught.value.hint == "use one of: bus"


def test_what_the_function_offers_but_the_list_leaves_out_is_told() -> None:
    host = saying(replace(GPU, reset_method=("bus",)), "yes", "absent", "no")
    with pytest.raises(Refusal, match="but not in reset_method"):
        reset(host, "flr")


def test_what_was_not_read_is_not_guessed() -> None:
    with pytest.raises(Refusal, match="its configuration space was not read"):
        reset(host_of(GPU), "pm")


def test_a_bus_with_other_functions_is_not_reset_though_it_is_listed() -> None:
    host = host_of(GPU, AUDIO)
    assert unavailable(host, GPU)["bus"] == "its bus also has 0000:04:00.1"
    with pytest.raises(Refusal, match=r"by bus: its bus also has 0000:04:00\.1") as caught:
        reset(host, "bus")
    assert caught.value.hint == "use one of: flr"
    assert reset(host) == (ResetFunction(GPU.identity, None),)


def test_the_plan_and_the_refusal_name_the_same_methods() -> None:
    gpu = replace(GPU, reset_method=("flr", "pm", "bus"))
    host = host_of(gpu, AUDIO)
    assert working(host, gpu) == ("flr", "pm")
    assert plan(host, Reset(GPU.address)).summary == "reset 0000:04:00.0 by flr, pm"
    with pytest.raises(Refusal) as caught:
        reset(host, "bus")
    assert caught.value.hint == "use one of: flr, pm"
    old = host_of(replace(GPU, reset_method=()))
    assert plan(old, Reset(GPU.address)).summary.endswith("by the kernel's default method")


def test_a_device_elsewhere_is_no_neighbour() -> None:
    elsewhere = [replace(pci_device(a), iommu_group=7) for a in ("0000:05:00.0", "0001:04:00.0")]
    assert "bus" not in unavailable(host_of(GPU, *elsewhere), GPU)


@pytest.mark.parametrize("path", ["pci0000:00", "platform/4010000000.pcie/pci0000:00"])
def test_a_root_bus_cannot_be_reset(path: str) -> None:
    device = replace(GPU, bridge_path=path, reset_method=("flr",))
    assert unavailable(host_of(device), device)["bus"] == "a root bus cannot be reset"


def test_where_no_method_works_all_reasons_are_told() -> None:
    host = saying(replace(GPU, reset_method=("bus",)), "no", "absent", "no")
    with pytest.raises(Refusal, match=r"cannot be reset: flr: .*; pm: .*; bus: ") as caught:
        reset(with_facts(host, devices=(*host.devices, AUDIO)))
    assert "all functions of its slot" in caught.value.hint


def test_a_kernel_that_tells_no_methods_is_left_to_try() -> None:
    assert reset(host_of(replace(GPU, reset_method=()))) == (ResetFunction(GPU.identity, None),)


def obstacles() -> list[tuple[HostSnapshot, str, Override | None]]:
    user = DeviceUser("/dev/dri/card1", 812, "gnome-shell")
    guest = DeviceUser("/dev/vfio/4", 4711, "qemu-system-x86")
    bound = replace(GPU, driver="vfio-pci")
    parent = replace(GPU, virtual_functions=(AUDIO.address,))
    disk = HostUse(GPU.address, "mounted-disk", "/dev/sda1 on /")
    route = HostUse(GPU.address, "default-route", "eth0")
    network = HostUse(GPU.address, "network", "interface eth0: part of br0")
    return [
        (with_facts(host_of(GPU), users=(user,)), r"in use by: gnome-shell \(PID 812\)", "in-use"),
        (
            with_facts(host_of(bound), users=(guest,)),
            r"in use by: qemu-system-x86 \(PID 4711\)",
            None,
        ),
        (
            host_of(replace(GPU, is_boot_display=True, display_signs=("boot_vga",))),
            "the console's display",
            "boot-display",
        ),
        (
            with_facts(host_of(GPU), host_uses=(disk,)),
            "has a disk that the host uses",
            "mounted-disk",
        ),
        (with_facts(host_of(GPU), host_uses=(route,)), "default route", "default-route"),
        (with_facts(host_of(GPU), host_uses=(network,)), "in use by the host's network", "in-use"),
        (
            with_facts(host_of(bound), agent=agent_of(str(GPU.address), pod="ml/train-0/main")),
            "belongs to pod ml/train-0",
            "in-use",
        ),
        (
            with_facts(host_of(bound), agent=agent_of(str(GPU.address), ago=2.4)),
            "was given to a pod 2 s ago",
            "in-use",
        ),
        *(
            (
                with_facts(host_of(bound), agent=agent_of(*named, claim="ml/train")),
                "belongs to ResourceClaim ml/train",
                "in-use",
            )
            for named in ((str(GPU.address),), (str(AUDIO.address), str(GPU.address)))
        ),
        (host_of(parent), "has 1 active virtual function", None),
        (host_of(replace(GPU, header_type=1)), "is a bridge", None),
        (host_of(replace(GPU, is_responsive=False)), "does not answer", None),
    ]


@pytest.mark.parametrize(
    ("driver", "command"),
    [("nvidia", f"vfiomgr sriov set {GPU.address} 0"), ("gim", "modprobe -r gim (removes")],
)
def test_a_refusal_names_what_removes_virtual_functions(driver: str, command: str) -> None:
    parent = replace(GPU, virtual_functions=(AUDIO.address,), driver=driver)
    with pytest.raises(Refusal) as caught:
        reset(host_of(parent))
    assert f"reset one of them, or remove them: {command}" in caught.value.hint


def test_a_refusal_says_how_a_pod_of_which_only_the_uid_is_known_is_found() -> None:
    bound = replace(GPU, driver="vfio-pci")
    with pytest.raises(Refusal) as caught:
        reset(with_facts(host_of(bound), agent=agent_of(str(GPU.address), pod="0b9c-1/main")))
    assert "find the pod with this UID, and delete it: kubectl get pods -A" in caught.value.hint
    assert "| grep 0b9c-1, or pass --allow in-use" in caught.value.hint


@pytest.mark.parametrize(("host", "reason", "allowance"), obstacles())
def test_what_would_hurt_is_refused_and_its_own_flag_lifts_it(
    host: HostSnapshot, reason: str, allowance: Override | None
) -> None:
    others: set[Override] = {"boot-display", "in-use", "mounted-disk", "default-route"}
    with pytest.raises(Refusal, match=reason) as caught:
        reset(host, None, *(others - {allowance}))
    assert "--function-only" not in caught.value.hint
    if allowance is not None:
        assert f"--allow {allowance}" in caught.value.hint
        assert reset(host, None, allowance)
