"""Pools of the SR-IOV network device plugin: selectors that no function of the host matches.

pkg/resources/deviceSelectors.go and pkg/netdevice of k8snetworkplumbingwg/sriov-network-device-
plugin: all selectors of a pool must match a function, and `drivers` are those of the PCI function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vfiomgr.expressions import expression
from vfiomgr.kata.explain.context import chain_break

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

_NETWORK, _VFIO = "02", "vfio-pci"
_OF_VF = expression(r"(.+?)v\d+")
"""The name of a virtual function's interface: eno2v0."""


def unmatched(host: HostSnapshot, pool: dict[str, Any]) -> Iterator[Diagnostic]:
    """What keeps a pool of network functions empty on this host."""
    given = pool.get("selectors")
    name = str(pool.get("resourceName", ""))
    for selectors in given if isinstance(given, list) else [given]:
        if pool.get("deviceType", "netDevice") == "netDevice" and isinstance(selectors, dict):
            yield from _of_interfaces(name, selectors)
            yield from _of_functions(host, name, selectors)


def _of_interfaces(name: str, selectors: dict[str, Any]) -> Iterator[Diagnostic]:
    found = [(each, _OF_VF.fullmatch(each)) for each in _texts(selectors, "pfNames")]
    for each, match in found:
        if match:
            yield chain_break(
                "pool-selectors",
                name,
                f"pfNames of {name} has {each}, which looks like the interface of a virtual "
                "function: pfNames takes that of the physical function",
                f"write {match[1]}, or {match[1]}#0-3 for some of its virtual functions",
                is_certain=False,
            )


def _of_functions(host: HostSnapshot, name: str, selectors: dict[str, Any]) -> Iterator[Diagnostic]:
    known = [d for d in host.devices if d.class_code.startswith(_NETWORK)]
    vendors = _texts(selectors, "vendors")
    own = [d for d in known if not vendors or d.vendor_id in vendors]
    fits = [d for d in own if not _misfits(d, selectors)]
    whole = [d for d in fits if d.physical_function is None and d.driver == _VFIO]
    if whole and whole == fits and _texts(selectors, "pfNames"):
        yield chain_break(
            "pool-selectors",
            name,
            f"{whole[0]} is a physical function on {_VFIO}, and has no network interface, which "
            f"pfNames of {name} selects by",
            "return it to its network driver (vfiomgr unbind) and bind its virtual functions, or "
            "select it by pciAddresses",
        )
    functions = [d for d in own if d.physical_function is not None] or own
    if fits or not functions:
        return
    near = min(functions, key=lambda d: len(_misfits(d, selectors)))
    wrong = _misfits(near, selectors)
    lists = ", ".join(f"{key} has {' '.join(_texts(selectors, key))}" for key in wrong)
    yield chain_break(
        "pool-selectors",
        name,
        f"no function of this host matches all selectors of {name}: {near.address} is "
        f"{near.vendor_id}:{near.device_id} on driver {near.driver or 'none'}, but {lists} "
        "(a selector names the driver of the PCI function)",
        _correction(near, selectors, wrong),
    )


def _correction(near: PciDevice, selectors: dict[str, Any], wrong: dict[str, str]) -> str:
    parts = [f'write {key}: ["{value}"]' for key, value in wrong.items()]
    if "drivers" in wrong and _VFIO in _texts(selectors, "drivers"):
        parts[list(wrong).index("drivers")] = f"bind it: vfiomgr bind {near.address}"
    return "; and ".join(parts)


def _misfits(device: PciDevice, selectors: dict[str, Any]) -> dict[str, str]:
    """The selectors that a function does not match, of those that a scan can tell, by its value."""
    values = {
        "devices": device.device_id,
        "drivers": device.driver or "",
        "pciAddresses": str(device.address),
    }
    given = {key: _texts(selectors, key) for key in values}
    return {key: v for key, v in values.items() if given[key] and v not in given[key]}


def _texts(selectors: dict[str, Any], key: str) -> list[str]:
    found = selectors.get(key)
    return [str(each) for each in found] if isinstance(found, list) else []
