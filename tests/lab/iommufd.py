"""VFIO with IOMMUFD on a kernel of Debian, which has neither /dev/iommu nor cdevs.

Its modules are built from the kernel's source, against headers that have another configuration.
Nothing that is built into the kernel depends on it: drivers/iommu/iommu.c exports what iommufd
calls in any case, and `struct user_struct` counts locked pages with CONFIG_NET, too. Only the
iteration over spans in lib/interval_tree.c is missing (CONFIG_INTERVAL_TREE_SPAN_ITER): iommufd
gets its own.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab import kernel
from tests.lab.kernel import SAMPLES, Kernel, build_modules, build_samples, locked, run

if TYPE_CHECKING:
    from collections.abc import Mapping

_VFIO = "drivers/vfio"
_IOMMUFD = "drivers/iommu/iommufd"
_TREE = "lib/interval_tree.c"
SOURCES = (_VFIO, _IOMMUFD, "drivers/iommu/iommu-priv.h", _TREE)
"""Where they are in the kernel's source."""
_WITH_GROUPS = {
    "CONFIG_IOMMUFD": "m",
    "CONFIG_VFIO_DEVICE_CDEV": "y",
    "CONFIG_INTERVAL_TREE_SPAN_ITER": "y",
}
_WITHOUT_GROUPS = _WITH_GROUPS | {
    "CONFIG_VFIO_GROUP": "",
    "CONFIG_VFIO_CONTAINER": "",
    "CONFIG_VFIO_IOMMU_TYPE1": "",
}
_SPANS = f"""\
#include <linux/export.h>
#undef EXPORT_SYMBOL_GPL
#define EXPORT_SYMBOL_GPL(symbol)
#include "../../../{_TREE}"
"""


def provide(base: Kernel, *, has_groups: bool) -> Kernel:
    """Return the kernel of a root with other modules, built first if there are none.

    Without groups, it has no container either, and a cdev is the only way to a device.
    """
    name = f"iommufd-{'groups' if has_groups else 'no-groups'}-{_stamp()}"
    place = base.home / name
    if not place.is_dir():
        with locked(base.home):
            if not place.is_dir():
                _build(base, place, _WITH_GROUPS if has_groups else _WITHOUT_GROUPS)
    return Kernel(base.directory, base.release, is_root=True, variant=place)


def _stamp() -> str:
    """Return a hash of what determines the modules of a root."""
    sources = (Path(__file__), Path(kernel.__file__))
    return hashlib.sha256(b"".join(map(Path.read_bytes, sources))).hexdigest()[:16]


def _build(base: Kernel, place: Path, settings: Mapping[str, str]) -> None:
    """Build everything under another name, then move it into the cache at once."""
    with tempfile.TemporaryDirectory(dir=base.home, prefix="build-") as name:
        variant = Path(name, "variant")
        made = Kernel(base.directory, base.release, is_root=True, variant=variant)
        _link_headers(base, made, settings)
        _link_modules(base, made)
        source = base.directory / "usr/src/linux-source"
        _build_vfio(made, source)
        build_samples(made, source)
        run(["depmod", "-b", str(variant), base.release])
        variant.rename(place)


def _link_headers(base: Kernel, made: Kernel, settings: Mapping[str, str]) -> None:
    """Give a variant the configuration and the headers of its root, with other settings."""
    shutil.copytree(base.headers, made.headers, symlinks=True, copy_function=os.link)
    for link in filter(Path.is_symlink, made.headers.iterdir()):
        link.unlink()
        link.symlink_to(f"/usr/src/{made.headers.name}/{link.name}")
    made.config.parent.mkdir()
    shutil.copy(base.config, made.config)
    makefile, header = "include/config/auto.conf", "include/generated/autoconf.h"
    for file in (made.config, made.headers / makefile):
        _set(file, settings, r"(# )?{name}[= ]", "{name}={value}")
    values = {
        f"{name}{suffix}": "1" if value == kind else ""
        for name, value in settings.items()
        for kind, suffix in (("y", ""), ("m", "_MODULE"))
    }
    _set(made.headers / header, values, r"#define {name} ", "#define {name} {value}")


def _set(file: Path, values: Mapping[str, str], known: str, line: str) -> None:
    """Replace settings in a file that has links elsewhere; an empty value removes one."""
    before = re.compile("|".join(known.format(name=name) for name in values))
    lines = [text for text in file.read_text().splitlines() if not before.match(text)]
    lines += [line.format(name=name, value=value) for name, value in values.items() if value]
    _replace(file, lines)


def _replace(file: Path, lines: list[str]) -> None:
    """Write a file anew, so that its other links keep their content."""
    file.unlink()
    file.write_text("".join(f"{line}\n" for line in lines))


def _link_modules(base: Kernel, made: Kernel) -> None:
    """Give a variant the modules of its root, but those that are built for it."""
    ignored = shutil.ignore_patterns("extra", "vfio", "build", "source")
    shutil.copytree(base.modules, made.modules, copy_function=os.link, ignore=ignored)


def _build_vfio(made: Kernel, kernel_source: Path) -> None:
    """Build iommufd and VFIO, and tell later builds what they export."""
    with tempfile.TemporaryDirectory(dir=made.home) as name:
        source = Path(shutil.copytree(kernel_source, Path(name, "source")))
        shutil.rmtree(source / SAMPLES)
        (source / "Kbuild").write_text(f"obj-m := {_IOMMUFD}/ {_VFIO}/\n")
        (source / _IOMMUFD / "spans.c").write_text(_SPANS)
        with (source / _IOMMUFD / "Makefile").open("a") as makefile:
            makefile.write("iommufd-y += spans.o\n")
        build_modules(made, source)
        for module in source.rglob("*.ko"):
            place = made.modules / "kernel" / module.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(module, place)
        _add_symbols(made.headers / "Module.symvers", source / "Module.symvers")


def _add_symbols(known: Path, more: Path) -> None:
    """Add what modules export to the symbols that a module is built against."""
    symbols = {line.split("\t")[1]: line for line in known.read_text().splitlines()}
    symbols |= {line.split("\t")[1]: line for line in more.read_text().splitlines()}
    _replace(known, list(symbols.values()))
