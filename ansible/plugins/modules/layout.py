#!/usr/bin/python
# Copyright: the vfiomgr developers
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: layout
short_description: Apply a layout of devices and vGPUs to a host
version_added: 1.0.0
description:
  - A layout describes the desired state of a host's devices, e.g. which GPUs are for guests and
    which vGPUs they have.
  - Devices already in the desired state are left alone. A layout is applied entirely or not at
    all.
  - If an earlier run was interrupted, the same layout completes it.
author:
  - vfiomgr developers (@vfiomgr)
options:
  state:
    description:
      - V(applied) changes the devices now.
      - V(installed) applies the layout at each boot. No device is changed now.
      - V(absent) removes an installed layout. No device is changed.
    type: str
    choices: [applied, installed, absent]
    default: applied
  content:
    description:
      - The layout file, as text or as a mapping. It can contain several layouts by name.
      - Required with O(state=applied) and O(state=installed), unless O(src) is set.
    type: raw
  src:
    description:
      - The path of the layout file on the managed host.
      - For a file of the controller, use O(content) with the lookup P(ansible.builtin.file#lookup).
    type: path
  name:
    description: The name of the layout, if the file has several.
    type: str
  fail_on_drift:
    description:
      - Whether the task fails if the host differs from the layout, or cannot be compared with it.
        Nothing is changed then.
      - Requires O(state=applied).
    type: bool
    default: false
  allow:
    description: Safety checks to override; the error message names them.
    type: list
    elements: str
    choices: [boot-display, default-route, host-peripheral, in-use, mounted-disk, reserved-region,
      vgpu-function]
    default: []
  adopt:
    description:
      - Record vGPUs of other tools that fit the layout as those of C(vfiomgr).
      - With O(state=installed), also replace the entries of driverctl for its devices.
    type: bool
    default: false
  enforce:
    description: With O(state=installed), also correct drift after the boot.
    type: bool
    default: false
  update_initramfs:
    description:
      - With O(state=installed) and O(state=absent), rebuild the initramfs if its udev rules change.
    type: bool
    default: false
extends_documentation_fragment:
  - vfiomgr.host.common
  - vfiomgr.host.common.changes
"""

EXAMPLES = r"""
- name: Give all A40 to guests
  vfiomgr.host.layout:
    content:
      version: vfiomgr/v1
      layouts:
        guests:
          devices:
            - select: {name: "*A40*"}
              state: passthrough

- name: Apply a layout of a file with several
  vfiomgr.host.layout:
    content: "{{ lookup('ansible.builtin.file', 'fleet.yaml') }}"
    name: kata-node

- name: Apply it at each boot, too
  vfiomgr.host.layout:
    content: "{{ lookup('ansible.builtin.file', 'fleet.yaml') }}"
    name: kata-node
    state: installed
    update_initramfs: true

- name: Fail if the host has drifted from the layout
  vfiomgr.host.layout:
    src: /etc/vfiomgr/layout.yaml
    fail_on_drift: true
"""

RETURN = r"""
layout:
  description: The name of the layout.
  returned: with O(state=applied)
  type: str
  sample: kata-node
differences:
  description: How the host differed from the layout before the task.
  returned: with O(state=applied), in check mode, with C(--diff) or with O(fail_on_drift)
  type: list
  elements: dict
  contains:
    device:
      description: An address, or the name of a vGPU parent; empty for a missing device.
      type: str
    name: {description: Its model., type: str}
    found: {description: How the host is., type: str, sample: host (nvidia)}
    wanted: {description: How it should be., type: str, sample: passthrough (VFIO)}
unknown:
  description: What could not be compared, with the reason.
  returned: with O(fail_on_drift)
  type: list
  elements: str
steps:
  description: The steps that were taken, or in check mode would be.
  returned: unless O(fail_on_drift)
  type: list
  elements: str
notes:
  description: What a reader should know.
  returned: unless O(fail_on_drift)
  type: list
  elements: str
"""

import json

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.vfiomgr.host.plugins.module_utils import cli

_ARGUMENTS = {
    **cli.CHANGE_ARGUMENTS,
    "state": {
        "type": "str",
        "choices": ["applied", "installed", "absent"],
        "default": "applied",
    },
    "content": {"type": "raw"},
    "src": {"type": "path"},
    "name": {"type": "str"},
    "fail_on_drift": {"type": "bool", "default": False},
    "allow": {"choices": cli.CHECKS, **cli.ALLOW},
    "adopt": {"type": "bool", "default": False},
    "enforce": {"type": "bool", "default": False},
    "update_initramfs": {"type": "bool", "default": False},
}


def _file(params):
    """Return what names the file, and what is written to the command's input."""
    if params["src"] is not None:
        return params["src"], None
    content = params["content"]
    return "-", content if isinstance(content, str) else json.dumps(content)


def _shown(found):
    """Return the differences from a layout for --diff."""
    if not found:
        return []
    devices = [
        f"{one['device']} ({one['name']})" if one["name"] else one["device"] for one in found
    ]
    before, after = (
        [f"{device or 'missing'}: {one[side]}" for device, one in zip(devices, found)]
        for side in ("found", "wanted")
    )
    return [cli.difference("devices", before, after)]


def _assert_met(module, vfiomgr, arguments, data):
    """Fail if the host differs from the layout."""
    status, document = vfiomgr.document(
        "layout", "assert", *arguments, data=data, statuses=(0, cli.DIFFERS)
    )
    found = {name: document[name] for name in ("layout", "differences", "unknown")}
    shown = _shown(found["differences"])
    if status == 0:
        module.exit_json(changed=False, diff=shown, **found)
    causes = [
        f"{one['device']}: {one['found']}, not {one['wanted']}" for one in found["differences"]
    ]
    causes += [f"unknown: {one}" for one in found["unknown"]]
    message = f"the host differs from the layout {found['layout']}: {'; '.join(causes)}"
    remedy = "run the task without fail_on_drift to apply the layout"
    module.fail_json(msg=f"{message}. Remedy: {remedy}", remedy=remedy, diff=shown, **found)


def _apply(module, vfiomgr, arguments, data):
    """Apply a layout; in check mode, plan it."""
    found = {}
    shown = []
    if module.check_mode or module._diff:  # noqa: SLF001 - the interface of AnsibleModule
        document = vfiomgr.document("plan", *arguments, data=data)[1]
        found["differences"] = document["differences"]
        shown = _shown(document["differences"])
    if not module.check_mode:
        document = vfiomgr.change("apply", *arguments, data=data)
    module.exit_json(layout=document["layout"], diff=shown, **found, **cli.result(document))


def main():
    """Run the module."""
    needs_file = ("content", "src")
    module = AnsibleModule(
        argument_spec=_ARGUMENTS,
        supports_check_mode=True,
        mutually_exclusive=[needs_file],
        required_if=[
            ("state", "applied", needs_file, True),
            ("state", "installed", needs_file, True),
        ],
    )
    params = module.params
    if params["fail_on_drift"] and params["state"] != "applied":
        module.fail_json(msg="fail_on_drift requires state=applied")
    vfiomgr = cli.Vfiomgr(module)
    if params["state"] == "absent":
        arguments = cli.options(params, update_initramfs="--update-initramfs")
        document = vfiomgr.change("layout", "uninstall", *arguments)
        module.exit_json(diff=cli.differences(document), **cli.result(document))
    file, data = _file(params)
    arguments = [file, *cli.options(params, name="--layout", allow="--allow")]
    if params["fail_on_drift"]:
        _assert_met(module, vfiomgr, arguments, data)
    arguments += cli.options(params, adopt="--adopt")
    if params["state"] == "installed":
        arguments += cli.options(params, enforce="--enforce", update_initramfs="--update-initramfs")
        document = vfiomgr.change("layout", "install", *arguments, data=data)
        module.exit_json(diff=cli.differences(document), **cli.result(document))
    _apply(module, vfiomgr, arguments, data)


if __name__ == "__main__":
    main()
