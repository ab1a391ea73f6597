#!/usr/bin/python
# Copyright: the vfiomgr developers
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: host_info
short_description: Read devices, IOMMU groups and vGPUs of a host
version_added: 1.0.0
description:
  - Returns what C(vfiomgr) reads on the managed host. Nothing is changed.
  - Users of devices are only known to root.
author:
  - vfiomgr developers (@vfiomgr)
options:
  gather:
    description:
      - What is returned.
      - V(snapshot) are all facts of the host, which C(vfiomgr --snapshot) reads on any
        machine. They contain serial numbers and the kernel's command line.
    type: list
    elements: str
    choices: [devices, groups, vgpus, vgpu_types, definitions, persistent, snapshot]
    default: [devices, vgpus]
  all_devices:
    description: Whether RV(devices) has all PCI functions. By default it has GPUs and accelerators.
    type: bool
    default: false
extends_documentation_fragment:
  - vfiomgr.host.common
  - vfiomgr.host.common.reads
"""

EXAMPLES = r"""
- name: Read the GPUs and vGPUs of the host
  vfiomgr.host.host_info:
  register: host

- name: Require eight GPUs that are ready for guests
  ansible.builtin.assert:
    that: host.devices | selectattr('state', 'equalto', 'vfio') | length == 8

- name: Read a snapshot of the host
  vfiomgr.host.host_info:
    gather: [snapshot]
  register: host

- name: Keep the snapshot on the controller
  ansible.builtin.copy:
    content: "{{ host.snapshot | to_json }}"
    dest: "snapshots/{{ inventory_hostname }}.json"
    mode: "0600"
  delegate_to: localhost
"""

RETURN = r"""
version: {description: The version of vfiomgr., returned: success, type: str, sample: 1.0.0}
devices:
  description: The devices by address, as C(vfiomgr list) prints them.
  returned: if requested
  type: list
  elements: dict
  contains:
    address: {description: PCI address of the function., type: str, sample: "0000:41:00.0"}
    name: {description: Name of the device., type: str}
    vendor_id: {description: "Vendor ID, four hexadecimal digits.", type: str, sample: 10de}
    device_id: {description: "Device ID, four hexadecimal digits.", type: str, sample: "2235"}
    driver: {description: "Its driver, or null if it has none.", type: str, sample: vfio-pci}
    state:
      description: V(host), V(vfio), V(in-use), V(vgpu) or V(no-driver).
      type: str
      sample: vfio
    iommu_group: {description: "Number of its IOMMU group, or null.", type: int}
    numa_node: {description: "Its NUMA node, or null if it is unknown.", type: int}
    vram_mib: {description: "Memory of a GPU in MiB, as far as it is known.", type: int}
    users:
      description: Processes that have its VFIO node open, or null if they are unknown.
      type: list
      elements: dict
groups:
  description: The IOMMU groups, as C(vfiomgr groups) prints them.
  returned: if requested
  type: list
  elements: dict
  contains:
    number: {description: Number of the group., type: int}
    is_viable: {description: Whether a guest can use it now., type: bool}
    obstacles: {description: What prevents that., type: list, elements: str}
    members: {description: Its functions and mediated devices., type: list, elements: dict}
vgpus:
  description: The active vGPUs, as C(vfiomgr vgpu list) prints them.
  returned: if requested
  type: list
  elements: dict
  contains:
    name:
      description: UUID of the mediated device, or address of the virtual function.
      type: str
    parent: {description: The GPU or virtual function that it is created on., type: str}
    type: {description: ID of its type., type: str}
    type_name: {description: "Name of its type, or null.", type: str}
    users:
      description: Processes that use it, or null if they are unknown.
      type: list
      elements: dict
vgpu_types:
  description: The vGPU types by GPU, as C(vfiomgr vgpu list --types) prints them.
  returned: if requested
  type: list
  elements: dict
  contains:
    gpu: {description: "Address of the GPU, or name of the parent device.", type: str}
    name: {description: Name of the type., type: str}
    available_instances:
      description: Number that can be created now, or null if it is unknown.
      type: int
    active: {description: Number of active vGPUs of the type., type: int}
definitions:
  description: The vGPU definitions, as C(vfiomgr vgpu list --defined) prints them.
  returned: if requested
  type: list
  elements: dict
  contains:
    name:
      description: UUID of the mediated device, or address of the virtual function.
      type: str
    parent: {description: The GPU or virtual function that it is created on., type: str}
    start: {description: V(auto) or V(manual)., type: str}
    state: {description: "V(active), V(inactive), V(in-use) or V(other).", type: str}
persistent:
  description: Functions that are bound at each boot, as C(vfiomgr list --persistent) prints them.
  returned: if requested
  type: list
  elements: dict
  contains:
    address: {description: PCI address of the function., type: str}
    driver:
      description: The driver that it is bound to at boot, or null if it is only reserved.
      type: str
    owner: {description: "V(vfiomgr), V(layout) or V(driverctl).", type: str}
snapshot:
  description: All facts of the host, as C(vfiomgr snapshot) prints them.
  returned: if requested
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.vfiomgr.host.plugins.module_utils.cli import COMMON_ARGUMENTS, Vfiomgr

_COMMANDS = {
    "devices": ["list"],
    "groups": ["groups"],
    "vgpus": ["vgpu", "list"],
    "vgpu_types": ["vgpu", "list", "--types"],
    "definitions": ["vgpu", "list", "--defined"],
    "persistent": ["list", "--persistent"],
    "snapshot": ["snapshot"],
}


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            **COMMON_ARGUMENTS,
            "gather": {
                "type": "list",
                "elements": "str",
                "choices": list(_COMMANDS),
                "default": ["devices", "vgpus"],
            },
            "all_devices": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    vfiomgr = Vfiomgr(module)
    found = {"version": vfiomgr.version()}
    for name in module.params["gather"]:
        more = ["--all"] if name == "devices" and module.params["all_devices"] else []
        document = vfiomgr.document(*_COMMANDS[name], *more)[1]
        found[name] = document if name == "snapshot" else document["items"]
    module.exit_json(changed=False, **found)


if __name__ == "__main__":
    main()
