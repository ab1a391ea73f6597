#!/usr/bin/python
# Copyright: the vfiomgr developers
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: check
short_description: Check whether a host or its domains are ready for passthrough
version_added: 1.0.0
description:
  - Checks the managed host, or with O(domains) what would prevent the next start of domains of
    libvirt. Nothing is changed.
  - The task fails if a blocker is found. The findings are returned in both cases.
author:
  - vfiomgr developers (@vfiomgr)
options:
  domains:
    description: Names of domains of libvirt to check, instead of the host.
    type: list
    elements: str
    default: []
  fail_on:
    description: The least severity of a finding that fails the task.
    type: str
    choices: [blocker, warning, never]
    default: blocker
  strict:
    description: Whether the task also fails if a fact that decides the result is unknown.
    type: bool
    default: false
extends_documentation_fragment:
  - vfiomgr.host.common
  - vfiomgr.host.common.reads
"""

EXAMPLES = r"""
- name: Require that the host is ready for passthrough
  vfiomgr.host.check:
    strict: true

- name: Check two domains
  vfiomgr.host.check:
    domains: [win11, render]
    fail_on: never
  register: checked

- name: Show how to resolve the findings
  ansible.builtin.debug:
    msg: "{{ checked.findings | map(attribute='remedy') }}"
"""

RETURN = r"""
findings:
  description: The findings, without what is fine.
  returned: always
  type: list
  elements: dict
  contains:
    id: {description: The rule; C(vfiomgr explain) explains it., type: str, sample: no-iommu}
    severity: {description: "V(blocker), V(warning) or V(info).", type: str}
    title: {description: What was found., type: str}
    evidence: {description: Where it was seen., type: list, elements: str}
    why: {description: Why it matters., type: str}
    remedy: {description: What resolves it., type: str}
    domain: {description: The domain; only with O(domains)., type: str}
unknown:
  description: What decides the result and could not be read, with the reason.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.vfiomgr.host.plugins.module_utils import cli

_FAILING = {"blocker": ("blocker",), "warning": ("blocker", "warning"), "never": ()}


def _reports(module, vfiomgr):
    """Yield the name of each domain, its findings, and what is unknown; of a host, no name."""
    domains = module.params["domains"]
    arguments = ["check", *(["domain", "--", *domains] if domains else [])]
    document = vfiomgr.document(*arguments, statuses=(0, cli.FAILED))[1]
    if not domains:
        yield None, document["items"], document["unknown"]
        return
    for report in document["items"]:
        yield report["domain"], report["findings"], report["unknown"]


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            **cli.COMMON_ARGUMENTS,
            "domains": {"type": "list", "elements": "str", "default": []},
            "fail_on": {"type": "str", "choices": list(_FAILING), "default": "blocker"},
            "strict": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    findings = []
    unknown = []
    for domain, found, open_questions in _reports(module, cli.Vfiomgr(module)):
        named = {"domain": domain} if domain is not None else {}
        findings += [{**one, **named} for one in found if one["severity"] != "ok"]
        unknown += [f"{domain}: {one}" if named else one for one in open_questions]
    failing = _FAILING[module.params["fail_on"]]
    causes = [
        f"{one['title']} (remedy: {one['remedy']})" if one["remedy"] else one["title"]
        for one in findings
        if one["severity"] in failing
    ]
    if module.params["strict"]:
        causes += [f"unknown: {one}" for one in unknown]
    found = {"findings": findings, "unknown": unknown}
    if causes:
        module.fail_json(msg=f"not ready for passthrough: {'; '.join(causes)}", **found)
    module.exit_json(changed=False, **found)


if __name__ == "__main__":
    main()
