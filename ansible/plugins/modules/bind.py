#!/usr/bin/python
# Copyright: the vfiomgr developers
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: bind
short_description: Bind devices to vfio-pci, or return them to their original drivers
version_added: 1.0.0
description:
  - All functions of the slots are bound, e.g. the audio function of a GPU.
  - For many hosts, M(vfiomgr.host.layout) selects devices by their model.
author:
  - vfiomgr developers (@vfiomgr)
options:
  devices:
    description: PCI addresses, or PCI IDs, e.g. V(10de:2684) for all devices of a model.
    type: list
    elements: str
    required: true
  state:
    description:
      - V(bound) binds the devices to a VFIO driver.
      - V(unbound) returns them to their original drivers.
    type: str
    choices: [bound, unbound]
    default: bound
  persist:
    description: With O(state=bound), bind them again at each boot and when they are plugged in.
    type: bool
    default: false
  at_boot:
    description: With O(state=bound), bind them at each boot and leave them alone until then.
    type: bool
    default: false
  forget:
    description: With O(state=unbound), also remove the rules of O(persist) and O(at_boot).
    type: bool
    default: false
  driver:
    description:
      - With O(state=bound), the VFIO driver. By default, the one that fits the device best.
    type: str
  owner:
    description:
      - With O(state=bound), the user that may open the VFIO nodes, as C(USER) or C(USER:GROUP).
    type: str
  reset_method:
    description: With O(state=bound), reset the devices only by this method until they are unbound.
    type: str
    choices: [device_specific, acpi, flr, af_flr, pm, bus, cxl_bus]
  d3cold:
    description:
      - With O(state=bound), V(false) keeps the devices out of D3cold until they are unbound.
    type: bool
    default: true
  function_only:
    description: Leave the other functions of the slots alone.
    type: bool
    default: false
  with_group:
    description: Include all devices of the IOMMU groups.
    type: bool
    default: false
  allow:
    description:
      - Safety checks to override; the error message names them.
      - With O(state=unbound) only V(in-use).
    type: list
    elements: str
    choices: [boot-display, default-route, host-peripheral, in-use, mounted-disk, reserved-region,
      vgpu-function]
    default: []
  update_initramfs:
    description: Rebuild the initramfs if its udev rules change.
    type: bool
    default: false
extends_documentation_fragment:
  - vfiomgr.host.common
  - vfiomgr.host.common.changes
"""

EXAMPLES = r"""
- name: Bind a GPU and its audio function, now and at each boot
  vfiomgr.host.bind:
    devices: ["0000:41:00.0"]
    persist: true
    owner: libvirt-qemu:kvm

- name: Return it to its original driver
  vfiomgr.host.bind:
    devices: ["0000:41:00.0"]
    state: unbound
    forget: true
"""

RETURN = r"""
devices:
  description: The functions that were bound or unbound.
  returned: if something was changed
  type: list
  elements: dict
  contains:
    address: {description: PCI address of the function., type: str}
    driver: {description: "Its driver now, or null if it has none.", type: str}
    iommu_group: {description: "Number of its IOMMU group, or null.", type: int}
    node:
      description: Its VFIO node, or null.
      type: str
      sample: /dev/vfio/38
steps:
  description: The steps that were taken, or in check mode would be.
  returned: success
  type: list
  elements: str
notes: {description: What a reader should know., returned: success, type: list, elements: str}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.vfiomgr.host.plugins.module_utils import cli

_ARGUMENTS = {
    **cli.CHANGE_ARGUMENTS,
    "devices": {"type": "list", "elements": "str", "required": True},
    "state": {"type": "str", "choices": ["bound", "unbound"], "default": "bound"},
    "persist": {"type": "bool", "default": False},
    "at_boot": {"type": "bool", "default": False},
    "forget": {"type": "bool", "default": False},
    "driver": {"type": "str"},
    "owner": {"type": "str"},
    "reset_method": {
        "type": "str",
        "choices": ["device_specific", "acpi", "flr", "af_flr", "pm", "bus", "cxl_bus"],
    },
    "d3cold": {"type": "bool", "default": True},
    "function_only": {"type": "bool", "default": False},
    "with_group": {"type": "bool", "default": False},
    "allow": {"choices": cli.CHECKS, **cli.ALLOW},
    "update_initramfs": {"type": "bool", "default": False},
}
_COMMON = {
    "function_only": "--function-only",
    "with_group": "--with-group",
    "allow": "--allow",
    "update_initramfs": "--update-initramfs",
}
_BIND = {
    **_COMMON,
    "persist": "--persist",
    "at_boot": "--at-boot",
    "driver": "--driver",
    "owner": "--owner",
    "reset_method": "--reset-method",
}


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec=_ARGUMENTS,
        supports_check_mode=True,
        mutually_exclusive=[("persist", "at_boot"), ("function_only", "with_group")],
    )
    params = module.params
    if params["state"] == "bound":
        d3cold = [] if params["d3cold"] else ["--no-d3cold"]
        arguments = ["bind", *cli.options(params, **_BIND), *d3cold]
    else:
        arguments = ["unbind", *cli.options(params, forget="--forget", **_COMMON)]
    document = cli.Vfiomgr(module).change(*arguments, "--", *params["devices"])
    more = {"devices": document["devices"]} if "devices" in document else {}
    module.exit_json(diff=cli.differences(document), **more, **cli.result(document))


if __name__ == "__main__":
    main()
