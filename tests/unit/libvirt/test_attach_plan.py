"""What a domain can be given, what it must give back, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.fakes.functions import moved
from tests.unit.devices import agent_of, host_of, pci_device, with_facts
from tests.unit.libvirt.domains import EMPTY, hostdev, hypervisor, known, with_hostdevs, with_ports
from vfiomgr.definitions.model import DefinitionFacts, VgpuDefinition, render_definition
from vfiomgr.documents.text import TextFile
from vfiomgr.errors import Refusal, UnknownDevice
from vfiomgr.guests.model import GuestAddress
from vfiomgr.libvirt.attach.claims import Scope, claims_of
from vfiomgr.libvirt.attach.plan import (
    AttachPlan,
    AttachRequest,
    plan_attach,
    plan_detach,
    usual_scope,
)
from vfiomgr.libvirt.model import DomainIommu, DomainLaunch, HookSettings, PciController
from vfiomgr.paths import SCRIPT
from vfiomgr.pci.iommu import VfioState
from vfiomgr.pci.model import PciAddress
from vfiomgr.units import Version
from vfiomgr.users.model import DeviceUser
from vfiomgr.vgpu.model import Vgpu, VgpuParent, describe_type

if TYPE_CHECKING:
    from vfiomgr.libvirt.model import Hypervisor, KnownDomain
    from vfiomgr.snapshot.model import HostSnapshot

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
PARENT = PciAddress.parse("0000:41:00.0")
GPU = replace(pci_device("0000:04:00.0"), driver="vfio-pci")
AUDIO = replace(GPU, address=moved(GPU.address, function=1))
VF = replace(
    pci_device("0000:41:00.4"), driver="vfio-pci", physical_function=PARENT, iommu_group=30
)
VENDOR = replace(VF, address=PciAddress.parse("0000:41:00.5"), driver="nvidia", iommu_group=31)
LONE = replace(pci_device("0000:09:00.0"), driver="vfio-pci", iommu_group=9)
ON_HOST = replace(pci_device("0000:0a:00.0"), iommu_group=10)
MDEV = Vgpu(UUID, "mdev", "mtty", "mtty-2", None, None, 40, None, None)
BOTH, LIVE, CONFIG = Scope(True, True), Scope(True, False), Scope(False, True)  # noqa: FBT003
RUNNING = with_ports(EMPTY, 1, 2)


def host() -> HostSnapshot:
    vendor_type = describe_type("1155", "NVIDIA L40S-12Q")
    parent = VgpuParent(
        str(VENDOR.address), "p", "vendor-vfio", "nvidia", str(PARENT), (vendor_type,), (1,)
    )
    active = Vgpu(None, "vendor-vfio", parent.name, "1155", None, "nvidia", 31, None, None)
    found = host_of(GPU, AUDIO, VF, VENDOR, LONE, ON_HOST)
    return with_facts(found, vgpu_parents=(parent,), vgpus=(MDEV, active), users=())


def planned(
    *devices: str,
    domain: KnownDomain | None = None,
    others: tuple[KnownDomain, ...] = (),
    scope: Scope = BOTH,
    libvirt: Hypervisor | None = None,
    on: HostSnapshot | None = None,
    **wanted: bool,
) -> AttachPlan:
    chosen = domain or known(RUNNING, RUNNING)
    asked = AttachRequest(devices, scope, **wanted)
    return plan_attach(on or host(), libvirt or hypervisor(chosen, *others), chosen, asked)


def refused(*devices: str, **settings: object) -> str:
    with pytest.raises(Refusal) as caught:
        planned(*devices, **settings)  # type: ignore[arg-type]
    assert caught.value.hint
    return f"{caught.value.message} -> {caught.value.hint}"


# ---- attach


def test_a_virtual_function_goes_alone_and_without_an_address() -> None:
    (item,) = planned("41:00.4").items
    assert (item.names, item.scope, item.bus) == (("0000:41:00.4",), BOTH, None)


def test_a_gpu_goes_to_a_definition_with_its_audio_on_the_first_free_port() -> None:
    taken = with_hostdevs(RUNNING, hostdev(str(LONE.address), GuestAddress(1, 0, 0)))
    (item,) = planned("04:00.1", domain=known(None, taken), scope=CONFIG).items
    assert item.names == ("0000:04:00.0", "0000:04:00.1")
    assert item.bus == 2


def test_a_guest_with_an_iommu_gets_one_function_of_a_group() -> None:
    """Behind a port each function is an address space of its own there."""
    nested = replace(RUNNING, iommus=(DomainIommu("intel", has_caching_mode=True),))
    told = refused("04:00.0", domain=known(None, nested), scope=CONFIG)
    assert "cannot add 0000:04:00.0, 0000:04:00.1 to win: behind its IOMMU" in told
    assert "--function-only" in told
    alone = planned("04:00.0", domain=known(None, nested), scope=CONFIG, only=True)
    assert alone.items[0].names == ("0000:04:00.0",)
    has_one = with_hostdevs(nested, hostdev("0000:04:00.1", GuestAddress(1, 0, 0)))
    assert (
        ": behind its IOMMU each PCI Express function has its own address space, but IOMMU group"
        in refused("04:00.0", domain=known(has_one), scope=LIVE, only=True)
    )
    assert planned("41:00.4", domain=known(has_one), scope=LIVE).items, "of another group"
    of_a_bus = replace(RUNNING, iommus=(DomainIommu("smmuv3", bus=1),))
    assert planned("04:00.0", domain=known(None, of_a_bus), scope=CONFIG).items


@pytest.mark.parametrize("scope", [LIVE, CONFIG, BOTH])
def test_a_confidential_guest_gets_devices_from_qemu_10_1_on(scope: Scope) -> None:
    launch = DomainLaunch(1, "sev-snp")
    guest = known(replace(RUNNING, launch=launch), replace(RUNNING, launch=launch))
    old = replace(hypervisor(guest), qemu=Version(10, 0))
    told = refused("41:00.4", domain=guest, scope=scope, libvirt=old)
    assert "QEMU 10.0.0 does not support host devices in win, a guest with sev-snp -> " in told
    assert "install QEMU 10.1.0 or later" in told
    new = replace(old, qemu=Version(10, 1))
    plan = planned("41:00.4", domain=guest, scope=scope, libvirt=new)
    assert any(note.startswith("devices reach only memory that") for note in plan.notes)


def test_a_function_that_needs_a_vf_token_goes_to_a_definition_that_has_one() -> None:
    owner = replace(pci_device(str(PARENT)), driver="vfio-pci", sriov_totalvfs=4, iommu_group=29)
    on = with_facts(host_of(owner, VF), users=())
    told = refused("41:00.4", on=on, scope=CONFIG)
    assert "its physical function 0000:41:00.0 is on vfio-pci" in told
    home = " -> return 0000:41:00.0 to its host driver: vfiomgr unbind 0000:41:00.0"
    assert f"{home}; or write the token into the domain: vfiomgr libvirt domain" in told
    given = replace(RUNNING, qemu_arguments=("-set", f"device.hostdev0.vf-token={UUID}"))
    has_one = known(given, given)
    assert planned("41:00.4", on=on, domain=has_one, scope=CONFIG).items
    taken = with_hostdevs(given, hostdev(str(LONE.address)))
    of_another = known(taken, taken)
    assert refused("41:00.4", on=on, domain=of_another, scope=CONFIG) == told
    live = refused("41:00.4", on=on, domain=has_one, scope=LIVE)
    assert live.endswith(home), "a running guest gets no token"
    assert refused("41:00.4", on=on, domain=has_one, scope=BOTH) == live
    at_home = with_facts(on, devices=(replace(owner, driver="nvidia"), VF))
    assert planned("41:00.4", on=at_home, scope=LIVE).items


def test_only_the_side_that_gets_a_device_has_to_be_confidential() -> None:
    old = replace(hypervisor(known(RUNNING, RUNNING)), qemu=Version(10, 0))
    guest = known(RUNNING, replace(RUNNING, launch=DomainLaunch(1, "tdx")))
    assert planned("41:00.4", domain=guest, scope=LIVE, libvirt=old).notes == ()
    assert "a guest with tdx" in refused("41:00.4", domain=guest, scope=CONFIG, libvirt=old)
    other = known(None, replace(RUNNING, launch=DomainLaunch(1, "sev")))
    assert planned("41:00.4", domain=other, scope=CONFIG, libvirt=old).items


def test_without_a_free_port_a_definition_gets_a_new_one() -> None:
    full = with_hostdevs(
        RUNNING,
        hostdev("0000:0b:00.0", GuestAddress(1, 0, 0)),
        hostdev("0000:0c:00.0", GuestAddress(2, 0, 0)),
    )
    (item,) = planned("04:00.0", domain=known(None, full), scope=CONFIG).items
    assert item.bus == 3


def test_a_port_near_one_node_of_the_guest_is_left_and_the_last_bus_is_the_last() -> None:
    expander = PciController(1, 5, "pcie-expander-bus", bus_nr=200)
    far = PciController(1, 6, "pcie-root-port", GuestAddress(5, 0, 0))
    only_far = replace(EMPTY, controllers=(*EMPTY.controllers, expander, far))
    (item,) = planned("04:00.0", domain=known(None, only_far), scope=CONFIG).items
    assert item.bus == 7, "behind the expander it would be near one of the guest's nodes"
    full = with_ports(EMPTY, *range(1, 256))
    taken = replace(full, taken=tuple(GuestAddress(bus, 0, 0) for bus in range(1, 256)))
    assert "has no free bus for" in refused("04:00.0", domain=known(None, taken), scope=CONFIG)


def test_a_definition_without_pci_express_gets_functions_one_by_one() -> None:
    old = replace(EMPTY, machine="pc-i440fx-7.2", controllers=())
    (item,) = planned("04:00.0", domain=known(None, old), scope=CONFIG).items
    assert item.bus is None


def test_a_running_guest_takes_no_device_of_several_functions() -> None:
    told = refused("04:00.0")
    assert "one function at a time" in told
    assert "--config" in told
    assert "--function-only" in told


def test_with_only_it_takes_one_of_them() -> None:
    (item,) = planned("04:00.0", only=True).items
    assert item.names == ("0000:04:00.0",)


def test_each_device_of_a_running_guest_needs_a_free_port() -> None:
    assert len(planned("41:00.4", UUID).items) == 2
    told = refused("41:00.4", UUID, "09:00.0")
    assert "has 2 free root ports, but 3 needed while it runs" in told
    assert "<controller type='pci' model='pcie-root-port'/>" in told


def test_a_port_that_takes_nothing_while_the_guest_runs_is_not_free() -> None:
    fixed = with_ports(EMPTY, 1, hotplug=False)
    assert "no free root port" in refused("41:00.4", domain=known(fixed, fixed))


def test_a_definition_needs_no_free_port() -> None:
    assert planned("41:00.4", domain=known(None, EMPTY), scope=CONFIG).items


def test_a_device_on_its_host_driver_is_bound_first() -> None:
    assert "vfiomgr bind 0000:0a:00.0" in refused("0a:00.0")


def test_or_libvirt_binds_it() -> None:
    (item,) = planned("0a:00.0", managed=True).items
    assert item.names == ("0000:0a:00.0",)


def test_or_the_hook_binds_it_before_the_next_start() -> None:
    script = with_facts(host(), files=(TextFile(str(SCRIPT), "#!/bin/sh\n"),))
    marked = known(None, replace(RUNNING, hook=HookSettings()))
    (item,) = planned("0a:00.0", domain=marked, scope=CONFIG, on=script).items
    assert item.names == ("0000:0a:00.0",)
    assert "; a guest can only open devices on a VFIO driver" in refused(
        "0a:00.0", domain=marked, scope=CONFIG
    )
    plain = known(None, RUNNING)
    assert "; a guest can only open devices on a VFIO driver" in refused(
        "0a:00.0", domain=plain, scope=CONFIG, on=script
    )
    runs = known(RUNNING, replace(RUNNING, hook=HookSettings()))
    assert "; a guest can only open devices on a VFIO driver" in refused(
        "0a:00.0", domain=runs, on=script
    )
    display = replace(ON_HOST, is_boot_display=True)
    shown = with_facts(script, devices=(*host().devices[:-1], display))
    assert "boot-display" in refused("0a:00.0", domain=marked, scope=CONFIG, on=shown)


def test_what_bind_would_refuse_libvirt_is_not_asked_for_either() -> None:
    console = replace(ON_HOST, is_boot_display=True, display_signs=("boot_vga",))
    told = refused("0a:00.0", managed=True, on=with_facts(host(), devices=(console,)))
    assert "console's display" in told
    assert "vfiomgr bind 0000:0a:00.0 --allow boot-display, and omit --managed" in told


def test_a_group_that_is_not_viable_is_named() -> None:
    mate = replace(ON_HOST, iommu_group=LONE.iommu_group)
    told = refused("09:00.0", on=host_of(LONE, mate))
    assert f"IOMMU group 9 also contains {mate} on nvidia" in told
    assert "--with-group" in told


def test_a_vendors_function_needs_a_libvirt_that_knows_it() -> None:
    assert planned("41:00.5").items
    old = hypervisor(known(RUNNING, RUNNING), libvirt="9.0")
    told = refused("41:00.5", libvirt=old)
    assert "needs libvirt 9.7.0 or later" in told
    assert "this is 9.0.0" in told


def test_libvirt_must_not_unbind_it() -> None:
    assert "omit --managed" in refused("41:00.5", managed=True)


def test_a_mediated_device_needs_a_kernel_with_vfio_groups() -> None:
    without = with_facts(host(), vfio=VfioState(has_groups=False))
    assert "-> boot a kernel with CONFIG_VFIO_GROUP" in refused(UUID, on=without)
    assert planned(UUID).items


def test_and_it_must_be_a_vgpu() -> None:
    told = refused("41:00.5", on=with_facts(host(), vgpus=()))
    assert "vfiomgr vgpu create --parent 0000:41:00.5" in told


def test_a_vgpu_that_is_defined_can_go_to_a_definition_alone() -> None:
    definition = VgpuDefinition("mtty", UUID, "mtty-2")
    facts = DefinitionFacts(files=(TextFile(definition.path, render_definition(definition)),))
    defined = with_facts(host(), vgpus=(), definitions=facts)
    plan = planned(UUID, domain=known(None, RUNNING), scope=CONFIG, on=defined)
    assert plan.items[0].names == (UUID,)
    assert f"vfiomgr vgpu start {UUID}" in plan.notes[0]
    assert f"vfiomgr vgpu start {UUID}" in refused(UUID, on=defined)


def test_a_vgpu_that_nobody_knows() -> None:
    with pytest.raises(UnknownDevice):
        planned("00000000-0d00-4007-9c5a-b07b0c6c05de")


def test_what_a_running_domain_has_nobody_else_gets() -> None:
    other = known(with_hostdevs(EMPTY, hostdev("0000:41:00.4")), None, "lin")
    told = refused("41:00.4", others=(other,), allow_claimed=True)
    assert "0000:41:00.4 is in use by the running domain lin" in told
    assert "vfiomgr libvirt detach lin 0000:41:00.4" in told


def test_names_are_quoted_where_a_command_is_told() -> None:
    other = known(with_hostdevs(EMPTY, hostdev("0000:41:00.4")), None, "a b")
    told = refused("41:00.4", others=(other,))
    assert "is in use by the running domain" in told
    assert "vfiomgr libvirt detach 'a b' 0000:41:00.4" in told


def test_what_a_defined_domain_claims_needs_consent() -> None:
    other = known(None, with_hostdevs(EMPTY, hostdev(UUID)), "lin")
    told = refused(UUID, others=(other,))
    assert f"{UUID} is claimed by domain lin, which is off" in told
    assert "--allow claimed" in told
    assert planned(UUID, others=(other,), allow_claimed=True).items


def test_a_definition_may_claim_what_another_has_now_with_consent() -> None:
    other = known(with_hostdevs(EMPTY, hostdev("0000:41:00.4")), None, "lin")
    off = known(None, RUNNING)
    assert "which runs" in refused("41:00.4", domain=off, others=(other,), scope=CONFIG)
    plan = planned("41:00.4", domain=off, others=(other,), scope=CONFIG, allow_claimed=True)
    assert plan.items


def test_the_group_of_a_device_belongs_to_one_guest() -> None:
    other = known(with_hostdevs(EMPTY, hostdev("0000:04:00.1")), None, "lin")
    told = refused("04:00.0", others=(other,), only=True)
    assert "0000:04:00.1 of the same IOMMU group is in use by the running domain" in told


def test_a_process_that_is_no_domain_holds_it() -> None:
    user = DeviceUser("/dev/vfio/30", 4711, "qemu-system-x86", guest="sandbox-1")
    told = refused("41:00.4", on=with_facts(host(), users=(user,)))
    assert "0000:41:00.4 is in use by guest sandbox-1" in told


def test_a_device_of_a_pod_is_not_attached_to_a_running_guest() -> None:
    on = with_facts(host(), agent=agent_of("0000:41:00.4", pod="ml/train-0/main"))
    told = refused("41:00.4", on=on)
    assert "belongs to pod ml/train-0" in told
    assert "kubectl -n ml delete pod train-0" in told
    assert "--allow" not in told
    assert planned("41:00.4", on=with_facts(host(), agent=agent_of("0000:41:00.4"))).items


def test_the_domain_itself_holds_the_group() -> None:
    user = DeviceUser("/dev/vfio/30", 4711, "qemu-system-x86", guest="win")
    assert planned("41:00.4", on=with_facts(host(), users=(user,))).items


def test_what_the_domain_has_is_left_alone() -> None:
    has = with_hostdevs(RUNNING, hostdev("0000:41:00.4", GuestAddress(1, 0, 0)))
    plan = planned("41:00.4", domain=known(has, has))
    assert (plan.items, plan.already) == ((), ("win already has 0000:41:00.4",))
    (item,) = planned("41:00.4", domain=known(has, RUNNING)).items
    assert item.scope == CONFIG


def test_a_device_that_is_there_in_part_does_not_come_a_second_time() -> None:
    part = with_hostdevs(RUNNING, hostdev("0000:04:00.0", GuestAddress(1, 0, 0)))
    told = refused("04:00.1", domain=known(None, part), scope=CONFIG)
    assert "win has 0000:04:00.0, but not 0000:04:00.1 of the same slot" in told
    assert "vfiomgr libvirt detach win 0000:04:00.0 --config; or attach 0000:04:00.1" in told
    (item,) = planned("04:00.1", domain=known(None, part), scope=CONFIG, only=True).items
    assert item.names == ("0000:04:00.1",)
    told = refused("04:00.1", domain=known(part, RUNNING))
    assert "of the same slot (the running guest)" in told
    assert "0000:04:00.0 --live" in told
    assert planned("04:00.1", domain=known(part, RUNNING), scope=CONFIG).items


def test_a_host_without_vfio_gives_a_running_guest_nothing() -> None:
    told = refused("41:00.4", libvirt=hypervisor(known(RUNNING, RUNNING), offers_vfio=False))
    assert "no VFIO" in told


def test_the_usual_scope_is_all_there_is() -> None:
    assert usual_scope(known(RUNNING, RUNNING), live=False, config=False) == BOTH
    assert usual_scope(known(RUNNING, None), live=False, config=False) == LIVE
    assert usual_scope(known(None, RUNNING), live=False, config=False) == CONFIG
    assert usual_scope(known(RUNNING, RUNNING), live=False, config=True) == CONFIG
    with pytest.raises(Refusal, match="not running") as refused:
        usual_scope(known(None, RUNNING), live=True, config=False)
    assert refused.value.diagnostics[0].rule == "domain-not-running"
    with pytest.raises(Refusal, match="transient") as refused:
        usual_scope(known(RUNNING, None), live=False, config=True)
    assert refused.value.diagnostics[0].rule == "domain-transient"


def test_a_domain_that_cannot_be_read_is_neither_transient_nor_silent() -> None:
    odd = replace(known(None, None, "odd"), is_definition_unread=True)
    assert planned("41:00.4", others=(odd,)).notes == (
        "cannot read the XML of domain odd, so its devices are unknown",
    )
    with pytest.raises(Refusal, match="cannot read the XML of domain odd") as caught:
        usual_scope(odd, live=False, config=True)
    assert "virsh dumpxml --inactive odd" in caught.value.hint
    assert caught.value.diagnostics[0].rule == "domain-unread"


# ---- detach


def test_a_device_goes_from_both() -> None:
    has = with_hostdevs(RUNNING, hostdev("0000:41:00.4", GuestAddress(1, 0, 0)))
    (item,) = plan_detach(known(has, has), ["41:00.4"], BOTH, only=False).items
    assert (item.hostdev.name, item.scope) == ("0000:41:00.4", BOTH)
    (item,) = plan_detach(known(has, RUNNING), ["41:00.4"], BOTH, only=False).items
    assert item.scope == LIVE


def test_the_functions_of_a_guest_device_go_together() -> None:
    has = with_hostdevs(
        RUNNING,
        hostdev("0000:04:00.0", GuestAddress(1, 0, 0, multifunction=True)),
        hostdev("0000:04:00.1", GuestAddress(1, 0, 1)),
        hostdev("0000:04:00.2", GuestAddress(2, 0, 0)),
    )
    off = known(None, has)
    plan = plan_detach(off, ["0000:04:00.0"], CONFIG, only=False)
    assert [item.hostdev.name for item in plan.items] == ["0000:04:00.0", "0000:04:00.1"]
    plan = plan_detach(off, ["0000:04:00.0"], CONFIG, only=True)
    assert [item.hostdev.name for item in plan.items] == ["0000:04:00.0"]
    with pytest.raises(
        Refusal, match="from a running guest: it belongs to a multifunction device"
    ) as caught:
        plan_detach(known(has, has), ["0000:04:00.0"], BOTH, only=False)
    assert "--config" in caught.value.hint


def test_what_the_domain_does_not_have_is_gone_already() -> None:
    plan = plan_detach(known(RUNNING, RUNNING), [UUID, "0000:41:00.4"], BOTH, only=False)
    assert plan.items == ()
    assert plan.already == (f"win does not have {UUID}", "win does not have 0000:41:00.4")


def test_an_interface_is_left_to_virsh() -> None:
    interface = replace(hostdev("0000:41:00.4"), element="interface")
    with pytest.raises(Refusal, match="is a network interface of win") as caught:
        plan_detach(known(None, with_hostdevs(EMPTY, interface)), ["41:00.4"], CONFIG, only=False)
    assert "virsh detach-interface win hostdev" in caught.value.hint


def test_what_stays_until_the_next_start_is_told() -> None:
    has = with_hostdevs(RUNNING, hostdev("0000:41:00.4", GuestAddress(1, 0, 0)))
    plan = plan_detach(known(has, has), ["41:00.4"], CONFIG, only=False)
    assert plan.notes == ("0000:41:00.4: stays in the running guest until it is restarted",)


# ---- list


def test_claims_are_sorted_and_tell_where_they_stand() -> None:
    win = known(
        with_hostdevs(EMPTY, hostdev(UUID), hostdev("0000:41:00.4", GuestAddress(1, 0, 0))),
        with_hostdevs(EMPTY, hostdev("0000:41:00.4"), hostdev("10000:01:00.0", managed=True)),
    )
    lin = known(None, with_hostdevs(EMPTY, hostdev("0000:41:00.4")), "lin")
    found = claims_of(host(), hypervisor(win, lin))
    shown = [(c.device, c.kind, c.domain, c.state, c.is_on_host, c.is_managed) for c in found]
    assert shown == [
        ("0000:41:00.4", "vf", "lin", "defined", True, False),
        ("0000:41:00.4", "vf", "win", "both", True, False),
        ("10000:01:00.0", "pci", "win", "defined", False, True),
        (UUID, "mdev", "win", "running", True, False),
    ]
    assert found[1].guest_address == "0000:01:00.0"
    assert [c.domain for c in claims_of(host(), hypervisor(win, lin), "lin")] == ["lin"]
