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
    description: The UUID of a mediated device, or the address of the virtual function of a vGPU.
    type: str
    required: true
  state:
    description:
      - V(active) creates the vGPU, if it does not exist.
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
    document = cli.Vfiomgr(module).change(*_arguments(module.params))
    module.exit_json(diff=cli.differences(document), **cli.result(document))


if __name__ == "__main__":
    main()
