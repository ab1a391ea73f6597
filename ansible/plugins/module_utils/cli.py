# Copyright: the vfiomgr developers
# SPDX-License-Identifier: Apache-2.0
"""The command vfiomgr of the managed host: run for JSON, with its errors as failures of a task."""

from __future__ import annotations

import json
import re

COMMON_ARGUMENTS = {"executable": {"type": "path", "default": "vfiomgr"}}
"""What all modules take; the doc_fragment `common` documents it."""
CHANGE_ARGUMENTS = {**COMMON_ARGUMENTS, "timeout": {"type": "float"}}
"""What modules take that change the host."""
ALLOW = {"type": "list", "elements": "str", "default": []}
CHECKS = [
    "boot-display",
    "default-route",
    "host-peripheral",
    "in-use",
    "mounted-disk",
    "reserved-region",
    "vgpu-function",
]
"""The safety checks that a change of devices can override."""
DIFFERS = 3
FAILED = 1
_STATUSES = {
    FAILED: "failed, and was rolled back",
    5: "failed, and the rollback is incomplete",
    130: "was interrupted",
}
_INSTALL = "install the package on the host, e.g. with the role vfiomgr.host.install"
_RECOVER = "run the task again; if it is refused, run on the host: vfiomgr recover"
_BOOKKEEPING = ("/run/vfiomgr/", "/var/lib/vfiomgr/")


class Vfiomgr:
    """The command of the host that a module runs on."""

    def __init__(self, module):
        self._module = module
        name = module.params["executable"]
        self._path = module.get_bin_path(name)
        if self._path is None:
            module.fail_json(msg=f"cannot find the command {name}. Remedy: {_INSTALL}")

    def document(self, *arguments, data=None, statuses=(0,)):
        """Run it for JSON, and return status and document; other statuses fail the task."""
        command = [self._path, "--format", "json", *arguments]
        status, stdout, stderr = self._module.run_command(
            command, data=data, environ_update={"LC_ALL": "C.UTF-8"}
        )
        found = _document(stdout)
        if status in statuses and found is not None:
            return status, found
        return self._fail(command, status, stdout, stderr)

    def change(self, *arguments, data=None):
        """Run a command that changes the host, or in check mode plan it; return the document.

        Without pipelining a task has a terminal, on which vfiomgr would ask.
        """
        before = ["--yes", *options(self._module.params, timeout="--timeout")]
        if self._module.check_mode:
            before.append("--dry-run")
        return self.document(*before, *arguments, data=data)[1]

    def version(self):
        """Return the version of vfiomgr."""
        command = [self._path, "--version"]
        status, stdout, stderr = self._module.run_command(command)
        if status != 0:
            self._fail(command, status, stdout, stderr)
        return stdout.split()[-1]

    def _fail(self, command, status, stdout, stderr):
        error = _document(stderr) or {}
        what = _STATUSES.get(status, f"ended with status {status}")
        cause, remedy = f"the command {what}", None
        if status < 0:
            cause, remedy = f"vfiomgr was killed by signal {-status}", _RECOVER
        elif not error and status == 0:
            cause = "vfiomgr printed no JSON"
        cause = error.get("message", cause)
        remedy = error.get("remedy") or remedy
        message = "; ".join([cause, *error.get("details", [])])
        if error and status in _STATUSES:
            message = f"{message} (the operation {what})"
        if remedy:
            message = f"{message}. Remedy: {remedy}"
        more = {} if error else {"stdout": stdout, "stderr": stderr}
        self._module.fail_json(
            msg=message,
            cmd=command,
            rc=status,
            remedy=remedy,
            diagnostics=error.get("diagnostics", []),
            **more,
        )


def _document(text):
    """Return the document in what vfiomgr printed, after the lines that say what it does."""
    begin = re.search(r"^\{", text, re.MULTILINE)
    if begin is None:
        return None
    try:
        return json.JSONDecoder().raw_decode(text, begin.start())[0]
    except ValueError:
        return None


def options(params, **names):
    """Return options of the command line from parameters: `options(params, allow="--allow")`."""
    found = []
    for parameter, option in names.items():
        value = params[parameter]
        for one in value if isinstance(value, list) else [value]:
            if one is True:
                found.append(option)
            elif one is not None and one is not False:
                found += [option, str(one)]
    return found


def is_changed(document):
    """Whether the host was changed, or in check mode would be."""
    planned = document.get("steps") or document.get("deferred") or document.get("items")
    return document.get("changed", bool(planned))


def result(document):
    """Return the values that all modules which change the host return."""
    return {
        "changed": is_changed(document),
        "steps": [step["description"] for step in document.get("steps", [])],
        "notes": document.get("notes", []) + document.get("already", []),
    }


def difference(header, before, after):
    """Return a difference for --diff, of lists of lines."""
    return {
        "before_header": header,
        "after_header": header,
        "before": "".join(f"{line}\n" for line in before),
        "after": "".join(f"{line}\n" for line in after),
    }


def differences(document):
    """Return the differences of a plan or an outcome for --diff: drivers, files, other steps."""
    drivers = {}
    files = []
    others = []
    for step in document.get("steps", []):
        if step["kind"] == "change-driver":
            address = step["device"]["address"]
            first, _last = drivers.get(address, (step["before"]["driver"], None))
            drivers[address] = (first, step["after"]["driver"])
        elif step["kind"] == "replace-file":
            if not step["path"].startswith(_BOOKKEEPING):
                texts = (step["before"] or "", step["after"] or "")
                files.append(difference(step["path"], *(text.splitlines() for text in texts)))
        elif step["commands"]:
            others.append(step["description"])
    found = files
    if others:
        found = [difference("steps", [], others), *found]
    if drivers:
        lines = [
            [f"{address}: {pair[side] or 'no driver'}" for address, pair in drivers.items()]
            for side in (0, 1)
        ]
        found = [difference("drivers", *lines), *found]
    return found
