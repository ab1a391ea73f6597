#!/usr/bin/python
# Copyright: the vfiomgr developers
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: uninstall
short_description: Remove what vfiomgr wrote on a host
version_added: 1.0.0
description:
  - Removes udev rules, units, the installed layout, hooks, entries of container runtimes and
    definitions of vGPUs that are virtual functions. Files that were edited since are kept, and
    listed in RV(notes).
  - Definitions of mediated devices are kept, since mdevctl also starts them. RV(notes) lists them;
    M(vfiomgr.host.vgpu) with O(vfiomgr.host.vgpu#module:state=undefined) removes them.
  - Run it before the package is removed; the role P(vfiomgr.host.install#role) does both.
author:
  - vfiomgr developers (@vfiomgr)
options:
  unbind:
    description:
      - Whether devices also return to their original drivers. By default they stay on their
        drivers until the next boot.
    type: bool
    default: false
  keep:
    description: With O(unbind), PCI addresses of devices that stay on their drivers.
    type: list
    elements: str
    default: []
  update_initramfs:
    description: Whether the initramfs is rebuilt if it contains udev rules of C(vfiomgr).
    type: bool
    default: true
extends_documentation_fragment:
  - vfiomgr.host.common
  - vfiomgr.host.common.changes
"""

EXAMPLES = r"""
- name: Remove all files of vfiomgr, and return the devices to their drivers
  vfiomgr.host.uninstall:
    unbind: true
"""

RETURN = r"""
steps:
  description: The steps that were taken, or in check mode would be.
  returned: success
  type: list
  elements: str
notes:
  description: What a reader should know, e.g. which files stay.
  returned: success
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.vfiomgr.host.plugins.module_utils import cli


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            **cli.CHANGE_ARGUMENTS,
            "unbind": {"type": "bool", "default": False},
            "keep": {"type": "list", "elements": "str", "default": []},
            "update_initramfs": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    params = module.params
    arguments = cli.options(params, unbind="--unbind", keep="--keep")
    if not params["update_initramfs"]:
        arguments.append("--no-update-initramfs")
    document = cli.Vfiomgr(module).change("uninstall", *arguments)
    module.exit_json(diff=cli.differences(document), **cli.result(document))


if __name__ == "__main__":
    main()
