"""What AppArmor lets QEMU read, from the profiles of the host."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vfiomgr.expressions import expression
from vfiomgr.host.text import settings_of, text_of
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_SECURITY = "/sys/kernel/security/apparmor/profiles"
_DAEMONS = ("libvirtd", "virtqemud")
PROFILES = "/etc/apparmor.d"
"""Where the profiles are."""
QEMU_PROFILE = "abstractions/libvirt-qemu"
"""What the profiles of all guests include."""
_INCLUDE = expression(r"^[ \t]*#?include (?:if exists )?<([^>\n]+)>", re.MULTILINE)
_RULE = expression(
    r'^[ \t]*(?:(?:audit|allow|owner|file) )*(?:"([/@][^"\n]*)"|([/@][^"\s]*))[ \t]+(\w+)',
    re.MULTILINE,
)
_BACKWARDS = expression(
    r'^[ \t]*(?:(?:audit|allow|owner|file) )*([rwkmalix]+)[ \t]+"?([/@][^"\n,]*)', re.MULTILINE
)
"""A rule with the permissions first."""
_PART = expression(r"\*\*|\*|\?|@\{\w+\}|\[[^]]*\]|[{},]|.")
_PATTERNS = {"**": ".*", "*": "[^/]*", "?": "[^/]", "{": "(?:", "}": ")", ",": "|"}


def readable(tree: HostTree) -> re.Pattern[str] | None:
    """The paths that QEMU of any domain may read (apparmor.d(5)); None without that confinement.

    libvirt chooses AppArmor if its own profile is enforced (AppArmorSecurityManagerProbe), and
    virt-aa-helper adds the disks of a domain to its profile, but no ROM. A rule that is not
    understood allows more than it should.
    """
    confined = (line.split() for line in (text_of(tree, _SECURITY) or "").splitlines())
    is_enforced = any(
        words[0].rpartition("/")[2] in _DAEMONS and words[-1] == "(enforce)"
        for words in confined
        if words
    )
    settings = list(settings_of(tree, "/etc/libvirt/qemu.conf"))
    is_other = any(
        (line.startswith("security_driver") and "apparmor" not in line)
        or line.replace(" ", "") == "security_default_confined=0"
        for line in settings
    )
    texts = list(_included(tree, (QEMU_PROFILE, _TEMPLATE)))
    text = "\n".join(texts)
    if not is_enforced or is_other or not texts[0] or len(texts) >= _MOST_INCLUDED:
        return None
    globs = [quoted or path for quoted, path, may in _RULE.findall(text) if "r" in may]
    globs += [path for may, path in _BACKWARDS.findall(text) if "r" in may]
    try:
        return re.compile("|".join(map(_pattern, globs)))
    except re.error:  # a glob that AppArmor would not accept either
        return None


_TEMPLATE = "libvirt/TEMPLATE.qemu"
_MOST_INCLUDED = 200


def _included(tree: HostTree, names: Iterable[str]) -> Iterator[str]:
    """The texts of files below apparmor.d, or of those in a directory, with what they include."""
    waiting, seen = list(names), set[str]()
    while waiting and len(seen) < _MOST_INCLUDED:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        inside = tree.children(HostPath(f"{PROFILES}/{name}"))
        text = "" if inside else text_of(tree, f"{PROFILES}/{name}") or ""
        yield text
        waiting += [*(f"{name}/{one}" for one in inside), *_INCLUDE.findall(text)]


def _pattern(glob: str) -> str:
    def part(found: re.Match[str]) -> str:
        text = found[0]
        if text[0] in "@[":
            return ".*"
        return _PATTERNS.get(text) or re.escape(text)

    is_balanced = glob.count("{") == glob.count("}")
    return _PART.sub(part, glob) if is_balanced else ".*"
