#!/usr/bin/python
# Copyright: the vfiomgr developers
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: libvirt_device
short_description: Attach devices to a domain of libvirt, or detach them
version_added: 1.0.0
description:
  - Devices are PCI functions, virtual functions and vGPUs. All are attached, or none.
  - Without O(live) and O(config) the definition is changed, and the guest if it runs.
author:
  - vfiomgr developers (@vfiomgr)
options:
  domain:
    description: The name of the domain.
    type: str
    required: true
  devices:
    description: PCI addresses, or UUIDs of mediated devices.
    type: list
    elements: str
    required: true
  state:
    description: Whether the domain has the devices.
    type: str
    choices: [present, absent]
    default: present
  live:
    description: Change the running guest.
    type: bool
    default: false
  config:
    description: Change the definition, for the next start.
    type: bool
    default: false
  managed:
    description:
      - With O(state=present), let libvirt bind and unbind the devices, instead of C(vfiomgr).
    type: bool
    default: false
  function_only:
    description: Leave the other functions of the slots out.
    type: bool
    default: false
  allow:
    description: With O(state=present), also attach devices that another domain claims.
    type: list
    elements: str
    choices: [claimed]
    default: []
  connect:
    description: The URI of libvirt.
    type: str
    default: qemu:///system
extends_documentation_fragment:
  - vfiomgr.host.common
  - vfiomgr.host.common.changes
"""

EXAMPLES = r"""
- name: Give a GPU with its audio function to a guest, at its next start
  vfiomgr.host.libvirt_device:
    domain: win11
    devices: ["0000:41:00.0"]
    config: true

- name: Remove a vGPU from a guest
  vfiomgr.host.libvirt_device:
    domain: win11
    devices: [f715f63c-0d00-4007-9c5a-b07b0c6c05de]
    state: absent
"""

RETURN = r"""
devices:
  description: What was changed by device, or in check mode would be.
  returned: success
  type: list
  elements: dict
  contains:
    device: {description: PCI address or UUID., type: str}
    live: {description: Whether the running guest was changed., type: bool}
    config: {description: Whether the definition was changed., type: bool}
    xml: {description: The element of the domain., type: str}
notes: {description: What a reader should know., returned: success, type: list, elements: str}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.vfiomgr.host.plugins.module_utils import cli

_ARGUMENTS = {
    **cli.CHANGE_ARGUMENTS,
    "domain": {"type": "str", "required": True},
    "devices": {"type": "list", "elements": "str", "required": True},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "live": {"type": "bool", "default": False},
    "config": {"type": "bool", "default": False},
    "managed": {"type": "bool", "default": False},
    "function_only": {"type": "bool", "default": False},
    "allow": {"choices": ["claimed"], **cli.ALLOW},
    "connect": {"type": "str", "default": "qemu:///system"},
}
_COMMON = {
    "live": "--live",
    "config": "--config",
    "function_only": "--function-only",
    "connect": "--connect",
}


def main():
    """Run the module."""
    module = AnsibleModule(argument_spec=_ARGUMENTS, supports_check_mode=True)
    params = module.params
    if params["state"] == "present":
        command, more = "attach", {"managed": "--managed", "allow": "--allow"}
    else:
        command, more = "detach", {}
    arguments = ["libvirt", command, *cli.options(params, **_COMMON, **more)]
    names = ["--", params["domain"], *params["devices"]]
    document = cli.Vfiomgr(module).change(*arguments, *names)
    elements = [line for one in document["items"] for line in one["xml"].splitlines()]
    sides = ([], elements) if command == "attach" else (elements, [])
    module.exit_json(
        changed=cli.is_changed(document),
        diff=[cli.difference(f"domain {params['domain']}", *sides)] if elements else [],
        devices=document["items"],
        notes=document["notes"] + document["already"],
    )


if __name__ == "__main__":
    main()
