"""packaging/Containerfile: its instructions, and what it takes from the checkout."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

from vfiomgr import __version__
from vfiomgr.node.manifests import IMAGE

CHECKOUT = Path(__file__).parents[3]
FILE = CHECKOUT / "packaging/Containerfile"
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
INSTRUCTIONS = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "ENTRYPOINT", "CMD"}
_EXTRA = re.compile(r"'\.\[(\w+)\]'")


def instructions() -> list[tuple[str, str]]:
    """Each instruction with its arguments; continued lines are one, comments are left out."""
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    found = [line.partition(" ") for line in text.splitlines() if line.strip()]
    return [(name, " ".join(rest.split())) for name, _, rest in found]


def stages() -> list[list[tuple[str, str]]]:
    """The instructions of each stage, from its FROM on."""
    found: list[list[tuple[str, str]]] = []
    for name, rest in instructions():
        if name == "FROM":
            found.append([])
        if found:
            found[-1].append((name, rest))
    return found


def test_it_has_two_stages_of_known_instructions() -> None:
    assert {name for name, _ in instructions()} <= INSTRUCTIONS
    build, run = stages()
    assert (build[0], run[0]) == (("FROM", "${PYTHON} AS build"), ("FROM", "${PYTHON}"))
    assert instructions()[0] == ("ARG", "PYTHON=docker.io/library/python:3.13-slim")
    for _, command in (each for each in instructions() if each[0] == "RUN"):
        assert shlex.split(command)


def test_the_extra_that_it_installs_exists() -> None:
    (command,) = (rest for name, rest in stages()[0] if name == "RUN")
    assert _EXTRA.findall(command) == ["node"]
    assert "node" in PROJECT["project"]["optional-dependencies"]
    assert "libvirt" not in FILE.read_text().split("FROM")[1]


def test_it_copies_all_that_the_wheel_is_made_of() -> None:
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    project = PROJECT["project"]
    needed = {"pyproject.toml", project["readme"], *project["license-files"]}
    needed |= {*wheel["force-include"], *(each.split("/")[0] for each in wheel["packages"])}
    copied = [rest.split() for name, rest in stages()[0] if name == "COPY"]
    assert {source for words in copied for source in words[:-1]} == needed
    assert all((CHECKOUT / name).exists() for name in needed)


def test_it_runs_the_agent() -> None:
    run = dict(stages()[1])
    assert json.loads(run["ENTRYPOINT"])[1:] == ["-I", "-m", "vfiomgr"]
    assert json.loads(run["CMD"]) == ["node", "run"]
    assert f"--tag {IMAGE} ." in FILE.read_text()
    assert __version__ in IMAGE
