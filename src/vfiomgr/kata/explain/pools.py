"""Pools of the SR-IOV network device plugin: selectors that no function of the host matches.

pkg/resources/deviceSelectors.go and pkg/netdevice of k8snetworkplumbingwg/sriov-network-device-
plugin: all selectors of a pool must match a function, and `drivers` are those of the PCI function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vfiomgr.expressions import expression
from vfiomgr.kata.explain.context import chain_break

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

    _Pair = tuple[PciDevice, dict[str, Any]]
    """A function and selectors."""

_NETWORK, _VFIO = "02", "vfio-pci"
_OF_VF = expression(r"(.+?)v\d+")
"""The name of a virtual function's interface: eno2v0."""


def unmatched(
    host: HostSnapshot, pool: dict[str, Any], pools: Sequence[dict[str, Any]]
) -> Iterator[Diagnostic]:
    """What keeps one of the pools of a configuration empty on this host.

    All nodes of a cluster have the same configuration, so a pool may be for others.
    """
    name, alternatives = str(pool.get("resourceName", "")), _selectors(pool)
    for selectors in alternatives:
        yield from _of_interfaces(name, selectors)
    known = [d for d in host.devices if d.class_code.startswith(_NETWORK)]
    of_vendor = [(d, s) for s in alternatives for d in known if _has(s, "vendors", d.vendor_id)]
    fits = [(d, s) for d, s in of_vendor if not _misfits(d, s)]
    if fits:
        yield from _without_interface(name, fits)
        return
    listed = {each for p in pools for s in _selectors(p) for each in _texts(s, "devices")}
    near = [
        (d, s)
        for d, s in of_vendor
        if d.physical_function is not None
        and (
            _has(s, "devices", d.device_id) or (_texts(s, "vendors") and d.device_id not in listed)
        )
    ]
    if near:
        yield _misfit(name, *min(near, key=lambda pair: len(_misfits(*pair))))
    elif not any(d.physical_function is not None for d, _ in of_vendor):
        yield from _without_functions(name, of_vendor)


def _selectors(pool: dict[str, Any]) -> list[dict[str, Any]]:
    """The selectors of a pool of network functions, of which one must match."""
    given = pool.get("selectors")
    is_judged = pool.get("deviceType", "netDevice") == "netDevice"
    alternatives = given if isinstance(given, list) else [given]
    return [each for each in alternatives if is_judged and isinstance(each, dict)]


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


def _without_interface(name: str, fits: Sequence[_Pair]) -> Iterator[Diagnostic]:
    """A physical function on vfio-pci that pfNames selects by an interface that it lacks."""
    device, selectors = fits[0]
    if all(
        d.physical_function is None and d.driver == _VFIO and _texts(s, "pfNames") for d, s in fits
    ):
        yield chain_break(
            "pool-selectors",
            name,
            f"{device} is a physical function on {_VFIO}, and has no network interface, which "
            f"pfNames of {name} selects by",
            "return it to its network driver (vfiomgr unbind) and bind its virtual functions, or "
            "select it by pciAddresses",
            is_certain=device.device_id in _texts(selectors, "devices"),
        )


def _without_functions(name: str, candidates: Sequence[_Pair]) -> Iterator[Diagnostic]:
    """A physical function of a selected vendor whose virtual functions were not created yet."""
    for device, selectors in candidates:
        is_meant = _texts(selectors, "vendors") and device.device_id not in _texts(
            selectors, "devices"
        )
        if is_meant and device.sriov_totalvfs and device.driver != _VFIO:
            yield chain_break(
                "pool-selectors",
                name,
                f"no function of this host matches all selectors of {name}: {device.address} has "
                "no virtual functions",
                f"create them if the pool is for this node: vfiomgr sriov set {device.address} N",
                is_certain=False,
            )
            return


def _misfit(name: str, near: PciDevice, selectors: dict[str, Any]) -> Diagnostic:
    wrong = _misfits(near, selectors)
    lists = ", ".join(f"{key} has {' '.join(_texts(selectors, key))}" for key in wrong)
    return chain_break(
        "pool-selectors",
        name,
        f"no function of this host matches all selectors of {name}: {near.address} is "
        f"{near.vendor_id}:{near.device_id} on driver {near.driver or 'none'}, but {lists} "
        "(a selector names the driver of the PCI function)",
        f"if the pool is for this node: {_correction(near, selectors, wrong)}",
        is_certain=False,
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
    return {key: value for key, value in values.items() if not _has(selectors, key, value)}


def _has(selectors: dict[str, Any], key: str, value: str) -> bool:
    """Whether a selector accepts a value; one that is not set accepts all."""
    given = _texts(selectors, key)
    return not given or value in given


def _texts(selectors: dict[str, Any], key: str) -> list[str]:
    found = selectors.get(key)
    return [str(each) for each in found] if isinstance(found, list) else []
