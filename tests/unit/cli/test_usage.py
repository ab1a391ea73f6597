"""Mistakes in a command line: two lines, which name what was typed, what is wanted, an example."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from vfiomgr.cli.options import session_options
from vfiomgr.main.program import cli
from vfiomgr.main.usage import explained

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.conftest import Run

BIND = "e.g. vfiomgr bind 0000:04:00.0; see vfiomgr bind --help"
DEADLINE = "is not a number of seconds above 0 and up to 86400 (one day)"


@pytest.mark.parametrize(
    ("line", "cause", "remedy"),
    [
        ("sriov set 05:00.0 x", "COUNT: 'x' is not a whole number from 0 up", "sriov set 0000:05"),
        (
            "sriov set 05:00.0 -1",
            "no such option: -1 (vfiomgr sriov set takes no negative numbers)",
            "sriov set 0000:05",
        ),
        (
            "libvirt hostdev 01:00.0 --guest-bus 900",
            "'900' is not a whole number from 1 to 255",
            "3",
        ),
        ("bind 01:00.0 --timeout nan", f"--timeout: 'nan' {DEADLINE}", "e.g. --timeout 120"),
        ("bind 01:00.0 --timeout inf", f"--timeout: 'inf' {DEADLINE}", "e.g. --timeout 120"),
        ("bind 01:00.0 --timeout 0", f"--timeout: '0' {DEADLINE}", "e.g. --timeout 120"),
        ("bind 01:00.0 --timeout -1", f"--timeout: '-1' {DEADLINE}", "e.g. --timeout 120"),
        ("bind 01:00.0 --timeout 1e99", f"--timeout: '1e99' {DEADLINE}", "e.g. --timeout 120"),
        ("--format xml list", "--format: 'xml' is not one of 'table', 'json'", "--format json"),
        ("bind", "missing argument: ADDRESS", "vfiomgr list"),
        (
            "bind 01:00.0 --allow x",
            "--allow: 'x' is not one of 'boot-display'",
            "--allow host-peripheral",
        ),
        ("bind 01:00.0 --reset-method x", "--reset-method: 'x'", "--reset-method flr"),
        ("bind --driver", "option '--driver' requires an argument", "e.g. --driver vfio-pci"),
        ("reset --method", "option '--method' requires an argument", "reset 04:00.0 --method flr"),
        ("vgpu create --parent", "option '--parent' requires an argument", "--parent 0000:"),
        ("vgpu create --count 0", "--count: '0' is not a whole number from 1 up", "--count"),
        ("libvirt hostdev", "missing argument: ADDRESS|UUID", "hostdev 0000:04:00.0"),
        ("show 01:00.0 b", "unexpected extra argument (b)", "e.g. vfiomgr show 0000:04:00.0"),
        ("bind --dry-run=x", "'--dry-run' does not take a value", "--dry-run; see"),
        ("bind --alow x", "no such option: --alow. Did you mean --allow", BIND),
        ("--nix list", "no such option: --nix", "e.g. vfiomgr list"),
        ("lst", "no such command 'lst'. Did you mean: vfiomgr list?", "see vfiomgr --help"),
        ("info", "Did you mean: vfiomgr show?", "see vfiomgr --help"),
        ("status", "Did you mean: vfiomgr list?", "see vfiomgr --help"),
        ("doctor", "Did you mean: vfiomgr check?", "see vfiomgr --help"),
        ("version", "Did you mean: vfiomgr --version?", "see vfiomgr --help"),
        ("attach 04:00.0", "Did you mean: vfiomgr bind?", "see vfiomgr --help"),
        ("vgpu ls", "Did you mean: vfiomgr vgpu list?", "see vfiomgr vgpu --help"),
        ("group", "Did you mean: vfiomgr groups?", "see vfiomgr --help"),
        ("vgpu type", "Did you mean: vfiomgr vgpu list --types?", "see vfiomgr vgpu --help"),
        ("oci rm", "Did you mean: vfiomgr oci edit?", "see vfiomgr oci --help"),
        (
            "libvirt enable win",
            "Did you mean: vfiomgr libvirt hook install?",
            "see vfiomgr libvirt --help",
        ),
        ("vgpu rm", "Did you mean: vfiomgr vgpu remove?", "see vfiomgr vgpu --help"),
        (
            "vgpu nix",
            "vfiomgr vgpu: no such command 'nix'",
            "commands: create, define, instances, list, mode,",
        ),
        (
            "bind 01:00.0 --allow boot",
            "--allow: 'boot' is not one of 'boot-display'",
            "did you mean --allow boot-display? see vfiomgr bind --help",
        ),
        (
            "list --state hots",
            "'host', 'vfio', 'in-use', 'vgpu', 'no-driver'",
            "did you mean --state host?",
        ),
        ("sriov create 05:00.0 4", "Did you mean: vfiomgr sriov set?", "see vfiomgr sriov --help"),
        (
            "layout status",
            "Did you mean: vfiomgr layout assert?",
            "see vfiomgr layout --help",
        ),
        ("remove 05:00.0", "Did you mean: vfiomgr unbind?", "see vfiomgr --help"),
        (
            "check host.yaml",
            "no such command 'host.yaml'",
            "vfiomgr check layout host.yaml; compare it with this host: vfiomgr plan host.yaml",
        ),
        ("check win.xml", "no such command 'win.xml'", "vfiomgr check domain win.xml"),
        (
            "check 04:00.0",
            "no such command '04:00.0'",
            "remedy: show a device with: vfiomgr show 04:00.0; check this host: vfiomgr check",
        ),
        ("check 04:00.8", "no such command '04:00.8'", "vfiomgr check layout 04:00.8"),
        (
            "explain -device vfio-pci",
            "no such option: -d",
            "remedy: put -- before a message: vfiomgr explain -- MESSAGE; see vfiomgr explain",
        ),
        ("explain --device", "no such option: --device", "vfiomgr explain -- MESSAGE"),
        ("explain --lgo x", "Did you mean --log?", "remedy: e.g. vfiomgr explain"),
        ("list --devise", "no such option: --devise", "remedy: e.g. vfiomgr list"),
        ("check host", "vfiomgr check: no such command", "layout (or none: vfiomgr check); see"),
        ("vgpu mode vgpu", "missing argument: GPU", "e.g. vfiomgr vgpu mode 0000:41:00.0 vgpu"),
        ("sriov set 05:00.0", "missing argument: COUNT", "e.g. vfiomgr sriov set 0000:05:00.0 4"),
        ("vgpu create A40-4Q", "missing option: --type", "vfiomgr vgpu create --type A40-4Q; list"),
        ("runtime install", "missing argument: NAME", "vfiomgr runtime install --kata; for"),
        (
            "runtime install kata-gpu",
            "missing option: --path FILE",
            "for Kata: vfiomgr runtime install kata-gpu --kata; for another",
        ),
        (
            "libvirt hostdev 3deab9a4",
            "'3deab9a4' is neither a PCI address nor the UUID of a vGPU",
            "vfiomgr vgpu list; devices: vfiomgr list",
        ),
        ("libvirt hostdev 04:00", "'04:00' is not a PCI address", "did you mean 0000:04:00.0?"),
        ("runtime uninstall", "missing argument: NAME", "vfiomgr runtime uninstall kata-vfio"),
    ],
)
def test_a_mistake_is_told_with_an_example(run: Run, line: str, cause: str, remedy: str) -> None:
    answer = run(*line.split())
    assert (answer.status, answer.stdout) == (2, "")
    first, second = answer.stderr.splitlines()
    assert first.startswith("vfiomgr: error: ")
    assert cause in first
    assert second.startswith("  remedy: ")
    assert remedy in second


@pytest.mark.parametrize(
    ("setting", "cause", "example"),
    [
        ("VFIOMGR_FORMAT=xml", "'xml' is not one of", "VFIOMGR_FORMAT=json"),
        ("VFIOMGR_DRY_RUN=maybe", "'maybe' is not 1 or 0", "VFIOMGR_DRY_RUN=1"),
        ("VFIOMGR_TIMEOUT=inf", f"'inf' {DEADLINE}", "VFIOMGR_TIMEOUT=120"),
        ("VFIOMGR_VERBOSE=x", "'x' is not a whole number from 0 up", "VFIOMGR_VERBOSE=1"),
    ],
)
def test_a_mistake_in_the_environment_names_the_variable(
    run: Run, monkeypatch: pytest.MonkeyPatch, setting: str, cause: str, example: str
) -> None:
    name, _, value = setting.partition("=")
    monkeypatch.setenv(name, value)
    answer = run("list")
    assert answer.status == 2
    first, second = answer.stderr.splitlines()
    assert first.startswith(f"vfiomgr: error: {name}: {cause}")
    assert second.startswith(f"  remedy: e.g. {example}; ")


def test_a_variable_that_is_no_option_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VFIOMGR_DEADLINE", "VFIOMGR_YES", "VFIOMGR_NODE_SERVICE_HOST", "VFIOMGR_PAGER"):
        monkeypatch.setenv(name, "0")
    (line,) = run("list").stderr.splitlines()[:1]
    assert line.startswith("vfiomgr: warning: ignoring VFIOMGR_DEADLINE: ")
    assert "VFIOMGR_YES" not in run("list").stderr


def test_a_mistake_at_the_top_names_the_program_once(run: Run) -> None:
    first, _ = run("lst").stderr.splitlines()
    assert first == "vfiomgr: error: no such command 'lst'. Did you mean: vfiomgr list?"


def groups_of(context: click.Context) -> Iterator[click.Context]:
    """The context of each group, however deep."""
    if not isinstance(context.command, click.Group):
        return
    yield context
    for name in context.command.list_commands(context):
        found = context.command.get_command(context, name)
        assert found is not None
        yield from groups_of(click.Context(found, info_name=name, parent=context))


def test_no_short_help_is_cut_on_a_narrow_terminal() -> None:
    listings = 0
    settings = {**cli.context_settings, "terminal_width": 80}
    for context in groups_of(click.Context(cli, info_name="vfiomgr", **settings)):
        _, _, listing = context.command.get_help(context).partition("Commands:\n")
        lines = listing.splitlines()
        listings += len(lines)
        assert [line for line in lines if line.endswith("...")] == []
    assert listings > 60


def test_a_group_without_a_command_shows_its_help(run: Run) -> None:
    answer = run("vgpu")
    assert answer.status == 2
    assert answer.stderr.startswith("Usage: vfiomgr vgpu [OPTIONS] COMMAND")


def commands(context: click.Context) -> Iterator[click.Context]:
    """The context of each command, however deep."""
    if not isinstance(context.command, click.Group):
        yield context
        return
    for name in context.command.list_commands(context):
        found = context.command.get_command(context, name)
        assert found is not None
        yield from commands(click.Context(found, info_name=name, parent=context))


def test_every_option_of_every_command_has_an_example_with_a_value() -> None:
    options = 0
    for context in commands(click.Context(cli, info_name="vfiomgr", **cli.context_settings)):
        for option in context.command.params:
            if not isinstance(option, click.Option) or option.is_flag or option.hidden:
                continue
            if option.count:
                continue
            options += 1
            name = max(option.opts, key=len)
            mistake = click.BadParameter("no", ctx=context, param=option)
            _, _, example = explained(mistake, cli, ()).hint.partition(f"{name} ")
            value = example.split(";")[0].split()[0]
            option.type.convert(value, option, context)
            assert value not in (option.metavar, "None", "Sentinel.UNSET"), name
    assert options > 40


def test_help_or_page_on_domains_shows_each_option_of_its_own_in_use() -> None:
    page = (Path(__file__).parents[3] / "docs/libvirt.md").read_text()
    everywhere = {"help", *(option.name for option in click.Command("x", params=_shared()).params)}
    shown = 0
    for context in commands(click.Context(cli, info_name="vfiomgr", **cli.context_settings)):
        if " libvirt " not in context.command_path:
            continue
        _, _, examples = (context.command.help or "").partition("Examples:")
        for option in context.command.params:
            if isinstance(option, click.Option) and option.name not in everywhere:
                shown += 1
                assert max(option.opts, key=len) in examples + page, context.command_path
    assert shown > 60


def _shared() -> list[click.Parameter]:
    """The options that every command has."""
    command = click.command()(session_options()(lambda: None))
    return list(command.params)


def test_an_option_that_is_missing_is_named_with_what_it_takes() -> None:
    option = click.Option(["--into"], required=True, metavar="DIR", default="/srv")
    command = click.Command("copy", params=[option], help="Copy.\n\nExamples:\n  copy --into /x")
    context = click.Context(command, info_name="copy")
    told = explained(click.MissingParameter(ctx=context, param=option), cli, ())
    assert told.message == "missing option: --into DIR"
    assert told.hint == "e.g. copy --into /x; see copy --help"


CONTRADICTIONS = [
    ("bind 01:00.0 --function-only --with-group", "--function-only and --with-group contradict"),
    ("unbind 01:00.0 --function-only --with-group", "--function-only and --with-group contradict"),
    ("bind 01:00.0 --update-initramfs", "--update-initramfs does nothing without --persist"),
    ("unbind 01:00.0 --update-initramfs", "--update-initramfs does nothing without --forget"),
    ("bind 01:00.0 --driverctl", "--driverctl does nothing without --persist"),
    ("unbind 01:00.0 --all", "--all does nothing without --forget-only"),
    ("recover --undo --finish", "--undo and --finish contradict"),
    ("recover --finish --allow in-use", "--finish and --allow contradict"),
]


@pytest.mark.parametrize(("line", "words"), CONTRADICTIONS)
@pytest.mark.parametrize("dry", [True, False])
def test_options_that_contradict_each_other_are_refused(
    run: Run, line: str, words: str, *, dry: bool
) -> None:
    answer = run(*line.split(), *(["--dry-run"] if dry else []))
    assert (answer.status, answer.stdout) == (2, "")
    first, second = answer.stderr.splitlines()
    assert words in first
    assert second.startswith("  remedy: pass ")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("list --persistent --all", "--persistent takes no other option"),
        ("list --persistent --columns name", "--persistent takes no other option"),
        ("list --persistent 01:00.0", "--persistent takes no other option"),
        ("groups --columns state", "no such column: 'state'"),
        ("unbind 01:00.0 --forget-only --forget", "--forget-only only removes rules"),
        ("unbind --forget-only", "expected addresses, or --all"),
        ("bind 01:00.0 --persist --driverctl", "it takes no ADDRESS"),
        ("vgpu list --types --defined", "--defined and --types contradict each other"),
        ("vgpu list --types --libvirt", "--libvirt and --types contradict each other"),
        ("vgpu list --parent 01:00.0", "--parent does nothing without --types"),
        ("vgpu instances --none", "missing argument: GPU"),
        ("vgpu instances 01:00.0 1g.5gb=1 --none", "--none and PROFILE=COUNT contradict"),
        ("libvirt hook install --connect test:///", "--connect does nothing without DOMAIN"),
        ("libvirt edit x.xml --define --add 01:00.0", "--define takes no --add"),
        ("check layout", "missing argument: FILE"),
        ("check layout --schema x.yaml", "--schema and FILE contradict each other"),
        ("kata pod --any-node", "--any-node does nothing without --runtimeclass"),
        ("kata pod --runtimeclass 01:00.0", "--runtimeclass and ADDRESS contradict each other"),
        ("oci edit bundle", "expected one of --add, --remove and --remove-all"),
        ("oci edit bundle --remove-all --node cdev", "apply only to --add"),
        ("runtime install --path /a", "missing argument: NAME"),
        ("runtime install crun", "missing option: --path FILE"),
        ("runtime install a --path /a --config /b", "--config does nothing without --kata"),
        ("runtime uninstall", "missing argument: NAME"),
    ],
)
def test_options_of_another_purpose_are_refused(run: Run, line: str, words: str) -> None:
    answer = run(*line.split())
    assert (answer.status, answer.stdout) == (2, "")
    first, second = answer.stderr.splitlines()
    assert words in first
    assert second.startswith("  remedy: ")


def test_an_example_of_several_lines_is_suggested_in_one(run: Run) -> None:
    answer = run("libvirt", "domain", "x", "--os", "dos")
    assert "e.g. vfiomgr libvirt domain w11 --os windows" in answer.stderr
    assert "--device 04:00.0; see vfiomgr libvirt domain --help" in answer.stderr
    for context in commands(click.Context(cli, info_name="vfiomgr", **cli.context_settings)):
        for option in context.command.params:
            mistake = click.BadParameter("no", ctx=context, param=option)
            assert "\\" not in explained(mistake, cli, ()).hint, context.command_path
