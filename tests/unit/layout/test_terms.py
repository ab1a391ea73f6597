"""What a layout is told: keys of its rules, and no options of other commands."""

from __future__ import annotations

import ast
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest
from msgspec.structs import replace
from pydantic import TypeAdapter

import vfiomgr
from tests.unit.devices import host_of, pci_device, with_facts
from tests.unit.vgpus import A40_TYPES, add_divided_gpu, vgpu_host
from vfiomgr.diagnostic import LEAVE_IT_OUT, Option, OptionName, allow, blocker
from vfiomgr.layout.compare import compare, words
from vfiomgr.layout.model import Layout, Rule
from vfiomgr.layout.requests import ApplyLayout
from vfiomgr.users.model import HostUse
from vfiomgr.vgpu.model import describe_type

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.snapshot.model import HostSnapshot

_RULE: TypeAdapter[Rule] = TypeAdapter(Rule)
_COMMAND = re.compile(r"\b(?:vfiomgr|nvidia-smi) [^;:]*")
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*(?: [a-z-]+)?")
OF_APPLY = re.compile(r"--(allow in-use.*|deadline.*)")
"""Options that `vfiomgr apply` itself has, and no rule."""
GPU = pci_device()
AUDIO = replace(pci_device("0000:04:00.1"), class_code="040300", driver="snd_hda_intel")
NIC = replace(pci_device("0000:06:00.0"), class_code="020000", driver="e1000e")
DISK = replace(pci_device("0000:07:00.0"), class_code="010802", driver="nvme", iommu_group=7)
CONSOLE = replace(pci_device("0000:08:00.0"), is_boot_display=True, iommu_group=8)


def options_in(text: str) -> list[str]:
    """The options that a text names outside of commands, but for those of `apply`."""
    found = _OPTION.findall(_COMMAND.sub("", text))
    return [option for option in found if not OF_APPLY.fullmatch(option)]


def rule(**fields: Any) -> Rule:
    return _RULE.validate_python({"select": "all", "state": "passthrough", **fields})


def told(host: HostSnapshot, *rules: dict[str, Any]) -> list[str]:
    """All that speaks against a layout, and its notes."""
    found = compare(host, ApplyLayout("x", Layout.model_validate({"devices": rules})))
    texts = [f"{o.summary}; {o.hint}" for part in found.parts for o in part.diagnostics]
    return [*texts, *(note for part in found.parts for note in part.plan.remarks)]


def passing(device: str, **fields: Any) -> dict[str, Any]:
    return {"select": {"address": device}, "state": "passthrough", **fields}


MOUNTED = with_facts(
    host_of(DISK), host_uses=(HostUse(DISK.address, "mounted-disk", "/dev/nvme0n1 on /srv"),)
)
ROUTED = with_facts(host_of(NIC), host_uses=(HostUse(NIC.address, "default-route", "eth0"),))
A40 = {"select": {"class": "0302"}, "state": "vgpu"}


def test_a_companion_of_another_group_can_be_left() -> None:
    _, other = told(host_of(GPU, replace(AUDIO, iommu_group=5)), passing("0000:04:00.0"))
    assert other == "to leave 0000:04:00.1: only: true"


@pytest.mark.parametrize(
    ("host", "wanted", "part"),
    [
        (host_of(GPU, AUDIO), passing("0000:04:00.0", only=True), "together: remove only: true"),
        (host_of(GPU, NIC), passing("0000:04:00.0"), "set with_group: true to include them, or"),
        (host_of(CONSOLE), passing("0000:08:00.0"), "set allow: boot-display"),
        (MOUNTED, passing("0000:07:00.0"), "unmount it, or set allow: mounted-disk"),
        (ROUTED, passing("0000:06:00.0"), "or set allow: default-route"),
        (host_of(GPU), passing("0000:04:00.0", driver="nvidia"), "remove driver to use vfio"),
        (
            add_divided_gpu(vgpu_host(), 1, types=(describe_type("nvidia-1"),)),
            {**A40, "vgpus": [{"type": "A40-4Q", "count": 1}]},
            "does not support A40-4Q",
        ),
        (
            vgpu_host((A40_TYPES[0],)),
            {**A40, "vgpus": [{"type": "A40-48Q", "count": 1}]},
            "vfiomgr did not create them",
        ),
        (
            host_of(replace(GPU, driver="vfio-pci"), replace(NIC, driver="vfio-pci")),
            {"select": {"address": "0000:04:00.0"}, "state": "host"},
            "to unbind 0000:06:00.0 too: add a host rule",
        ),
    ],
)
def test_what_a_layout_is_told_names_its_keys(
    host: HostSnapshot, wanted: dict[str, Any], part: str
) -> None:
    texts = told(host, wanted)
    assert any(part in text for text in texts), texts
    assert [option for text in texts for option in options_in(text)] == []


DISK_HELD = blocker("mounted-disk", DISK, "held", "unmount it", LEAVE_IT_OUT, allow("mounted-disk"))


@pytest.mark.parametrize(
    ("fields", "diagnostic", "said"),
    [
        ({}, blocker("x", "", "", "stop it", allow("in-use")), "stop it, or apply with --allow in"),
        ({}, DISK_HELD, "unmount it, or exclude it with only: true, or set allow: mounted-disk"),
        ({"state": "sriov", "count": 2}, DISK_HELD, "unmount it, or set allow: mounted-disk"),
    ],
)
def test_a_remedy_has_the_keys_of_the_rule(
    fields: dict[str, Any], diagnostic: Diagnostic, said: str
) -> None:
    found = diagnostic.in_words(partial(words, rule(**fields)))
    assert found.remedy.startswith(said)


@pytest.mark.parametrize("name", sorted({*get_args(OptionName)} - {"at-boot"}))
def test_a_passthrough_rule_has_a_key_for_each_option(name: OptionName) -> None:
    """But for the next boot, which is a remedy of the entire layout."""
    found = words(rule(), Option(name, f"--{name}", "x"))
    assert found
    assert "--" not in found


# ---- siblings: every text of the planners that a layout is planned with

_PLANNERS = (
    "passthrough/guards.py",
    "passthrough/plan.py",
    "passthrough/reset.py",
    "gpu/plan.py",
    "gpu/switch.py",
    "sriov/plan.py",
    "vgpu/plan.py",
    "vgpu/placement.py",
    "vgpu/capacity.py",
    "layout/vgpus.py",
    "layout/parts.py",
)
_NEVER_TOLD = ("vgpu remove --all --parent X",)
"""Of removing by the name of a GPU, which no layout does."""
_COMMANDS = ("_at_boot", "_command")
"""Functions that build the value of an option, for which a layout has other words."""
_TRANSLATED = ("Option",)
"""What has options as such, for which a layout has other words."""


def _texts(file: Path) -> Iterator[str]:
    """The string literals of a module, with X for what is filled in."""
    inner: set[ast.AST] = set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    docstrings = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in _COMMANDS:
            inner.update(ast.walk(node))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _TRANSLATED:
            inner.update(ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and node not in inner:
            inner.update(ast.walk(node))
            parts = (p.value if isinstance(p, ast.Constant) else "X" for p in node.values)
            yield "".join(map(str, parts))
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and node not in inner and node not in docstrings:
            yield str(ast.literal_eval(node))


@pytest.mark.parametrize("name", _PLANNERS)
def test_no_text_of_a_planner_leaves_an_option_in_a_layout(name: str) -> None:
    file = Path(vfiomgr.__file__).parent / name
    for text in _texts(file):
        left = [] if text.endswith(_NEVER_TOLD) else options_in(text)
        assert left == [], text
