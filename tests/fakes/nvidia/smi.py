"""nvidia-smi, as far as vGPUs go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fakes.nvidia import smi_text as text
from tests.fakes.nvidia.modes import INVALID_ARGUMENT, GpuModes, NvmlError
from tests.fakes.nvidia.smi_mig import SmiMig
from tests.fakes.programs import HANGS, Said
from vfiomgr.errors import UsageError
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.fakes.nvidia.gpus import Gpu, NvidiaGpus

_CHANGING = {"-shm", "-mig", "-pm", "-cgi", "-cci", "-dgi", "-dci"}
_WITH_VALUE = {"-i", "-shm", "-mig", "-pm", "-cgi", "-gi"}
_NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that "
    "the latest NVIDIA driver is installed and running.\n"
)


def _options(words: Sequence[str]) -> dict[str, str]:
    """Options with their values; `--query-gpu=…` and `--format=…` too."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in _WITH_VALUE and rest:
            found[word] = rest.pop(0)
        elif word.startswith("--"):
            name, _, value = word.partition("=")
            found[name] = value
        else:
            found[word] = ""
    return found


class NvidiaSmi:
    """It ends with the numbers of NVML: 2 usage, 3 not supported, 6 not found, 9 no driver, 19."""

    def __init__(
        self, gpus: NvidiaGpus, is_loaded: Callable[[], bool], is_stuck: Callable[[], bool]
    ) -> None:
        self._gpus = gpus
        self._modes = GpuModes(gpus)
        self._mig = SmiMig(self._modes, self._index)
        self._is_loaded = is_loaded
        self._is_stuck = is_stuck

    def changes(self, arguments: Sequence[str]) -> bool:
        """Whether one of the options sets something."""
        return bool(_CHANGING & set(arguments))

    def run(self, arguments: Sequence[str]) -> Said:
        """Answer as the driver does; a GPU that is stuck in the kernel makes it wait for ever."""
        if self._is_stuck():
            return HANGS
        if not self._is_loaded():
            return Said(9, _NO_DRIVER)
        area = arguments[0] if arguments and arguments[0] in ("vgpu", "mig") else ""
        options = _options(arguments[1:] if area else arguments)
        gpus = self._meant(options.get("-i") or options.get("--id"))
        if not gpus:
            return Said(6, "No devices were found\n")
        act = {"": self._device, "vgpu": self._vgpu, "mig": self._mig.run}[area]
        return act(gpus, options)

    def _meant(self, wanted: str | None) -> list[Gpu]:
        """By index, UUID or address; all where none is wanted."""
        visible = self._gpus.visible()
        if wanted is None:
            return visible
        if wanted.isdecimal():
            return visible[int(wanted) :][:1]
        try:
            address = str(PciAddress.parse(wanted))
        except UsageError:
            address = ""
        return [gpu for gpu in visible if wanted == gpu.uuid or address == gpu.address]

    def _log_of(self, gpu: Gpu) -> Iterator[str]:
        is_persistent = self._gpus.is_persistent(gpu)
        return text.log_of(gpu, self._modes.modes(gpu), is_persistent=is_persistent)

    def _index(self, gpu: Gpu) -> int:
        return self._gpus.visible().index(gpu)

    def _device(self, gpus: list[Gpu], options: dict[str, str]) -> Said:
        if "--query-gpu" in options:
            return self._query(gpus, options)
        if "-mig" in options:
            return self._set_mig(gpus, options["-mig"])
        if "-pm" in options:
            return self._set_persistence(gpus, options["-pm"])
        if "-q" in options:
            rows = [row for gpu in gpus for row in self._log_of(gpu)]
            return Said(0, text.lines([*text.log_head(len(gpus)), *rows]))
        rows = [f"GPU {self._index(g)}: {g.card.name} (UUID: {g.uuid})" for g in gpus]
        return Said(0, text.lines(rows))

    # ---- --query-gpu

    def _query(self, gpus: list[Gpu], options: dict[str, str]) -> Said:
        fields = [name.strip() for name in options["--query-gpu"].split(",")]
        known = [self._fields(gpu) for gpu in gpus]
        for name in fields:
            if name not in known[0]:
                return Said(2, f'Field "{name}" is not a valid field to query.\n')
        form = options.get("--format", "").split(",")
        if "csv" not in form:
            return Said(2, '"--format=" switch is missing.\n')
        with_units = "nounits" not in form
        rows = [self._row([values[name] for name in fields], with_units) for values in known]
        head = [self._head(name, known[0][name], with_units) for name in fields]
        return Said(0, text.lines(rows if "noheader" in form else [", ".join(head), *rows]))

    @staticmethod
    def _row(values: list[tuple[str, str]], with_units: bool) -> str:  # noqa: FBT001
        return ", ".join(f"{v} {unit}" if unit and with_units else v for v, unit in values)

    @staticmethod
    def _head(name: str, value: tuple[str, str], with_units: bool) -> str:  # noqa: FBT001
        return f"{name} [{value[1]}]" if value[1] and with_units else name

    def _fields(self, gpu: Gpu) -> dict[str, tuple[str, str]]:
        modes = self._modes.modes(gpu)
        mig = text.mig_mode(gpu, modes)
        mig = mig if mig in ("Enabled", "Disabled") else "[N/A]"
        values = {
            "index": str(self._index(gpu)),
            "name": gpu.card.name,
            "gpu_name": gpu.card.name,
            "uuid": gpu.uuid,
            "gpu_uuid": gpu.uuid,
            "pci.bus_id": text.bus_id(gpu),
            "gpu_bus_id": text.bus_id(gpu),
            "driver_version": text.VERSION,
            "persistence_mode": text.enabled(self._gpus.is_persistent(gpu)),
            "mig.mode.current": mig,
            "mig.mode.pending": mig,
            "vgpu_driver_capability.heterogenous_multivGPU": text.supported(value=True),
            "vgpu_device_capability.heterogeneous_timeSlice_sizes": text.supported(
                gpu.card.mixes_sizes
            ),
        }
        units = {"memory.total": (str(gpu.card.memory), "MiB")}
        return {name: (value, "") for name, value in values.items()} | units

    # ---- modes, and what follows from them

    def _set_mig(self, gpus: list[Gpu], value: str) -> Said:
        word = "Enabl" if value == "1" else "Disabl"

        def act(gpu: Gpu) -> list[str]:
            self._modes.set_mode(gpu, is_on=value == "1")
            return [f"{word}ed MIG Mode for GPU {text.bus_id(gpu)}"]

        said = self._each(gpus, value in ("0", "1"), act, f"Unable to {word.lower()}e MIG Mode")
        return Said(said.code, said.output + "All done.\n" * (not said.code), said.error)

    def _set_persistence(self, gpus: list[Gpu], value: str) -> Said:
        def act(gpu: Gpu) -> list[str]:
            self._gpus.memory.set_persistent(gpu.address, is_on=value == "1")
            return [
                f"{'Enabled' if value == '1' else 'Disabled'} persistence mode for {gpu.address}."
            ]

        return self._each(gpus, value in ("0", "1"), act, "Unable to set persistence mode")

    def _set_heterogeneous(self, gpus: list[Gpu], value: str) -> Said:
        def act(gpu: Gpu) -> list[str]:
            self._modes.set_heterogeneous(gpu, is_on=value == "1")
            return [f"Set vGPU heterogeneous mode to {value} for GPU {text.bus_id(gpu)}"]

        return self._each(gpus, value in ("0", "1"), act, "Unable to set vGPU heterogeneous mode")

    def _vgpu(self, gpus: list[Gpu], options: dict[str, str]) -> Said:
        if "-shm" in options:
            return self._set_heterogeneous(gpus, options["-shm"])
        if not options.keys() & {"-s", "-c"}:
            return Said(2, "Invalid combination of input arguments.\n")
        rows: list[str] = []
        for gpu in gpus:
            rows.append(f"GPU {text.bus_id(gpu)}")
            creatable = self._gpus.rules(gpu).creatable()
            for kind in gpu.card.kinds if "-s" in options else creatable:
                rows += text.kind_of(kind) if "-v" in options else [f"    {kind.name}"]
        return Said(0, text.lines(rows))

    def _each(
        self,
        gpus: list[Gpu],
        is_right: bool,  # noqa: FBT001
        act: Callable[[Gpu], list[str]],
        failure: str,
    ) -> Said:
        """Do it to all GPUs until one refuses."""
        if not is_right:
            return Said(INVALID_ARGUMENT[0], f"{failure}: {INVALID_ARGUMENT[1]}\n")
        rows: list[str] = []
        for gpu in gpus:
            try:
                rows += act(gpu)
            except NvmlError as error:
                rows.append(f"{failure} for GPU {text.bus_id(gpu)}: {error}")
                return Said(error.number, text.lines(rows))
        return Said(0, text.lines(rows))
