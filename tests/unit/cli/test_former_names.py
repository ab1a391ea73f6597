"""Names that commands and options had before 1.0: understood, and not shown."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from vfiomgr.cli.main import cli
from vfiomgr.cli.options import FormerGroup, LazyGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.conftest import Run


UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"


def found(path: str) -> click.Command:
    """The command that words lead to."""
    context = click.Context(cli, info_name="vfiomgr", **cli.context_settings)
    for word in path.split():
        group = context.command
        assert isinstance(group, click.Group)
        below = group.get_command(context, word)
        assert below is not None, path
        context = click.Context(below, info_name=word, parent=context)
    return context.command


@pytest.mark.parametrize(
    ("former", "present"),
    [
        ("assert", "layout assert"),
        ("export", "layout export"),
        ("revert", "layout revert"),
        ("watch", "layout watch"),
        ("libvirt preflight", "check domain"),
        ("kata explain", "check pod"),
        ("kata check-image", "check kata"),
        ("cdi check", "check cdi"),
        ("layout validate", "check layout"),
        ("layout plan", "plan"),
        ("layout apply", "apply"),
    ],
)
def test_a_former_name_leads_to_the_same_command(former: str, present: str) -> None:
    assert found(former) is found(present)
    group, _, name = former.rpartition(" ")
    listed = found(group) if group else cli
    assert isinstance(listed, click.Group)
    if not former.startswith(("layout plan", "layout apply")):
        assert name not in listed.list_commands(click.Context(listed))


@pytest.mark.parametrize(
    ("former", "present"),
    [
        ("bind 06:00.0 --only --dry-run", "bind 06:00.0 --function-only --dry-run"),
        ("bind 02:00.0 --dry-run --deadline 9", "bind 02:00.0 --dry-run --timeout 9"),
        ("kata config --runtime rs", "kata config --kata-runtime rust"),
    ],
)
def test_a_former_option_means_the_same(run: Run, former: str, present: str) -> None:
    before, now = run(*former.split()), run(*present.split())
    assert (before.status, before.stdout) == (now.status, now.stdout)
    assert now.stdout


@pytest.mark.parametrize(
    ("former", "present"),
    [
        ("libvirt nodedev list", "vgpu list --libvirt"),
        (f"libvirt nodedev define {UUID}", f"vgpu define --libvirt {UUID}"),
        (f"libvirt nodedev start {UUID}", f"vgpu start --libvirt {UUID}"),
        (f"libvirt nodedev stop {UUID} --dry-run", f"vgpu stop --libvirt {UUID} --dry-run"),
        (f"libvirt nodedev undefine {UUID}", f"vgpu undefine --libvirt {UUID}"),
        ("vgpu types", "vgpu list --types"),
        ("vgpu types --parent 99:00.0", "vgpu list --types --parent 99:00.0"),
        ("libvirt define NONE", "libvirt edit --define NONE"),
        ("persist remove --all", "unbind --forget-only --all"),
        ("persist remove 02:00.0 --dry-run", "unbind --forget-only 02:00.0 --dry-run"),
        ("persist import --dry-run", "bind --persist --driverctl --dry-run"),
        ("runtime configure A --path /a", "runtime install A --path /a"),
        ("runtime unconfigure A", "runtime uninstall A"),
        ("kata install --runtime crio", "runtime install --kata --runtime crio"),
        ("kata uninstall --runtime docker", "runtime uninstall --kata --runtime docker"),
        ("layout schema", "check layout --schema"),
        ("layout schema --format yaml", "check layout --schema --format yaml"),
        ("vgpu switch 01:00.0 vgpu --functions 2", "vgpu mode 01:00.0 vgpu --functions 2"),
        ("vgpu switch 99:00.0 host", "vgpu mode 99:00.0 host"),
        ("libvirt hook enable WIN --dry-run", "libvirt hook install WIN --dry-run"),
        ("libvirt hook disable WIN", "libvirt hook uninstall WIN"),
    ],
)
def test_a_former_command_does_the_same(run: Run, former: str, present: str) -> None:
    before, now = run(*former.split()), run(*present.split())
    assert before == now
    former_path, path = (
        list(itertools.takewhile(re.compile("[a-z][a-z-]*").fullmatch, line.split()))
        for line in (former, present)
    )
    shown = run(*path, "--help")
    assert shown.status == 0
    assert run(*former_path, "--help") == run("help", *former_path) == shown
    above = found(" ".join(former_path[:-1]))
    assert isinstance(above, click.Group)
    assert former_path[-1] not in above.list_commands(click.Context(above))


@pytest.mark.parametrize(
    ("former", "present"),
    [
        ("vgpu instances list", "vgpu instances"),
        ("vgpu instances list 01:00.0", "vgpu instances 01:00.0"),
        ("vgpu instances set 01:00.0 1g.5gb=2", "vgpu instances 01:00.0 1g.5gb=2"),
        ("vgpu instances remove 01:00.0 --dry-run", "vgpu instances 01:00.0 --none --dry-run"),
        ("vgpu instances clear 01:00.0", "vgpu instances 01:00.0 --none"),
        (
            "kata install --handler a --runtime-path /b --runtime crio",
            "runtime install a --kata --path /b --runtime crio",
        ),
        ("kata uninstall --handler A_", "runtime uninstall A_ --kata"),
        ("oci inject none 02:00.0", "oci edit none --add 02:00.0"),
        ("oci inject none 02:00.0 --node cdev", "oci edit none --add 02:00.0 --node cdev"),
        ("oci eject none", "oci edit none --remove-all"),
        ("oci eject none 02:00.0", "oci edit none --remove 02:00.0"),
        ("kata runtimeclass", "kata pod --runtimeclass"),
        (
            "kata runtimeclass --handler a --cpus 2 --any-node",
            "kata pod --runtimeclass --handler a --overhead-cpus 2 --any-node",
        ),
        (
            "kata runtimeclass --name b --default-memory 4G",
            "kata pod --runtimeclass --runtime-class b --handler kata-vfio --default-memory 4G",
        ),
        ("persist list", "list --persistent"),
        ("persist list --format json", "list --persistent --format json"),
        ("sriov quota 05:00.0 --exec-quantum 5", "sriov set 05:00.0 --exec-quantum 5"),
        ("sriov quota 99:00.0 --priority low", "sriov set 99:00.0 --priority low"),
        ("vgpu instances set --help", "vgpu instances --help"),
        ("help vgpu instances set", "help vgpu instances"),
    ],
)
def test_a_former_group_does_the_same(run: Run, former: str, present: str) -> None:
    assert run(*former.split()) == run(*present.split())


@pytest.mark.parametrize("address", ["05:00.0", "99:00.0"])
def test_former_quotas_are_shown(run: Run, address: str) -> None:
    assert run("sriov", "quota", address) == run("sriov", "list", address)


@pytest.mark.parametrize(
    "former",
    [
        "libvirt hook enable",
        "libvirt hook disable",
        "vgpu instances set 01:00.0",
        "vgpu instances remove",
        "vgpu switch 01:00.0",
    ],
)
def test_a_former_command_requires_what_it_required(run: Run, former: str) -> None:
    answer = run(*former.split())
    assert (answer.status, answer.stdout) == (2, "")
    assert "missing argument: " in answer.stderr


def test_the_example_of_a_former_command_has_its_argument(run: Run) -> None:
    answer = run("libvirt", "hook", "disable")
    assert "e.g. vfiomgr libvirt hook uninstall win; " in answer.stderr


def test_former_options_are_not_shown(run: Run) -> None:
    text = run("bind", "--help").stdout
    assert "--function-only" in text
    assert "--timeout" in text
    assert "--only" not in text.replace("--function-only", "")
    assert "--deadline" not in text


@pytest.mark.parametrize("option", ["--dry-run", "--yes", "--timeout=3", "-v"])
def test_an_option_without_a_meaning_is_an_error(run: Run, option: str) -> None:
    answer = run("list", option)
    assert (answer.status, answer.stdout) == (2, "")
    assert "no such option" in answer.stderr


def test_a_refusal_is_a_document_on_stderr(run: Run) -> None:
    answer = run("bind", "00:02.0", "--format", "json")
    assert (answer.status, answer.stdout) == (4, "")
    document = json.loads(answer.stderr)
    assert (document["api_version"], document["kind"]) == ("vfiomgr/v1", "Error")
    assert document["exit_status"] == 4
    rules = {one["id"]: one for one in document["diagnostics"]}
    assert rules["boot-display"]["override"] == "boot-display"
    assert rules["boot-display"]["subject"].startswith("0000:00:02.0")


@pytest.mark.parametrize(
    "words", [["bnd"], ["bind", "--nix"], ["bind", "nothing"], ["show", "99:00.0"]]
)
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_mistake_is_a_document_on_stderr(run: Run, words: list[str], place: str) -> None:
    form = ["--format=json"]
    answer = run(*form, *words) if place == "before" else run(*words, *form)
    assert (answer.status, answer.stdout) == (2, "")
    document = json.loads(answer.stderr)
    assert (document["kind"], document["diagnostics"]) == ("Error", [])
    assert document["message"]
    assert document["remedy"]


def test_an_error_can_be_yaml(run: Run) -> None:
    assert "kind: Error\n" in run("show", "99:00.0", "--format", "yaml").stderr


CHECKOUT = Path(__file__).parents[3]
KEPT = {"help", "persist", "persist watch", "libvirt hook run", "vgpu restore", "node scan"}
"""Unlisted commands that are no former names: services, hooks and other programs run them."""


def former_paths(group: click.Group, path: str = "") -> Iterator[str]:
    """The words of all former commands."""
    if isinstance(group, LazyGroup):
        yield from (f"{path}{name}" for name in group._unlisted)
    for name in {*group.list_commands(click.Context(group)), *getattr(group, "_unlisted", ())}:
        command = found(f"{path}{name}")
        if isinstance(command, click.Group):
            yield from former_paths(command, f"{path}{name} ")
            hidden = (below for below, one in command.commands.items() if one.hidden)
            yield from (f"{path}{name} {below}" for below in hidden)
        elif isinstance(command, FormerGroup):
            yield from (f"{path}{name} {below}" for below in command._former)


def texts() -> Iterator[tuple[str, str]]:
    """What people read: documents, and all texts of the program, each with the file's name."""
    code = ("src/**/*.py", "src/**/*.toml", "tools/**/*.toml")
    for pattern in ("*.md", "docs/**/*.md", "kata/**/*", "packaging/**/*", *code):
        for path in CHECKOUT.glob(pattern):
            name = str(path.relative_to(CHECKOUT))
            if path.is_file() and not name.startswith(("docs/decisions", "CHANGELOG")):
                yield name, " ".join(path.read_text(errors="replace").split())


def test_no_text_names_a_former_command() -> None:
    former = {path for path in former_paths(cli) if path not in KEPT}
    assert {"watch", "persist list", "vgpu types", "kata install", "vgpu instances set"} <= former
    several = "|".join(re.escape(path) for path in former if " " in path)
    single = "|".join(path for path in former if " " not in path)
    pattern = re.compile(rf"(?:(?:vfiomgr |`)({several})|vfiomgr ({single}))(?![\w-])")
    named = {(name, match[0]) for name, text in texts() for match in pattern.finditer(text)}
    assert named == set()
