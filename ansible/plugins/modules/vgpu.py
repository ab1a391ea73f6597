#!/usr/bin/python
# Copyright: the vfiomgr developers
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: vgpu
short_description: Create, remove, define or undefine a vGPU
version_added: 1.0.0
description:
  - Manages one vGPU, by its name. For a number of vGPUs of a type, see M(vfiomgr.host.layout).
author:
  - vfiomgr developers (@vfiomgr)
options:
  name:
    description:
      - The UUID of a mediated device, e.g. of the filter P(ansible.builtin.to_uuid#filter), which
        makes the same UUID of a text in each run.
      - If the vendor's driver creates vGPUs without mediated devices, the address of the virtual
        function. With O(state=active) and O(state=defined), other names are refused.
    type: str
    required: true
  state:
    description:
      - V(active) creates the vGPU, if it does not exist. If it exists with another type, the task
        fails.
      - V(absent) removes it, and leaves its definition alone.
      - V(defined) stores its definition, and V(undefined) deletes it. Both leave the vGPU alone.
    type: str
    choices: [active, absent, defined, undefined]
    default: active
  type:
    description:
      - The type, by ID, number or name, e.g. V(A40-4Q).
      - Required with O(state=active).
    type: str
  parent:
    description:
      - The GPU or virtual function that a mediated device is created on. For a vGPU that is a
        virtual function, its O(name) says it.
    type: str
  numa_node:
    description: With O(state=active), use a GPU of this NUMA node.
    type: int
  strategy:
    description: With O(state=active), fill one GPU after the other, or spread vGPUs evenly.
    type: str
    choices: [pack, spread]
    default: pack
  autostart:
    description: With O(state=defined), whether the vGPU starts at boot. Unchanged by default.
    type: bool
  attributes:
    description:
      - With O(state=defined), attributes to write at each start, instead of all defined ones.
    type: dict
  allow:
    description: With O(state=absent), try even if a guest uses the vGPU.
    type: list
    elements: str
    choices: [in-use]
    default: []
extends_documentation_fragment:
  - vfiomgr.host.common
  - vfiomgr.host.common.changes
"""

EXAMPLES = r"""
- name: Create a vGPU
  vfiomgr.host.vgpu:
    name: f715f63c-0d00-4007-9c5a-b07b0c6c05de
    type: A40-4Q

- name: Start it at each boot
  vfiomgr.host.vgpu:
    name: f715f63c-0d00-4007-9c5a-b07b0c6c05de
    state: defined
    autostart: true

- name: Create a vGPU for each guest of a list
  vfiomgr.host.vgpu:
    name: "{{ (inventory_hostname ~ item) | ansible.builtin.to_uuid }}"
    type: A40-4Q
  loop: [desktop1, desktop2]

- name: Create a vGPU on a virtual function of a driver that has no mediated devices
  vfiomgr.host.vgpu:
    name: "0000:21:00.4"
    type: L40S-8Q

- name: Remove a vGPU
  vfiomgr.host.vgpu:
    name: f715f63c-0d00-4007-9c5a-b07b0c6c05de
    state: absent
"""

RETURN = r"""
steps:
  description: The steps that were taken, or in check mode would be.
  returned: success
  type: list
  elements: str
notes: {description: What a reader should know., returned: success, type: list, elements: str}
"""

import re

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.vfiomgr.host.plugins.module_utils import cli

_ARGUMENTS = {
    **cli.CHANGE_ARGUMENTS,
    "name": {"type": "str", "required": True},
    "state": {
        "type": "str",
        "choices": ["active", "absent", "defined", "undefined"],
        "default": "active",
    },
    "type": {"type": "str"},
    "parent": {"type": "str"},
    "numa_node": {"type": "int"},
    "strategy": {"type": "str", "choices": ["pack", "spread"], "default": "pack"},
    "autostart": {"type": "bool"},
    "attributes": {"type": "dict"},
    "allow": {"choices": ["in-use"], **cli.ALLOW},
}
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_ADDRESS = re.compile(r"(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])")
_OF_INSTANCE = re.compile(r"(-[1-9]-[0-9]+[ABCQ])(?:MEALL|NOME|ME|GFX)$", re.IGNORECASE)
_VENDOR = "vendor-vfio"
"""The family of vGPUs that are virtual functions of the vendor's driver."""


def _normal(name):
    """Return a name as vfiomgr prints it."""
    found = _ADDRESS.fullmatch(name)
    if found:
        return f"{int(found[1] or '0', 16):04x}:{found[2].lower()}"
    return name.lower() if _UUID.fullmatch(name) else name


def _folded(text):
    """Return a name, comparable by its last words."""
    return " " + (text or "").casefold().replace("_", " ")


def _called(kinds, text):
    """Return the types with this ID, number or name, as vfiomgr finds them."""
    for wanted in map(_folded, (text, _OF_INSTANCE.sub(r"\1", text))):
        found = [
            kind
            for kind in kinds
            if any(_folded(name).endswith(wanted) for name in (kind["id"], kind["name"]))
        ]
        if found:
            return found
    return []


def _refuse(module, cause, remedy):
    module.fail_json(msg=f"cannot use the name {cause}. Remedy: {remedy}", remedy=remedy)


def _present(module, vfiomgr):
    """Return the vGPU that the virtual function is, or None.

    A name by which a second run would not find the vGPU again is refused.
    """
    params = module.params
    name = params["name"]
    is_uuid = bool(_UUID.fullmatch(name))
    vgpus = vfiomgr.document("vgpu", "list")[1]["items"]
    vgpu = next((vgpu for vgpu in vgpus if vgpu["name"] == name), None)
    if is_uuid and (vgpu or params["state"] == "defined"):
        return None
    parent = cli.options({"parent": params["parent"] if is_uuid else name}, parent="--parent")
    kinds = vfiomgr.document("vgpu", "list", "--types", *parent)[1]["items"]
    families = {kind["family"] for kind in kinds}
    if is_uuid:
        if any(kind["family"] == _VENDOR for kind in _called(kinds, params["type"])):
            cause = f"{name}: vGPUs of type {params['type']} are virtual functions"
            _refuse(module, cause, 'name a virtual function by its address, e.g. "0000:21:00.4"')
        return None
    if _VENDOR in families and name in {kind["gpu"] for kind in kinds}:
        cause = f"{name}: it is a GPU whose vGPUs are virtual functions"
        _refuse(module, cause, "name one of its virtual functions")
    if _VENDOR not in families and ("sriov-vf" not in families or params["state"] == "defined"):
        cause = f"{name}: it has no vGPUs that are virtual functions of the vendor's driver"
        uuid = "{{ '" + name + "' | ansible.builtin.to_uuid }}"
        _refuse(module, cause, f'name a UUID, with its parent, e.g. name: "{uuid}", parent: {name}')
    if vgpu and params["state"] == "active":
        same = {kind["id"] for kind in _called(kinds, params["type"])}
        if vgpu["type"] not in same:
            cause = f"{name}: it already is a vGPU of type {vgpu['type']} ({vgpu['type_name']})"
            _refuse(module, cause, "remove that vGPU first, with state: absent")
        return vgpu
    return None


def _place(params):
    """Return the arguments that name a vGPU to create or define: a virtual function is a parent."""
    if _UUID.fullmatch(params["name"]):
        return [params["name"], *cli.options(params, parent="--parent")]
    return ["--parent", params["name"]]


def _arguments(params):
    """Return the command and its arguments."""
    if params["state"] == "active":
        more = cli.options(params, type="--type", numa_node="--numa", strategy="--strategy")
        return ["vgpu", "create", *_place(params), *more]
    if params["state"] == "absent":
        return ["vgpu", "remove", *cli.options(params, allow="--allow"), "--", params["name"]]
    if params["state"] == "undefined":
        return ["vgpu", "undefine", *cli.options(params, parent="--parent"), "--", params["name"]]
    more = cli.options(params, type="--type")
    for name, value in (params["attributes"] or {}).items():
        more += ["--attribute", f"{name}={value}"]
    if params["autostart"] is not None:
        more.append("--autostart" if params["autostart"] else "--manual")
    return ["vgpu", "define", *_place(params), *more]


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec=_ARGUMENTS,
        supports_check_mode=True,
        required_if=[("state", "active", ("type",))],
    )
    vfiomgr = cli.Vfiomgr(module)
    module.params["name"] = _normal(module.params["name"])
    if module.params["state"] in ("active", "defined") and _present(module, vfiomgr):
        document = {"already": [f"vGPU {module.params['name']} already exists"]}
    else:
        document = vfiomgr.change(*_arguments(module.params))
    module.exit_json(diff=cli.differences(document), **cli.result(document))


if __name__ == "__main__":
    main()
