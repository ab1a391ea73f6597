"""What the tool says about a situation, and how that compares with what the expert says."""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import patch

from tests.field.host import build
from tests.field.situation import Expected, Situation, Verdict, read_situation
from vfiomgr.host.tree import HostTree
from vfiomgr.main import program

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.field.host import FieldKernel
    from vfiomgr.libvirt.model import Hypervisor

_MEMORY = "/dev/shm"  # noqa: S108 - each run makes a directory of its own there
_START = re.compile(r"(?=^\S)", re.MULTILINE)
_DOMAIN = """<domain type='kvm'>
  <name>guest</name>
  <memory unit='GiB'>8</memory>
  <vcpu>4</vcpu>
  <os firmware='efi'><type arch='x86_64' machine='q35'>hvm</type></os>
  <features><acpi/></features>
  <cpu mode='host-passthrough'/>
  <devices>
{}
  </devices>
</domain>
"""
"""What a <hostdev> of a report is put into."""


class Answer(NamedTuple):
    """What a command of a situation printed."""

    command: str
    status: int
    text: str

    def statements(self) -> list[str]:
        """Findings, refusals and other paragraphs: a line and the indented ones after it."""
        return [part for part in _START.split(self.text) if part.strip()]


class Judgement(NamedTuple):
    """How the answers compare with the expert's."""

    verdict: Verdict
    missing: tuple[str, ...]
    misleading: tuple[str, ...]


class Result(NamedTuple):
    """A situation of the corpus, its answers and their judgement."""

    path: Path
    situation: Situation
    answers: tuple[Answer, ...]
    judgement: Judgement


def run(path: Path) -> Result:
    """Build the host of a situation, run its commands, and judge."""
    situation = read_situation(path)
    directory = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=directory, prefix="field-") as place:
        kernel = build(situation, Path(place))
        work = Path(place, "work")
        for name, text in situation.input.items():
            file = work / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(_DOMAIN.format(text) if _is_part_of_domain(name, text) else text)
        work.mkdir(exist_ok=True)
        with chdir(work):
            answers = tuple(_ask(kernel, command) for command in situation.commands)
    return Result(path, situation, answers, judge(situation, answers))


def _is_part_of_domain(name: str, text: str) -> bool:
    return name.endswith(".xml") and "<domain" not in text


def _ask(kernel: FieldKernel, command: str) -> Answer:
    """Run a command in this process, on the situation's host in the place of the machine's."""

    def tree(root: str) -> HostTree:
        return kernel if root in ("/", kernel.root) else HostTree(root)

    def libvirt(uri: str, **_options: object) -> Hypervisor:
        return kernel.hypervisor(uri)

    output = io.StringIO()
    with (
        patch("vfiomgr.snapshot.source.HostTree", tree),
        patch("vfiomgr.libvirt.commands.preflight.hypervisor_at", libvirt),
        patch.object(sys, "argv", ["vfiomgr", *shlex.split(command)]),
        redirect_stdout(output),
        redirect_stderr(output),
    ):
        try:
            program.main()
            status = 0
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return Answer(command, status, output.getvalue())


def judge(situation: Situation, answers: Iterable[Answer]) -> Judgement:
    """Compare: `wrong` misleads, `right` has all, `half` has some, `silent` nothing."""
    answers = tuple(answers)
    expert = situation.answer
    missing = [each.fact for each in expert.must if not _is_said(each, answers)]
    misleading = [each.fact for each in expert.must_not if _is_said(each, answers)]
    verdict: Verdict = "half"
    if misleading:
        verdict = "wrong"
    elif not missing:
        verdict = "right"
    elif len(missing) == len(expert.must):
        verdict = "silent"
    return Judgement(verdict, tuple(missing), tuple(misleading))


def _is_said(expected: Expected, answers: Iterable[Answer]) -> bool:
    asked = [answer for answer in answers if answer.command.startswith(expected.of)]
    if expected.status is not None and any(each.status != expected.status for each in asked):
        return False
    if not (expected.rule or expected.says or expected.remedy):
        return True
    return any(_fits(expected, part) for answer in asked for part in answer.statements())


def _fits(expected: Expected, statement: str) -> bool:
    rules = (rf"\b(?:rule|explain) +{re.escape(rule)}$" for rule in expected.rule)
    rules_in_line = (rf"explain {re.escape(rule)}(?:;|$)" for rule in expected.rule)
    causes = (*rules, *rules_in_line, *expected.says)
    return (
        expected.address in statement
        and (not causes or _has(causes, statement))
        and (not expected.remedy or _has(expected.remedy, statement))
    )


def _has(patterns: Iterable[str], text: str) -> bool:
    flags = re.MULTILINE | re.IGNORECASE
    return any(re.search(pattern, text, flags) for pattern in patterns)
