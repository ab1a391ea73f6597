# Copyright: the vfiomgr developers
# SPDX-License-Identifier: Apache-2.0
"""What the modules of this collection have in common."""

from __future__ import annotations


class ModuleDocFragment:
    """Options, attributes and notes."""

    DOCUMENTATION = r"""
options:
  executable:
    description: The command C(vfiomgr) on the managed host, as a name or a path.
    type: path
    default: vfiomgr
requirements:
  - C(vfiomgr) on the managed host; see the role P(vfiomgr.host.install#role).
notes:
  - If C(vfiomgr) refuses or fails, the task fails with its message and its remedy.
"""

    CHANGES = r"""
options:
  timeout:
    description:
      - Time limit in seconds for one step, or for one call of libvirt.
      - By default, the limits of C(vfiomgr) apply.
    type: float
notes:
  - A failed change is rolled back.
  - If another C(vfiomgr) changes the same devices, the task waits for it, up to 5 minutes.
attributes:
  check_mode:
    description: Whether the task can plan a change without making it.
    support: full
  diff_mode:
    description: Whether the task shows what it changes.
    support: full
  platform:
    description: The systems that the module runs on.
    platforms: linux
    support: full
"""

    READS = r"""
attributes:
  check_mode:
    description: Whether the task can run without changing anything.
    support: full
  diff_mode:
    description: Whether the task shows what it changes.
    support: N/A
  platform:
    description: The systems that the module runs on.
    platforms: linux
    support: full
"""
