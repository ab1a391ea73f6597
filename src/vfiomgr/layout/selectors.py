"""The rules of an exported layout by model instead of by address, for hosts of the same kind.

A model is selected if exactly the devices of equal rules have it, or have it on one NUMA node. The
selection is tried on the host with the function that applies layouts (`parts.matching`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from vfiomgr.layout.model import Selector
from vfiomgr.layout.parts import matching
from vfiomgr.pci.model import PciAddress, PciDevice

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

    _Rule = dict[str, Any]


def by_model(host: HostSnapshot, rules: Iterable[_Rule]) -> list[_Rule]:
    """Rules that select the same devices as rules by address, without UUIDs, narrow ones first.

    Every rule names the functions of one slot, or a parent of vGPUs.
    """
    alike: dict[str, list[_Rule]] = {}
    for rule in map(_without_uuids, rules):
        alike.setdefault(_kind(host, rule), []).append(rule)
    found = (new for batch in alike.values() for new in _merged(host, batch))
    return sorted(found, key=lambda rule: ("id" in rule["select"], len(rule["select"]) == 1))


def _without_uuids(rule: _Rule) -> _Rule:
    if "vgpus" not in rule:
        return rule
    requests = [{key: v for key, v in one.items() if key != "uuids"} for one in rule["vgpus"]]
    return {**rule, "vgpus": requests}


def _devices(host: HostSnapshot, rule: _Rule) -> list[PciDevice]:
    given = rule["select"].get("address", ())
    names = [given] if isinstance(given, str) else given
    return [host.device(PciAddress.parse(name)) for name in names]


def _ids(host: HostSnapshot, rule: _Rule) -> list[str]:
    """The IDs that select the devices of a rule.

    The first function of a slot includes the others, but a reset method is only set for named ones.
    """
    devices = _devices(host, rule)
    named = devices if "reset_method" in rule or rule.get("only") else devices[:1]
    return list(dict.fromkeys(f"{d.vendor_id}:{d.device_id}" for d in named))


def _kind(host: HostSnapshot, rule: _Rule) -> str:
    """Equal for rules that differ only in their devices, which are of one model."""
    select = _ids(host, rule) or rule["select"]
    vgpus = sorted(json.dumps(one, sort_keys=True) for one in rule.get("vgpus", ()))
    return json.dumps([select, {**rule, "select": None, "vgpus": vgpus}], sort_keys=True)


def _merged(host: HostSnapshot, batch: Sequence[_Rule]) -> Iterator[_Rule]:
    """One rule by ID, or one for each NUMA node; by address what these do not select."""
    ids = _ids(host, batch[0])
    selected = set(matching(host, Selector(id=tuple(ids)))) if ids else set()
    plain = [rule for rule in batch if _devices(host, rule) and _devices(host, rule)[0] in selected]
    yield from (rule for rule in batch if rule not in plain)
    if not plain:
        return
    if (rule := _by(host, plain, {"id": ids})) is not None:
        yield rule
        return

    def node(rule: _Rule) -> int:
        found = _devices(host, rule)[0].numa_node
        return -1 if found is None else found

    for number, group in groupby(sorted(plain, key=node), key=node):
        there = list(group)
        rule = _by(host, there, {"id": ids, "numa_node": number}) if number >= 0 else None
        yield from (rule,) if rule is not None else there


def _by(host: HostSnapshot, rules: Sequence[_Rule], select: _Rule) -> _Rule | None:
    """One rule for the devices of several; None if the criteria select another device too."""
    found = matching(host, Selector.model_validate(select))
    own = {device for rule in rules for device in _devices(host, rule)}
    matched = list(found)
    if not own.issuperset(matched):
        return None
    merged = {**rules[0], "select": select, "at_least": len(matched)}
    if "vgpus" in merged:
        merged["vgpus"] = [
            {"per_gpu" if key == "count" else key: value for key, value in one.items()}
            for one in merged["vgpus"]
        ]
    return merged
