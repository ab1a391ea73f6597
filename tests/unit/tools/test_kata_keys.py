"""The script that makes kata/keys.json, on a small repository."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tools.kata_keys import go, rust
from tools.kata_keys.__main__ import main, written
from tools.kata_keys.found import UnreadableSourceError
from tools.kata_keys.repository import Repository
from tools.kata_keys.table import make_table

GIT = shutil.which("git") or ""
PORTS = "src/runtime/pkg/device/config"
RS = f"{rust.SOURCES}/mod.rs"
OLDEST = (3, 2, 0)
GO = """\
package katautils

import (
	"os"

	"github.com/kata-containers/kata-containers/src/runtime/pkg/device/config"
	other "github.com/kata-containers/kata-containers/src/runtime/pkg/device/config"
)

type tomlConfig struct {
	Hypervisor map[string]hypervisor
	Factory    factory
}

// hypervisor is one of them.
type hypervisor struct {
	Path  string          `toml:"path"`
	Port  config.PCIePort `toml:"cold_plug_vfio"` // of a device
	Also  other.PCIePort  `toml:"also"`

	// How many there are.
	CPUs  float32         `toml:"default_vcpus"`
	Ports uint32          `toml:"pcie_root_port"`
	Rate  *uint64         `toml:"rate"`
	Names []string        `toml:"names"`
	Add   []extension     `toml:"extensions"`
	Flag  bool            `toml:"flag"`
	Inner inner           `toml:"inner"`
}

type extension struct {
	Name string `toml:"name"`
}

type inner struct {
	Size int `toml:"size"`
}

type factory struct {
	Template bool `toml:"enable_template"`
}
"""
GO_ANNOTATIONS = """\
	// A = kataAnnotHypervisorPrefix + x
	KernelPath = kataAnnotHypervisorPrefix + "kernel"
	Other = kataAnnotRuntimePrefix + "vfio_mode"
"""
RUST = """\
//! Configuration: a URL is not a comment: struct TomlConfig { }
use x; /* struct TomlConfig {} */
const TEXT: &str = "// struct TomlConfig { nothing: u8 }";
const RAW: &str = r#"struct "Agent" {"#;

#[derive(Debug, Default)]
pub struct TomlConfig {
    /// By name, e.g. "kata": [agent.kata], it's so.
    #[serde(default)]
    pub agent: HashMap<String, Agent>,
    #[serde(default)]
    pub runtime: Runtime,
}

#[derive(Debug)]
#[serde(deny_unknown_fields)]
pub struct Agent {
    #[serde(default, rename = "enable_debug")]
    pub debug: bool,
    #[serde(default = "default_dial_timeout")]
    pub dial_timeout_ms: u32,
    #[serde(
        default = "default_request_timeout",
        rename = "create_container_timeout",
        deserialize_with = "deserialize_secs_to_millis"
    )]
    pub request_timeout_ms: u32,
    #[serde(default)]
    pub mem_agent: MemAgent,
}

pub(crate) struct MemAgent {
    #[serde(default, alias = "mem_agent_enable")]
    pub enable: Option<bool>,
}

pub struct Runtime {
    #[serde(default, flatten)]
    pub network: Network,
    #[serde(default)]
    pub mounts: Vec<Mount>,
    #[serde(default)]
    pub groups: Vec<u32>,
    pub kind: Kind,
    pub user: Option<MemAgent>,
    #[serde(default, flatten)]
    pub vendor: RuntimeVendor,
}

pub struct Network {
    pub names: Vec<String>,
    pub rate: i64,
    pub queues: usize,
    pub share: f32
}

pub struct Mount { pub name: String }
pub enum Kind { One, Two }

mod vendor {
    pub struct RuntimeVendor {}
}
"""
RUST_ANNOTATIONS = """\
pub const SIZED: &str = "io.katacontainers.config.hypervisor.default_memory";
pub const LONG: &str =
    "io.katacontainers.config.hypervisor.pcie_root_port";
pub const HASH: &str = "io.katacontainers.config.hypervisor.kernel_hash";
fn check() { match key { HASH => {} } }
pub fn update_config_by_annotation() {
    // HASH => nothing
    match key { SIZED => {} LONG | OTHER => {} _ => {} }
}
"""
FILES = {
    go.SOURCE: GO,
    go.ANNOTATIONS: GO_ANNOTATIONS,
    f"{PORTS}/config.go": "// PCIePort is one.\ntype PCIePort string\n",
    RS: RUST,
    f"{rust.SOURCES}/runtime_vendor.rs": "pub struct RuntimeVendor { pub x: Unknown }",
    rust.ANNOTATIONS: RUST_ANNOTATIONS,
}


class Made:
    """A repository of a few releases."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._git("init", "--quiet", str(directory))
        for path, text in FILES.items():
            self.write(path, text)

    def write(self, path: str, text: str) -> None:
        """A file of the next release."""
        place = self.directory / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def change(self, path: str, old: str, new: str) -> None:
        """One text of a file in the place of another."""
        text = (self.directory / path).read_text()
        assert old in text
        self.write(path, text.replace(old, new))

    def tag(self, *names: str) -> None:
        """A commit of what is there, with tags."""
        self._git("-C", str(self.directory), "add", "--all")
        options = ("--quiet", "--allow-empty", "--no-verify", "--no-gpg-sign", "--message", "x")
        self._git("-C", str(self.directory), "commit", *options)
        for name in names:
            self._git("-C", str(self.directory), "tag", "--no-sign", name)

    def table(self) -> dict[str, Any]:
        """What the script makes of it."""
        return make_table(Repository(str(self.directory)), OLDEST)

    def keys(self) -> dict[str, Any]:
        """Its keys, by `runtime section key`."""
        return {
            f"{row.pop('runtime')} {row.pop('section')} {row.pop('key')}": row
            for row in self.table()["keys"]
        }

    def _git(self, *arguments: str) -> None:
        someone = ("-c", "user.name=x", "-c", "user.email=x@x")
        subprocess.run([GIT, *someone, *arguments], check=True, capture_output=True)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    return Made(tmp_path / "repository")


def test_all_keys_of_a_release_with_their_types(made: Made) -> None:
    made.tag("3.2.0")
    always = {"first": "3.2.0", "last": "3.2.0"}

    def row(kind: str, **more: str) -> dict[str, str]:
        return {"type": kind, **more, **always}

    assert made.keys() == {
        "go factory enable_template": row("boolean"),
        "go hypervisor also": row("string"),
        "go hypervisor cold_plug_vfio": row("string"),
        "go hypervisor default_vcpus": row("number"),
        "go hypervisor extensions": row("tables"),
        "go hypervisor flag": row("boolean"),
        "go hypervisor names": row("strings"),
        "go hypervisor path": row("string"),
        "go hypervisor pcie_root_port": row("integer", range="u32"),
        "go hypervisor rate": row("integer"),
        "go hypervisor.inner size": row("integer"),
        "rs agent create_container_timeout": row("integer", range="u32", unit="s"),
        "rs agent dial_timeout_ms": row("integer", range="u32"),
        "rs agent enable_debug": row("boolean"),
        "rs agent.mem_agent enable": row("boolean"),
        "rs agent.mem_agent mem_agent_enable": row("boolean"),
        "rs runtime groups": row("integers", range="u32"),
        "rs runtime kind": row("string"),
        "rs runtime mounts": row("tables"),
        "rs runtime names": row("strings"),
        "rs runtime queues": row("integer", range="u64"),
        "rs runtime rate": row("integer"),
        "rs runtime share": row("number"),
        "rs runtime.user enable": row("boolean"),
        "rs runtime.user mem_agent_enable": row("boolean"),
    }


def test_releases_alone_in_the_order_of_their_numbers(made: Made) -> None:
    made.tag("3.1.0", "3.10.0", "3.9.0", "3.9.1", "3.9.0-rc0", "3.9.0-test", "v3.9.0")
    assert made.table()["releases"] == ["3.9.0", "3.9.1", "3.10.0"]


def test_keys_that_come_go_and_change(made: Made) -> None:
    secs = '        deserialize_with = "deserialize_secs_to_millis"\n'
    made.change(go.SOURCE, "float32", "int32")
    made.change(RS, secs, "")
    made.tag("3.2.0")
    made.write(go.SOURCE, GO)
    made.change(RS, '    #[serde(default, rename = "enable_debug")]\n    pub debug: bool,\n', "")
    made.tag("3.3.0")
    timeout = '        rename = "create_container_timeout",\n'
    made.change(RS, timeout, timeout + secs)
    made.change(go.SOURCE, '	Flag  bool            `toml:"flag"`\n', "")
    made.change(RS, "    pub share: f32\n", "    pub share: f32,\n    pub late: bool,\n")
    made.tag("3.4.0", "4.0.0")
    keys = made.keys()
    span = {"first": "3.2.0", "last": "4.0.0"}
    assert keys["go hypervisor flag"] == {"type": "boolean", "first": "3.2.0", "last": "3.3.0"}
    assert keys["rs agent enable_debug"] == {"type": "boolean", "first": "3.2.0", "last": "3.2.0"}
    assert keys["rs runtime late"] == {"type": "boolean", "first": "3.4.0", "last": "4.0.0"}
    assert keys["go hypervisor default_vcpus"] == {
        "type": "number",
        **span,
        "before": [{"last": "3.2.0", "type": "integer", "range": "i32"}],
    }
    assert keys["rs agent create_container_timeout"] == {
        "type": "integer",
        "range": "u32",
        "unit": "s",
        **span,
        "before": [{"last": "3.3.0", "type": "integer", "range": "u32", "unit": "ms"}],
    }


def test_where_unknown_keys_are_refused_and_which_annotations_are_taken(made: Made) -> None:
    made.change(RS, "#[serde(deny_unknown_fields)]\n", "")
    made.tag("3.2.0")
    made.write(RS, RUST)
    made.change(rust.ANNOTATIONS, "SIZED => {} ", "")
    made.tag("3.3.0")
    table = made.table()
    row = {"runtime": "rs", "section": "agent", "first": "3.3.0", "last": "3.3.0"}
    assert table["strict"] == [row]
    assert [tuple(row.values()) for row in table["annotations"]] == [
        ("go", "kernel", "3.2.0", "3.3.0"),
        ("rs", "default_memory", "3.2.0", "3.2.0"),
        ("rs", "pcie_root_port", "3.2.0", "3.3.0"),
    ]


def test_a_key_that_went_and_came_back_is_refused(made: Made) -> None:
    made.tag("3.2.0")
    made.change(RS, "    pub kind: Kind,\n", "")
    made.tag("3.3.0")
    made.write(RS, RUST)
    made.tag("3.4.0")
    with pytest.raises(UnreadableSourceError, match=r"runtime\.kind was taken out and came back"):
        made.table()


@pytest.mark.parametrize(
    ("path", "old", "new", "why"),
    [
        (RS, "pub rate: i64", "pub rate: Duration", "the type Duration is not known"),
        (RS, "Vec<u32>", "Vec<bool>", "an array of bool"),
        (RS, "default, alias", "skip, alias", "struct MemAgent: serde's skip"),
        (RS, "deny_unknown_fields", "rename_all", "struct Agent: serde's rename_all"),
        (RS, "pub share: f32", "pub share", "struct Network: 'pub share'"),
        (RS, "pub share: f32", "#[cfg(x)] pub share: f32", "struct Network: '#[cfg(x)]"),
        (RS, "pub struct Mount {", "pub struct Network {", "2 structs Network below"),
        (RS, "mod vendor {", "mod vendor {\n    pub struct Agent {}", "2 structs Agent below"),
        (RS, "pub struct TomlConfig", "pub struct Other", "0 structs TomlConfig"),
        (RS, "pub rate: i64", "pub names: i64", "names in [runtime] is declared twice"),
        (rust.ANNOTATIONS, "update_config_by", "update_by", "has no fn update_config_by"),
        (go.SOURCE, "config.PCIePort", "config.Nothing", "the type config.Nothing is not known"),
        (go.SOURCE, "*uint64", "time.Duration", "the type time.Duration is not known"),
        (go.SOURCE, "[]string", "[]bool", "an array of boolean"),
        (go.SOURCE, "type tomlConfig struct", "type config struct", "no struct tomlConfig"),
        (go.SOURCE, "\tSize int", "\tSize, Other int", "struct inner: Size, Other int"),
        (go.SOURCE, '`toml:"rate"`', '`toml:"names"`', "names in [hypervisor] is declared twice"),
    ],
)
def test_what_is_not_understood_is_an_error_with_its_release(
    made: Made, path: str, old: str, new: str, why: str
) -> None:
    made.tag("3.2.0")
    made.change(path, old, new)
    made.tag("3.3.0")
    with pytest.raises(UnreadableSourceError) as refused:
        made.table()
    assert str(refused.value).startswith("3.3.0: ")
    assert why in str(refused.value)


def test_the_script_prints_the_table_a_row_a_line(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made.tag("3.2.0")
    monkeypatch.setattr("sys.argv", ["kata_keys", str(made.directory)])
    main()
    text = capsys.readouterr().out
    assert json.loads(text) == made.table()
    assert '\n  {"runtime": "rs", "section": "agent", "key": "enable_debug",' in text
    main()
    assert capsys.readouterr().out == text, "the same again"


def test_the_table_in_the_project_is_as_the_script_writes_it() -> None:
    with open(Path(__file__).parents[3] / "kata/keys.json", encoding="utf-8") as file:
        text = file.read()
    assert written(json.loads(text)) == text
