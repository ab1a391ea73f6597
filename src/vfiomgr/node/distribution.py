"""Where the kubelet of a Kubernetes distribution keeps its files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.errors import UsageError
from vfiomgr.kata.model import KUBELET_ROOT, KUBELET_ROOTS
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

DISTRIBUTIONS = tuple(KUBELET_ROOTS)
POD_RESOURCES = "pod-resources"
_CHOOSE = "pass --distribution or --kubelet-root"


def named_kubelet_root(distribution: str | None, path: str | None) -> HostPath | None:
    """The --root-dir of a kubelet that a user names; None if the host must be searched.

    Raises:
        UsageError: the path is not a plain absolute path.

    """
    if path is None:
        return None if distribution is None else KUBELET_ROOTS[distribution]
    names = path.rstrip("/").split("/")
    if (
        names[0]
        or not names[1:]
        or not all(names[1:])
        or {".", ".."} & set(names)
        or not path.isprintable()
    ):
        message = f"--kubelet-root: {path!r} is not an absolute path"
        raise UsageError(message, f"write the --root-dir of the kubelet, e.g. {KUBELET_ROOT}")
    return HostPath("/".join(names))


def found_kubelet_root(tree: HostTree) -> HostPath | None:
    """The --root-dir of the kubelet on a host; None if no kubelet has run there.

    MicroK8s links /var/lib/kubelet to its own directory.

    Raises:
        UsageError: several kubelets have run there.

    """
    known = dict.fromkeys(KUBELET_ROOTS.values())
    used = (tree.resolve(root) for root in known if tree.exists(root / POD_RESOURCES))
    roots = tuple(dict.fromkeys(root for root in used if root is not None))
    if len(roots) > 1:
        message = f"several kubelets found: {', '.join(roots)}"
        raise UsageError(message, _CHOOSE)
    return roots[0] if roots else None
