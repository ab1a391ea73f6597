"""Usage errors: what was typed, what is expected, and an example."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Iterator, Sequence

import click

from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression

_OF_OPTIONS = (click.BadParameter, click.BadOptionUsage, click.NoSuchOption)
_NEGATIVE_NUMBER = expression(r"-\d+")
_WIDE_GAP = expression(r"\s{2,}")
"""The gap between an example and its explanation."""
_CONTINUED = expression(r"\s*\\\n\s*")
_COMMAND = expression(r"No such command '([^']*)'")
_FUNCTION = expression(r"(?:[\da-fA-F]{4,8}:)?[\da-fA-F]{2}:[\da-fA-F]{2}\.[0-7]")
_TYPED = expression(r"'([^']*)' is not ")
"""A value that is not one of some choices."""
_ALIKE = 0.7
"""How alike a mistyped choice is at least, from 0 to 1."""
_WORDS = {
    "add": ("create", "define", "edit", "install", "attach", "generate", "bind"),
    "attach": ("bind",),
    "clean": ("remove", "recover"),
    "create": ("set", "domain", "generate", "install", "pod"),
    "delete": ("remove", "undefine", "unbind", "uninstall", "edit", "set"),
    "detach": ("unbind",),
    "devices": ("list",),
    "diff": ("plan",),
    "disable": ("uninstall", "stop", "hook uninstall"),
    "doctor": ("check",),
    "draw": ("topology",),
    "dump": ("snapshot", "export", "rom dump"),
    "enable": ("install", "start", "hook install"),
    "gpus": ("list",),
    "group": ("groups",),
    "info": ("show", "list"),
    "ls": ("list",),
    "lspci": ("list --all",),
    "lstopo": ("topology",),
    "mdev": ("vgpu",),
    "mig": ("vgpu instances", "instances"),
    "new": ("create", "define", "generate"),
    "preflight": ("check domain",),
    "release": ("unbind",),
    "rescan": ("list",),
    "restore": ("unbind", "recover"),
    "remove": ("unbind", "uninstall", "detach", "edit", "set"),
    "rm": ("remove", "undefine", "unbind", "uninstall", "edit", "set"),
    "rollback": ("recover",),
    "status": ("list", "show", "assert"),
    "tree": ("topology",),
    "type": ("list --types",),
    "undo": ("unbind", "revert"),
    "validate": ("check layout",),
    "vbios": ("rom",),
    "verify": ("check",),
    "version": ("--version",),
    "vf": ("sriov",),
    "vfs": ("sriov",),
    "vm": ("libvirt", "qemu"),
}
"""Other words for commands, with their candidates; the first that the group has is suggested."""
_SAMPLES = {
    "--format": "json",
    "--root": "/srv/recorded-host",
    "--snapshot": "host.json",
    "--timeout": "120",
    "--driver": "vfio-pci",
    "--group": "10",
    "--class": "gpu",
    "--vendor": "nvidia",
    "--state": "vfio",
    "--numa": "0",
    "--columns": "address,name",
    "--kernel": "/boot/vmlinuz",
    "--initrd": "/boot/initrd",
    "--kernel-arguments": "console=ttyS0",
    "--hard-limit": "12G",
    "--address-bits": "42",
    "--pasid-bits": "16",
    "--spare-ports": "8",
    "--libvirt-version": "10.0",
    "--qemu-version": "9.2",
    "--runtime-config": "/etc/containerd/config.toml",
    "--containerd-version": "2.1",
    "--layout": "gpu-node",
    "--match": "A40",
    "--plugin-directory": "/var/lib/kubelet/device-plugins",
    "--kubelet-root": "/var/lib/kubelet",
    "--alias": "10de:2235=a40",
    "--credentials": "/var/run/secrets/kubernetes.io/serviceaccount",
    "--pod-resources": "/var/lib/k0s/kubelet/pod-resources/kubelet.sock",
}
"""Sample values for options that have none in an example or in the option itself."""


def explained(error: click.UsageError, root: click.Group, arguments: Sequence[str]) -> UsageError:
    """The usage error that click found, with a remedy.

    If click does not know the command, `root` and `arguments` identify it.
    """
    context = error.ctx or _context(root, arguments)
    return UsageError(_cause(error, context), _remedy(error, context))


def _cause(error: click.UsageError, context: click.Context) -> str:
    command = context.command_path
    match error:
        case click.MissingParameter():
            return f"missing {_kind(error.param)}: {_name(error.param)}"
        case click.BadParameter():
            return f"{_source(context, error.param)}: {_what_is_wrong(error)}"
        case click.NoSuchOption() if _NEGATIVE_NUMBER.fullmatch(error.option_name):
            return f"no such option: {error.option_name} ({command} takes no negative numbers)"
        case click.NoSuchOption():
            meant = " or ".join(error.possibilities or ())
            guess = f" Did you mean {meant}?" if meant else ""
            return f"no such option: {error.option_name}.{guess}".removesuffix(".")
    text = error.message
    where = f"{command}: " if context.parent else ""
    return f"{where}{text[:1].lower()}{text[1:].rstrip('.')}{_meant(error, context)}"


def _meant(error: click.UsageError, context: click.Context) -> str:
    """The command that was probably meant: a synonym, or a similar name."""
    import difflib  # noqa: PLC0415 - slow, and few need it

    typed = _COMMAND.search(error.message)
    if typed is None or not isinstance(context.command, click.Group):
        return ""
    names = context.command.list_commands(context)
    other = _WORDS.get(typed[1], ())
    known = [word for word in other if word.split()[0] in names or word.startswith("-")]
    near = known[:1] or difflib.get_close_matches(typed[1], names, n=1)
    return f". Did you mean: {context.command_path} {near[0]}?" if near else ""


def _kind(parameter: click.Parameter | None) -> str:
    return "option" if isinstance(parameter, click.Option) else "argument"


def _name(parameter: click.Parameter | None) -> str:
    """`--type TYPE`, `ADDRESS`."""
    if parameter is None:
        return "another argument"
    if isinstance(parameter, click.Option):
        return f"{_longest(parameter)} {parameter.metavar or ''}".rstrip()
    name = (parameter.metavar or parameter.human_readable_name).removesuffix("...")
    return name[1:-1] if name.startswith("[") and name.endswith("]") else name


def _longest(parameter: click.Parameter) -> str:
    return max(parameter.opts, key=len)


def _is_from_environment(context: click.Context, parameter: click.Parameter) -> bool:
    source = context.get_parameter_source(str(parameter.name))
    return source is click.core.ParameterSource.ENVIRONMENT


def _variable(parameter: click.Parameter) -> str:
    """The environment variable that contains its value; the current name comes first."""
    names = (
        [parameter.envvar] if isinstance(parameter.envvar, str) else list(parameter.envvar or ())
    )
    return next((name for name in names if name in os.environ), "".join(names[:1]))


def _source(context: click.Context, parameter: click.Parameter | None) -> str:
    """The option, argument or environment variable that the value came from."""
    if parameter is None:
        return context.command_path
    if _is_from_environment(context, parameter):
        return _variable(parameter)
    return _longest(parameter) if isinstance(parameter, click.Option) else _name(parameter)


def _what_is_wrong(error: click.BadParameter) -> str:
    """The type's own message; a flag gets a value only from the environment."""
    if isinstance(error.param, click.Option) and error.param.is_flag:
        return f"{os.environ.get(_variable(error.param), '')!r} is not 1 or 0"
    return error.message.rstrip(".")


def _remedy(error: click.UsageError, context: click.Context) -> str:
    help_option = f"see {context.command_path} --help"
    if _meant(error, context):
        return help_option
    if near := _near_choice(error):
        return f"did you mean {near}? {help_option}"
    typed = _COMMAND.search(error.message)
    if typed is not None and context.info_name == "check" and "." in typed[1]:
        return _checking(shlex.quote(typed[1]), context.command_path)
    is_unlike = isinstance(error, click.NoSuchOption) and not error.possibilities
    if is_unlike and context.info_name == "explain":
        return f"put -- before a message: {context.command_path} -- MESSAGE; {help_option}"
    if isinstance(context.command, click.Group) and not isinstance(error, _OF_OPTIONS):
        names = ", ".join(context.command.list_commands(context))
        is_optional = context.command.invoke_without_command
        alone = f" (or none: {context.command_path})" if is_optional else ""
        return f"commands: {names}{alone}; {help_option}"
    example = _example(context, _parameter(error, context))
    return f"e.g. {example}; {help_option}" if example else help_option


def _checking(typed: str, command: str) -> str:
    """What checks or shows a device or a file that follows `vfiomgr check`."""
    if _FUNCTION.fullmatch(typed):
        return f"show a device with: vfiomgr show {typed}; check this host: {command}"
    if typed.lower().endswith(".xml"):
        return f"check a domain with: {command} domain {typed}"
    return (
        f"check a layout with: {command} layout {typed}; compare it with this host: "
        f"vfiomgr plan {typed}"
    )


def _near_choice(error: click.UsageError) -> str:
    """The choice that was probably meant: one that begins or is spelled like the typed one."""
    import difflib  # noqa: PLC0415 - slow, and few need it

    parameter = error.param if isinstance(error, click.BadParameter) else None
    typed = _TYPED.match(error.message)
    if parameter is None or typed is None or not isinstance(parameter.type, click.Choice):
        return ""
    names = list(map(str, parameter.type.choices))
    word = typed[1].lower()
    near = [name for name in names if name.startswith(word)]
    near = near or difflib.get_close_matches(word, names, n=1, cutoff=_ALIKE)
    option = f"{_longest(parameter)} " if isinstance(parameter, click.Option) else ""
    return f"{option}{near[0]}" if word and near else ""


def _parameter(error: click.UsageError, context: click.Context) -> click.Parameter | None:
    if isinstance(error, click.BadOptionUsage):
        own = context.command.params
        return next((option for option in own if error.option_name in option.opts), None)
    return error.param if isinstance(error, click.BadParameter) else None


def _example(context: click.Context, parameter: click.Parameter | None) -> str:
    """An example from the command's help: with the option if one shows it, or the option itself."""
    examples = list(_examples(context.command))
    if isinstance(parameter, click.Argument):
        examples = [e for e in examples if _has_argument(e, context, parameter)] or examples
    if not isinstance(parameter, click.Option):
        return examples[0] if examples else ""
    name = _longest(parameter)
    if _is_from_environment(context, parameter):
        return f"{_variable(parameter)}={_sample(parameter) or 1}"
    with_it = (text for text in examples if name in text.split())
    return next(with_it, f"{name} {_sample(parameter)}".rstrip())


def _has_argument(example: str, context: click.Context, argument: click.Argument) -> bool:
    """Whether an example has a value for an argument, directly after the command."""
    own = [one for one in context.command.params if isinstance(one, click.Argument)]
    after = example.removeprefix(context.command_path).split()
    given = list(itertools.takewhile(lambda word: not word.startswith("-"), after))
    return len(given) > own.index(argument)


def _examples(command: click.Command) -> Iterator[str]:
    """The commands below `Examples:` in the help, each on one line, without their comments."""
    _, _, text = (command.help or "").partition("Examples:\n")
    for line in _CONTINUED.sub(" ", text).splitlines():
        if not line.strip():
            return
        yield _WIDE_GAP.split(line.strip())[0]


def _sample(option: click.Option) -> str:
    """A sample value for an option; empty for a flag."""
    name = _longest(option)
    if option.is_flag or option.count:
        return ""
    sample = _SAMPLES.get(name)
    if isinstance(option.type, click.Choice):
        choices = [str(choice) for choice in option.type.choices]
        return sample if sample and sample in choices else choices[-1]
    if sample is not None:
        return sample
    if isinstance(option.type, click.IntRange) and not isinstance(option.default, int):
        return str(option.type.min)
    return str(option.default)


def _context(root: click.Group, arguments: Sequence[str]) -> click.Context:
    """The context of the command that the arguments name."""
    context = click.Context(root, info_name="vfiomgr")
    for argument in arguments:
        command = context.command
        found = command.get_command(context, argument) if isinstance(command, click.Group) else None
        if found is not None:
            context = click.Context(found, info_name=argument, parent=context)
    return context
