"""Kills vfiomgr before, during and after every step of a run, then recovers: `make lab-faults`.

And in two runs on the same functions, one after the other, at random steps; and in one run that is
then repeated, before `recover`. In a guest:
`python -m tests.lab.deaths`. A child process plans and applies an intent and is ended with SIGKILL;
the parent then recovers and looks where each function is.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Literal, TypeVar

from tests import api
from tests.lab.topology import EVERY_MOMENT_VARIABLE, current
from vfiomgr.engine.survey import cut_off_runs
from vfiomgr.engine.worker import WorkerPool
from vfiomgr.layout.model import Layout
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.paths import BOOT_ID
from vfiomgr.pci.drivers import read_origins
from vfiomgr.pci.facts import read_driver_state
from vfiomgr.pci.model import PciAddress, pci_device
from vfiomgr.sriov.steps import SetVirtualFunctions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tests.lab.topology import Topology
    from vfiomgr.engine.plan import Request
    from vfiomgr.engine.worker import Result
    from vfiomgr.pci.drivers import DriverState

Moment = Literal["before", "during", "after"]
MOMENTS: tuple[Moment, ...] = ("before", "during", "after")
TREE = api.HostTree("/")
_VIRTUAL_FUNCTIONS = 2
_DOUBLES = 30
"""Double deaths in each guest, for `make lab-faults`."""
_REPETITIONS = 30
"""Deaths in each guest after which the request is repeated, for `make lab-faults`."""


@dataclass(frozen=True)
class Death:
    """One death and what came of it; `problem` is empty where all was well."""

    name: str
    step: int
    moment: Moment
    recovered: int
    problem: str


def deaths(name: str, intent: Request, functions: Sequence[PciAddress]) -> Iterator[Death]:
    """Die at every step of an intent on the host as it is, which is the same afterwards."""
    first = states(functions)
    steps = len(api.plan(api.scan(TREE, with_users=True), intent).steps)
    for step, moment, _ in killings(steps):
        died = dies(intent, step, moment)
        recovered = api.recover(tree=TREE)
        problem = _problem(first, states(functions), intent, died=died)
        yield Death(name, step, moment, len(recovered), problem)


def killings(steps: int) -> Iterator[tuple[int, Moment, bool]]:
    """The steps and moments at which a run is killed, and whether `recover` is to finish it.

    Of every second step, each at another moment, or all with `make lab-faults`. The fake kernel has
    the moments of all operations (tests/unit/engine/faults.py).
    """
    if os.environ.get(EVERY_MOMENT_VARIABLE):
        yield from ((step, at, step % 2 == 1) for step in range(steps) for at in MOMENTS)
        return
    for number, step in enumerate(range(0, steps, 2)):
        yield step, MOMENTS[number % len(MOMENTS)], number % 2 == 1


def states(functions: Sequence[PciAddress]) -> dict[PciAddress, DriverState]:
    """Where the functions are."""
    return {address: read_driver_state(TREE, address) for address in functions}


def _problem(
    first: dict[PciAddress, DriverState],
    now: dict[PciAddress, DriverState],
    intent: Request,
    *,
    died: bool,
) -> str:
    """What is wrong after a recovery; a run that had come to its end is taken back here."""
    if not died:
        return "the run came to its end without dying"
    if now == first:
        return ""
    if api.apply(intent, tree=TREE).is_changed:
        return f"neither as before nor as wanted: {now}"
    assert isinstance(intent, Bind | Unbind)
    opposite = (Unbind if isinstance(intent, Bind) else Bind)(intent.addresses)
    api.apply(opposite, tree=TREE)
    return "" if states(list(first)) == first else "as wanted, but the way back ends elsewhere"


def dies(intent: Request, step: int, moment: Moment) -> bool:
    """Apply in a child that ends with SIGKILL at a step; whether it did."""
    return _dies(intent, lambda _: step, moment)


def _dies(intent: Request, chosen: Callable[[int], int], moment: Moment) -> bool:
    """The same, at the step that is chosen by how many there are."""
    return _killed(lambda: api.apply(intent, tree=TREE), chosen, moment)


def _killed(change: Callable[[], object], chosen: Callable[[int], int], moment: Moment) -> bool:
    child = os.fork()
    if child == 0:
        try:
            _arm(chosen, moment)
            change()
        finally:
            os._exit(0)  # never a second copy of the tests
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def _arm(chosen: Callable[[int], int], moment: Moment) -> None:
    """Make the executor of this process die at a step."""
    start, wait = WorkerPool.start, WorkerPool.wait_a_moment

    def step_of(crew: WorkerPool) -> int:
        return chosen(len(crew._tasks) // 2)

    def deadly_start(crew: WorkerPool, task: int, deadline: float | None = None) -> None:
        step = step_of(crew)
        if task == step and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        start(crew, task, deadline)
        if task == step and moment == "during":
            os.kill(os.getpid(), signal.SIGKILL)

    def deadly_wait(crew: WorkerPool) -> Result | None:
        result = wait(crew)
        if result is not None and result.task == step_of(crew) and moment == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    WorkerPool.start, WorkerPool.wait_a_moment = deadly_start, deadly_wait  # type: ignore[method-assign, assignment]


# ---- two runs that die one after the other


@dataclass(frozen=True)
class Double:
    """Two deaths and what came of them; `problem` is empty where all was well."""

    first: str
    second: str
    is_clock_set_back: bool
    recovered: int
    problem: str


def doubles(
    random: Random, pairs: Sequence[Sequence[Request]], names: Sequence[PciAddress], count: int
) -> Iterator[Double]:
    """Random deaths of two runs, `count` times; the clock is set back in half of them.

    A second run that finds nothing to do does not die, and does not count.
    """
    before = picture(names)
    done = 0
    while done < count:
        earlier, later = pairs[done % len(pairs)]
        set_back = (done + done // len(pairs)) % 2 == 0  # of each pair in turn
        first = _dies_somewhere(random, earlier)
        with clock_set_back() if set_back else nullcontext():
            second = _dies_somewhere(random, later)
            recovered = len(api.recover(tree=TREE))
        now = picture(names)
        if second is None:
            _lead_back(before, names)
            continue
        done += 1
        problem = "" if now == before else f"{now}, and not {before}"
        yield Double(f"{earlier.kind} {first}", second, set_back, recovered, problem)


def _dies_somewhere(random: Random, intent: Request) -> str | None:
    """Die at a random step; where, or None where nothing was to be done."""
    share, moment = random.random(), random.choice(MOMENTS)
    died = _dies(intent, lambda steps: int(share * steps), moment)
    return f"{moment} {share:.0%} of {intent.kind}" if died else None


def picture(names: Sequence[PciAddress]) -> dict[str, object]:
    """What two runs must not change: functions, virtual functions, and what vfiomgr keeps."""
    found: dict[str, object] = {str(o.device.address): o.state for o in read_origins(TREE)}
    for address in names:
        directory = pci_device(address)
        if TREE.exists(directory):
            found[f"driver of {address}"] = read_driver_state(TREE, address)
        for name in ("sriov_numvfs", "sriov_drivers_autoprobe"):
            found[f"{name} of {address}"] = TREE.read(directory / name)
    left = cut_off_runs(TREE, TREE.read(BOOT_ID))
    return found | {"left": [run.name for run in left]}


def _lead_back(before: dict[str, object], names: Sequence[PciAddress]) -> None:
    """To the state of before, where a run came to its end."""
    for address in names:
        if f"driver of {address}" in before and picture(names) != before:
            wanted = before[f"driver of {address}"]
            is_taken = getattr(wanted, "driver", None) == "vfio-pci"
            api.apply((Bind if is_taken else Unbind)((address,)), tree=TREE)
    assert picture(names) == before


# ---- a run that dies and is repeated


@dataclass(frozen=True)
class Repetition:
    """One death, and what came of the same request and a recovery; else empty."""

    death: str
    problem: str


_Dead = TypeVar("_Dead", Double, Repetition)


def repetitions(
    random: Random, wishes: Sequence[Wish], names: Sequence[PciAddress], count: int
) -> Iterator[Repetition]:
    """Random deaths of requests, `count` times, each repeated and then recovered from."""
    before = picture(names)
    done: dict[int, dict[str, object]] = {}
    for number in range(count):
        turn = number % len(wishes)
        wanted, back = wishes[turn]
        if turn not in done:
            wanted()
            done[turn] = picture(names)
            back()
        death = _killed_somewhere(random, wanted)
        wanted()
        repeated = picture(names)
        recovered = len(api.recover(tree=TREE))
        now = picture(names)
        problem = "" if repeated == now == done[turn] else f"{repeated}, then {now}"
        problem += f"; recovered {recovered}" if recovered else ""
        back()
        problem += "" if picture(names) == before else f"; the way back ends at {picture(names)}"
        yield Repetition(death or "at its end", problem)


Wish = tuple["Callable[[], object]", "Callable[[], object]"]
"""A change, and the way back."""


def _killed_somewhere(random: Random, change: Callable[[], object]) -> str:
    share, moment = random.random(), random.choice(MOMENTS)
    died = _killed(change, lambda steps: int(share * steps), moment)
    return f"{moment} {share:.0%}" if died else ""


def repetitions_of_topology(
    random: Random, addresses: Mapping[str, str], count: int
) -> Iterator[Repetition]:
    """Requests for what a guest has: a GPU with its audio, or virtual functions and a layout."""
    places = {name: PciAddress.parse(text) for name, text in addresses.items()}

    def applied(request: Request) -> Callable[[], object]:
        return lambda: api.apply(request, tree=TREE)

    if "nvme" not in places:
        functions = (places["gpu"], places["gpu_audio"])
        _there_and_back(functions)
        bind, unbind = (applied(one(functions[:1])) for one in (Bind, Unbind))
        yield from repetitions(random, [(bind, unbind)], functions, count)
        return
    nvme = places["nvme"]
    with virtual_function(nvme) as virtual:
        names = (nvme, *virtual)
    some, none = (SetVirtualFunctions(nvme, count) for count in (_VIRTUAL_FUNCTIONS, 0))
    rule = {
        "select": {"address": str(nvme)},
        "state": "sriov",
        "count": _VIRTUAL_FUNCTIONS,
        "functions": "passthrough",
    }
    layout = api.layout_request(TREE, "lab", Layout.model_validate({"devices": [rule]}))
    wishes: list[Wish] = [
        (applied(some), applied(none)),
        (applied(layout), lambda: api.revert(tree=TREE)),
    ]
    yield from repetitions(random, wishes, names, count)


@contextmanager
def clock_set_back(seconds: float = 86400.0) -> Iterator[None]:
    """The wall clock of this machine, which is the laboratory's own, shows an earlier time."""
    ahead = time.time() - time.monotonic()
    time.clock_settime(time.CLOCK_REALTIME, time.time() - seconds)
    try:
        yield
    finally:
        time.clock_settime(time.CLOCK_REALTIME, time.monotonic() + ahead)


def doubles_of_topology(
    random: Random, addresses: Mapping[str, str], count: int
) -> Iterator[Double]:
    """Double deaths of what a guest has: a GPU with its audio, or virtual functions."""
    places = {name: PciAddress.parse(text) for name, text in addresses.items()}
    most, rest = count - count // 2, count // 2
    if "nvme" in places:
        yield from _of_virtual_functions(random, places["nvme"], most)
        pairs = [(1, 2), (2, 0)]
        wanted = [tuple(SetVirtualFunctions(places["nvme"], n) for n in pair) for pair in pairs]
        yield from doubles(random, wanted, (places["nvme"],), rest)
        return
    functions = (places["gpu"], places["gpu_audio"])
    bind, unbind = Bind(functions[:1]), Unbind(functions[:1])
    _there_and_back(functions)
    yield from doubles(random, [(bind, bind), (bind, unbind)], functions, most)
    api.apply(bind, tree=TREE)
    try:
        yield from doubles(random, [(unbind, bind), (unbind, unbind)], functions, rest)
    finally:
        api.apply(unbind, tree=TREE)


def _of_virtual_functions(random: Random, physical: PciAddress, count: int) -> Iterator[Double]:
    with virtual_function(physical) as functions:
        bind, unbind = Bind(functions[:1]), Unbind(functions[:1])
        yield from doubles(random, [(bind, bind), (bind, unbind)], functions, count)


def without_problem(
    deaths_of: Callable[[Random, Mapping[str, str], int], Iterator[_Dead]],
    topology: Topology,
    count: int,
) -> list[_Dead]:
    """Random deaths in a guest, none of which left anything; the seed is in the error."""
    seed = SystemRandom().getrandbits(32)
    found = list(deaths_of(Random(seed), topology.addresses, count))  # noqa: S311 - no secret
    assert [one for one in found if one.problem] == [], f"seed {seed}"
    assert len(found) == count
    return found


def binding(what: str, functions: Sequence[PciAddress]) -> Iterator[Death]:
    """All deaths of bind; the first function is named, the others come along."""
    _there_and_back(functions)
    yield from deaths(f"bind {what}", Bind(tuple(functions[:1])), functions)


def unbinding(what: str, functions: Sequence[PciAddress]) -> Iterator[Death]:
    """All deaths of unbind."""
    api.apply(Bind(tuple(functions[:1])), tree=TREE)
    yield from deaths(f"unbind {what}", Unbind(tuple(functions[:1])), functions)
    api.apply(Unbind(tuple(functions[:1])), tree=TREE)


def _there_and_back(functions: Sequence[PciAddress]) -> None:
    """Load vfio-pci, which stays: a plan has as many steps from now on."""
    api.apply(Bind(tuple(functions[:1])), tree=TREE)
    api.apply(Unbind(tuple(functions[:1])), tree=TREE)


@contextmanager
def virtual_function(physical: PciAddress) -> Iterator[tuple[PciAddress, ...]]:
    """A virtual function, made for its deaths."""
    TREE.write(pci_device(physical) / "sriov_drivers_autoprobe", "0")
    TREE.write(pci_device(physical) / "sriov_numvfs", str(_VIRTUAL_FUNCTIONS))
    TREE.write(pci_device(physical) / "sriov_drivers_autoprobe", "1")
    try:
        yield api.scan(TREE).device(physical).virtual_functions[1:]
    finally:
        TREE.write(pci_device(physical) / "sriov_numvfs", "0")


def _of_topology(addresses: Mapping[str, str]) -> Iterator[Death]:
    places = {name: PciAddress.parse(text) for name, text in addresses.items()}
    if "nvme" not in places:
        functions: tuple[PciAddress, ...] = (places["gpu"], places["gpu_audio"])
        yield from binding("GPU", functions)
        yield from unbinding("GPU", functions)
        return
    with virtual_function(places["nvme"]) as virtual:
        yield from binding("VF", virtual)
        yield from unbinding("VF", virtual)


def main() -> int:
    """Die, recover and count, by the topology of this guest."""
    topology = current()
    if topology is None:
        print("this is run in a guest: make lab-faults", file=sys.stderr)
        return 2
    os.environ[EVERY_MOMENT_VARIABLE] = "1"
    counted = problems = 0
    for death in _of_topology(topology.addresses):
        counted += 1
        problems += bool(death.problem)
        end = death.problem or ("recovered" if death.recovered else "had come to its end")
        print(f"{death.name}: killed {death.moment} step {death.step}: {end}", flush=True)
    print(f"{topology.name}: {counted} deaths, {problems} functions left stranded", flush=True)
    problems += _tell_doubles(topology) + _tell_repetitions(topology)
    return 1 if problems or not counted else 0


def _tell_doubles(topology: Topology) -> int:
    """Die twice, recover and count; how often something was left."""
    seed = SystemRandom().getrandbits(32)
    problems = 0
    for death in doubles_of_topology(Random(seed), topology.addresses, _DOUBLES):  # noqa: S311
        problems += bool(death.problem)
        back = ", clock set back" if death.is_clock_set_back else ""
        end = death.problem or f"recovered {death.recovered}"
        print(f"killed {death.first}, then {death.second}{back}: {end}", flush=True)
    print(
        f"{topology.name}: {_DOUBLES} double deaths, {problems} problems, seed {seed}", flush=True
    )
    return problems


def _tell_repetitions(topology: Topology) -> int:
    """Die, repeat, recover and count; how often the wanted state did not stay."""
    seed = SystemRandom().getrandbits(32)
    problems = 0
    for found in repetitions_of_topology(Random(seed), topology.addresses, _REPETITIONS):  # noqa: S311
        problems += bool(found.problem)
        print(f"killed {found.death}, repeated: {found.problem or 'as wanted'}", flush=True)
    print(f"{topology.name}: {_REPETITIONS} repeated, {problems} problems, seed {seed}", flush=True)
    return problems


if __name__ == "__main__":
    sys.exit(main())
