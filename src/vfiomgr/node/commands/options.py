"""The options that name the resources of a node, for the agent and for its manifests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vfiomgr.errors import UsageError
from vfiomgr.node.model import CONSUMERS, DEFAULT_PREFIX, NodeSettings
from vfiomgr.node.names import name_resources

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfiomgr.node.model import Consumer

_DEFAULTS = NodeSettings()
_OPTIONS = (
    click.option(
        "--consumer",
        type=click.Choice(CONSUMERS),
        default=_DEFAULTS.consumer,
        help="Who receives the devices: `default` serves Kata and plain containers.",
    ),
    click.option(
        "--alias",
        "aliases",
        metavar="DEVICES=NAME",
        multiple=True,
        help="Name of the resource for a PCI ID, a vGPU type or a default name.",
    ),
    click.option(
        "--resource-prefix",
        "prefix",
        metavar="DOMAIN",
        default=DEFAULT_PREFIX,
        help=f"Domain of the resource names.  [default: {DEFAULT_PREFIX}]",
    ),
)


def resource_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of resource names; --help lists the last one first."""
    for option in _OPTIONS:
        function = option(function)
    return function


def node_settings(
    prefix: str, consumer: Consumer, aliases: tuple[str, ...], *, resets: bool = False
) -> NodeSettings:
    """The settings of a user.

    Raises:
        UsageError: the prefix or an alias is invalid.

    """
    settings = NodeSettings(prefix, consumer, _named(aliases), resets)
    name_resources((), settings)
    return settings


def arguments_of(settings: NodeSettings) -> tuple[str, ...]:
    """The arguments with which `vfiomgr node run` names resources like these settings."""
    words: list[str] = []
    if settings.prefix != _DEFAULTS.prefix:
        words += ["--resource-prefix", settings.prefix]
    for devices, name in settings.aliases.items():
        words += ["--alias", f"{devices}={name}"]
    if settings.consumer != _DEFAULTS.consumer:
        words += ["--consumer", settings.consumer]
    return tuple(words)


def _named(aliases: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for alias in aliases:
        devices, equals, name = alias.partition("=")
        if not (devices and equals and name and alias.isprintable()):
            message = f"not an alias: {alias!r}"
            raise UsageError(message, "use DEVICES=NAME, e.g. 10de:2235=a40")
        found[devices] = name
    return found
