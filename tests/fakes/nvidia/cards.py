"""NVIDIA's GPUs and their vGPU types: numbers, names and limits as the drivers show them.

Types of A10, A40, RTX A6000 and T4 are as `mdevctl types` lists them on real hosts, those of L40S
as `creatable_vgpu_types` does, MIG-backed ones of A100 as NVIDIA documents them. Of the RTX PRO
6000 only those are here whose numbers somebody has shown; 1549 stands in a test of CubeCOS alone.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1024
_SIZES_48 = (1, 2, 3, 4, 6, 8, 12, 16, 24, 48)
_SIZES_24 = (1, 2, 3, 4, 6, 8, 12, 24)
_MOST = 32
"""A GPU never makes more vGPUs, whatever its framebuffer: 32 of 1 GB on 48 GB."""


@dataclass(frozen=True)
class VgpuKind:
    """One type; sizes in MiB. With a `profile` it lives in GPU instances of that number.

    `per_instance` of them share one GPU instance; `max_instance` fit one GPU.
    """

    number: int
    name: str
    framebuffer: int
    max_instance: int
    heads: int = 4
    frame_rate: int = 60
    resolution: str = "7680x4320"
    profile: int | None = None
    per_instance: int = 0

    @property
    def description(self) -> str:
        """As the mdev attribute says it."""
        return (
            f"num_heads={self.heads}, frl_config={self.frame_rate}, "
            f"framebuffer={self.framebuffer}M, max_resolution={self.resolution}, "
            f"max_instance={self.max_instance}"
        )

    @property
    def series(self) -> str:
        """A, B, C or Q: the letter that follows the size."""
        return self.name.rstrip("0123456789")[-1]


@dataclass(frozen=True)
class InstanceProfile:
    """A GPU instance profile of MIG; `places` are (start, id of the instance there)."""

    number: int
    name: str
    size: int
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Card:
    """A model of GPU; `framebuffer` in MiB is what its types share, `memory` what nvidia-smi says.

    `mixes_sizes` is whether vGPUs of several sizes can be on it at once, in heterogeneous mode.
    """

    name: str
    device: str
    architecture: str
    framebuffer: int
    memory: int
    kinds: tuple[VgpuKind, ...]
    total_vfs: int = 0
    mixes_sizes: bool = True
    profiles: tuple[InstanceProfile, ...] = ()

    def kind(self, number: int) -> VgpuKind | None:
        """The type of a number; None where the GPU has none such."""
        return next((kind for kind in self.kinds if kind.number == number), None)

    def profile(self, wanted: str) -> InstanceProfile | None:
        """A GPU instance profile by number, or by name with or without `MIG `."""
        wanted = wanted.removeprefix("MIG ")
        return next((p for p in self.profiles if wanted in (str(p.number), p.name)), None)


@dataclass(frozen=True)
class _Model:
    """What the names and limits of a model's types are made of."""

    prefix: str
    framebuffer: int
    compute_resolution: str = "4096x2400"

    def row(self, series: str, numbers: tuple[int, ...], sizes: tuple[int, ...]) -> list[VgpuKind]:
        """Types of one series, from the smallest on."""
        return [
            self.kind(number, f"{size}{series}", size)
            for number, size in zip(numbers, sizes, strict=True)
        ]

    def kind(self, number: int, suffix: str, size: int) -> VgpuKind:
        """One type; what it can show follows from the letter."""
        heads, rate, resolution = {
            "B": (4, 45, "5120x2880"),
            "Q": (4, 60, "5120x2880" if size == 1 else "7680x4320"),
            "A": (1, 60, "1280x1024"),
            "C": (1, 60, self.compute_resolution),
        }[suffix.lstrip("0123456789-")[0]]
        most = min(self.framebuffer // size, _MOST)
        name = f"{self.prefix}-{suffix}"
        return VgpuKind(number, name, size * GIB, most, heads, rate, resolution)


def _after(first: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(range(first, first + len(sizes)))


def _a40() -> tuple[VgpuKind, ...]:
    model, compute = _Model("NVIDIA A40", 48), (4, 6, 8, 12, 16, 24, 48)
    return (
        *model.row("B", (555, 556), (1, 2)),
        *model.row("Q", _after(557, _SIZES_48), _SIZES_48),
        *model.row("A", _after(567, _SIZES_48), _SIZES_48),
        *model.row("C", _after(581, compute), compute),
    )


def _rtx_a6000() -> tuple[VgpuKind, ...]:
    model, compute = _Model("NVIDIA RTXA6000", 48), (4, 6, 8, 12, 16, 24, 48)
    return (
        *model.row("B", (522, 523), (1, 2)),
        *model.row("Q", _after(524, _SIZES_48), _SIZES_48),
        *model.row("A", _after(534, _SIZES_48), _SIZES_48),
        *model.row("C", _after(548, compute), compute),
    )


def _a10() -> tuple[VgpuKind, ...]:
    model, compute = _Model("NVIDIA A10", 24), (4, 6, 8, 12, 24)
    return (
        *model.row("B", (588, 589), (1, 2)),
        *model.row("Q", _after(590, _SIZES_24), _SIZES_24),
        *model.row("A", _after(598, _SIZES_24), _SIZES_24),
        *model.row("C", _after(610, compute), compute),
    )


def _t4() -> tuple[VgpuKind, ...]:
    """As an older driver shows them: 4096x2160."""
    model, sizes = _Model("GRID T4", 16, "4096x2160"), (1, 2, 4, 8, 16)
    return (
        *model.row("B", (222, 223), (1, 2)),
        model.kind(224, "2B4", 2),
        *model.row("A", _after(225, sizes), sizes),
        *model.row("Q", _after(230, sizes), sizes),
        model.kind(252, "1B4", 1),
        *model.row("C", (319, 320, 321), (4, 8, 16)),
    )


def _l40s() -> tuple[VgpuKind, ...]:
    model = _Model("NVIDIA L40S", 48)
    return (
        *model.row("B", (1145, 1146), (1, 2)),
        *model.row("Q", _after(1147, _SIZES_48), _SIZES_48),
        *model.row("A", _after(1157, _SIZES_48), _SIZES_48),
        model.kind(2164, "3B", 3),
    )


def _a100() -> tuple[VgpuKind, ...]:
    model, sizes = _Model("GRID A100", 40), (4, 5, 8, 10, 20, 40)
    backed = (
        (474, 1, 5, 19, 7),
        (475, 2, 10, 14, 3),
        (476, 3, 20, 9, 2),
        (477, 4, 20, 5, 1),
        (478, 7, 40, 0, 1),
    )
    return (
        *model.row("C", _after(468, sizes), sizes),
        *(
            _backed(number, f"GRID A100-{slices}-{size}C", size, profile, (1, most))
            for number, slices, size, profile, most in backed
        ),
    )


def _rtx_pro_6000() -> tuple[VgpuKind, ...]:
    prefix = "NVIDIA RTX Pro 6000 Blackwell DC"
    model = _Model(prefix, 96)
    return (
        model.kind(1518, "2B", 2),
        model.kind(1519, "3Q", 3),
        model.kind(1521, "4Q", 4),
        model.kind(1540, "48Q", 48),
        _backed(1549, f"{prefix}-1-3Q", 3, 47, (8, 32)),
        _backed(1561, f"{prefix}-1-24Q", 24, 47, (1, 4)),
    )


def _backed(number: int, name: str, size: int, profile: int, most: tuple[int, int]) -> VgpuKind:
    """A MIG-backed type; `most` are those of one GPU instance, and of the whole GPU."""
    heads, resolution = (4, "7680x4320") if name.endswith("Q") else (1, "4096x2400")
    return VgpuKind(
        number, name, size * GIB, most[1], heads, 60, resolution, profile, per_instance=most[0]
    )


_A100_PROFILES = (
    InstanceProfile(19, "1g.5gb", 1, tuple((start, 7 + start) for start in range(7))),
    InstanceProfile(14, "2g.10gb", 2, ((0, 3), (2, 4), (4, 5))),
    InstanceProfile(9, "3g.20gb", 4, ((0, 2), (4, 1))),
    InstanceProfile(5, "4g.20gb", 4, ((0, 1),)),
    InstanceProfile(0, "7g.40gb", 8, ((0, 0),)),
)
_RTX_PRO_6000_PROFILES = (
    InstanceProfile(47, "1g.24gb+gfx", 3, ((0, 3), (3, 4), (6, 5), (9, 6))),
    InstanceProfile(35, "2g.48gb+gfx", 6, ((0, 1), (6, 2))),
    InstanceProfile(32, "4g.96gb+gfx", 12, ((0, 0),)),
)

T4 = Card("Tesla T4", "1eb8", "Turing", 16 * GIB, 15360, _t4(), mixes_sizes=False)
RTX_A6000 = Card("NVIDIA RTX A6000", "2230", "Ampere", 48 * GIB, 49140, _rtx_a6000())
A10 = Card("NVIDIA A10", "2236", "Ampere", 24 * GIB, 23028, _a10(), 32)
A40 = Card("NVIDIA A40", "2235", "Ampere", 48 * GIB, 46068, _a40(), 32)
L40S = Card("NVIDIA L40S", "26b9", "Ada Lovelace", 48 * GIB, 46068, _l40s(), 32)
A100 = Card(
    "NVIDIA A100-PCIE-40GB",
    "20f1",
    "Ampere",
    40 * GIB,
    40960,
    _a100(),
    16,
    profiles=_A100_PROFILES,
)
RTX_PRO_6000 = Card(
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "2bb5",
    "Blackwell",
    96 * GIB,
    97887,
    _rtx_pro_6000(),
    48,
    profiles=_RTX_PRO_6000_PROFILES,
)
