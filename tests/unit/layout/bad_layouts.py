"""Documents that are no layouts, each with what must be told of it."""

from __future__ import annotations

from dataclasses import dataclass

_HEAD = "version: vfiomgr/v1\nlayouts:\n  gpus:\n    devices:\n"


@dataclass(frozen=True)
class Bad:
    """A document, and what is told of it."""

    name: str
    text: str
    told: str
    """The lines that it deserves, without the name of the file."""
    by_schema: bool = True
    """Whether a JSON schema can know it too."""


def rules(*texts: str) -> str:
    """A document with these rules; the first is in line 5, and begins in column 9."""
    return _HEAD + "".join(f"      - {text}\n" for text in texts)


def wanted(text: str) -> str:
    """A document with one rule that wants these vGPUs; they begin in line 8, column 13."""
    return rules(f"select: all\n        state: vgpu\n        vgpus:\n          - {text}")


_UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
_STATES = "write host, passthrough, on-demand, sriov or vgpu"
_RULE = "layout gpus, rule 1"
_REQUEST = "layout gpus, rule 1, entry 1 of vgpus"
_CLASSES = (
    "display, vga, 3d, network, ethernet, nvme, storage, audio, usb, accelerator, infiniband, "
    "gpu, nic"
)
_ADDRESS = "use PCI addresses of the form domain:bus:device.function, e.g. 0000:41:00.0"
_SELECT = 'use all, or criteria, e.g. select: {class: "0302"}'
_BEGIN = "begin with version: vfiomgr/v1"

BAD = (
    # the text
    Bad(
        "empty",
        "",
        "1:1: the file is empty; a layout begins with: version: vfiomgr/v1",
        by_schema=False,
    ),
    Bad(
        "comments alone",
        "# nothing\n",
        "1:1: the file is empty; a layout begins with: version: vfiomgr/v1",
        by_schema=False,
    ),
    Bad("null", "~\n", f"1:1: the file is empty; {_BEGIN}"),
    Bad(
        "XML",
        '<domain type="kvm">\n  <name>a: b</name>\n  <uuid>c: d: e</uuid>\n</domain>\n',
        "1:1: this is XML, not a layout; a layout begins with: version: vfiomgr/v1",
        by_schema=False,
    ),
    Bad(
        "XML with its declaration",
        "\ufeff<?xml version='1.0'?>\n<domain/>\n",
        "1:1: this is XML, not a layout; a layout begins with: version: vfiomgr/v1",
        by_schema=False,
    ),
    Bad(
        "a list",
        "- version: vfiomgr/v1\n",
        (
            f"1:1: a layout file is a mapping, but this is a list; {_BEGIN}, and layouts by name "
            "below layouts"
        ),
    ),
    Bad(
        "a tab",
        _HEAD + "\t- x\n",
        "5:1: a tab cannot be used for indentation; indent with spaces",
        by_schema=False,
    ),
    Bad(
        "two documents",
        "version: vfiomgr/v1\n---\nlayouts: {}\n",
        "3:1: a second document begins here; keep one, with all layouts by name below `layouts`",
        by_schema=False,
    ),
    Bad(
        "a name with a star",
        rules("select: {name: *A40*}\n        state: host"),
        '5:24: * begins an alias here; put a text with * into quotes: "*A40*"',
        by_schema=False,
    ),
    Bad(
        "a colon too many",
        "version: vfiomgr: v1\n",
        "1:17: a second `:` in one value; put the text into quotes",
        by_schema=False,
    ),
    Bad(
        "a line that is indented too deep",
        "version: vfiomgr/v1\n layouts:\n",
        (
            "2:9: the line is indented deeper than the key above, which already has a value; use "
            "the same indentation for all keys of a mapping"
        ),
        by_schema=False,
    ),
    Bad(
        "a colon too many in a line that is indented as it should be",
        rules("select: all\n        state: host: vm"),
        "6:20: a second `:` in one value; put the text into quotes",
        by_schema=False,
    ),
    Bad(
        "an open quote",
        'version: "vfiomgr/v1\n',
        "2:1: a quote is not closed; close it with the same quote",
        by_schema=False,
    ),
    Bad(
        "an open brace",
        rules("{select: all, state: host"),
        "6:1: a bracket or brace is not closed, or a comma is missing; close it",
        by_schema=False,
    ),
    Bad(
        "a wrong indentation",
        rules("select: all\n       state: host"),
        (
            "6:8: the indentation does not match any line above; use the same indentation for all "
            "keys of a mapping"
        ),
        by_schema=False,
    ),
    Bad(
        "nested without end",
        "version: " + "[" * 5000,
        "1:110: it is nested deeper than 100 levels; a layout needs at most ten levels",
        by_schema=False,
    ),
    Bad(
        "an alias that contains itself",
        "version: &v [*v]\n",
        "1:10: an alias contains itself; write the value instead of the alias",
        by_schema=False,
    ),
    Bad(
        "merge keys",
        rules("&r {select: all, state: host}", "{<<: *r, select: {id: '10de:*'}, state: host}"),
        "6:10: layout gpus, rule 2: << merges mappings only in YAML 1.1; write the keys out",
        by_schema=False,
    ),
    Bad(
        "a key twice",
        rules("select: all\n        state: host\n        state: sriov"),
        "7:9: layout gpus, rule 1: duplicate key 'state'; line 6 already has it: keep one",
        by_schema=False,
    ),
    Bad(
        "a tag",
        rules("select: all\n        state: !now host"),
        "6:16: layout gpus, rule 1: the tag !now; remove it: layouts do not use any",
        by_schema=False,
    ),
    # the top
    Bad(
        "no version",
        "layouts: {gpus: {devices: []}}\n",
        "1:1: version is missing; write version: vfiomgr/v1",
    ),
    Bad(
        "another version",
        "version: vfiomgr/v2\nlayouts: {gpus: {devices: []}}\n",
        '1:10: version is "vfiomgr/v2"; did you mean vfiomgr/v1? write version: vfiomgr/v1',
    ),
    Bad(
        "a number as version",
        "version: 1\nlayouts: {gpus: {devices: []}}\n",
        "1:10: version cannot be 1; write version: vfiomgr/v1",
    ),
    Bad(
        "no layouts in it",
        "version: vfiomgr/v1\nlayouts: {}\n",
        (
            "2:10: layouts cannot be an empty mapping; write layouts by name, e.g. layouts: "
            "{gpus: {devices: […]}}"
        ),
    ),
    Bad(
        "a layout without a name",
        "version: vfiomgr/v1\nlayouts:\n  '': {devices: []}\n",
        "3:7: a layout without a name; write a name before the colon",
    ),
    Bad(
        "no devices",
        "version: vfiomgr/v1\nlayouts:\n  gpus:\n    description: none\n",
        (
            "3:3: layout gpus: devices is missing; write a list of rules, e.g. devices: "
            "[{select: all, state: passthrough}]"
        ),
    ),
    Bad(
        "a number as description",
        "version: vfiomgr/v1\nlayouts: {gpus: {description: 2026, devices: []}}\n",
        (
            "2:31: layout gpus: description is 2026, which YAML reads as the number 2026; quote "
            'it: description: "2026"'
        ),
    ),
    Bad(
        "a rule's key on top",
        "version: vfiomgr/v1\nselect: all\nlayouts: {gpus: {devices: []}}\n",
        "2:1: unknown key 'select' here; write it in a rule",
    ),
    Bad(
        "a layout's key on top",
        "version: vfiomgr/v1\ndevices: []\nlayouts: {gpus: {devices: []}}\n",
        "2:1: unknown key 'devices' here; write it in a layout",
    ),
    # rules
    Bad(
        "a rule that is a text",
        rules("all"),
        f'5:9: {_RULE}: a rule cannot be "all"; write e.g. {{select: all, state: passthrough}}',
    ),
    Bad("no state", rules("select: all"), f"5:9: {_RULE}: state is missing; {_STATES}"),
    Bad(
        "an unknown state",
        rules("select: all\n        state: passthru"),
        f'6:16: {_RULE}: state is "passthru"; did you mean passthrough? {_STATES}',
    ),
    Bad(
        "a number as state",
        rules("select: all\n        state: 4"),
        f"6:16: {_RULE}: state cannot be 4; {_STATES}",
    ),
    Bad("no select", rules("state: host"), f"5:9: {_RULE}: select is missing; {_SELECT}"),
    Bad(
        "a misspelt key",
        rules("select: all\n        state: passthrough\n        drvier: vfio-pci"),
        f"7:9: {_RULE}: unknown key 'drvier'; did you mean driver?",
    ),
    Bad(
        "a key of another state",
        rules("select: all\n        state: host\n        driver: vfio-pci"),
        (
            f"7:9: {_RULE}: unknown key 'driver' here; driver belongs to state: passthrough or "
            "on-demand or sriov, but this rule has host"
        ),
    ),
    Bad(
        "a criterion beside select",
        rules("select: all\n        state: host\n        address: 0000:41:00.0"),
        f"7:9: {_RULE}: unknown key 'address' here; write it in select",
    ),
    Bad(
        "a key without a value",
        rules("select: all\n        state: passthrough\n        driver:"),
        (
            f"7:9: {_RULE}: driver has no value; use the name of a VFIO driver, e.g. driver: "
            "vfio-pci, or remove the key"
        ),
    ),
    Bad(
        "a text for a truth value",
        rules("select: all\n        state: passthrough\n        only: yes"),
        f'7:15: {_RULE}: only is "yes", which is not true or false; use true or false',
    ),
    Bad(
        "d3cold: true",
        rules("select: all\n        state: passthrough\n        d3cold: true"),
        f"7:17: {_RULE}: d3cold cannot be true; use d3cold: false, or remove the key",
    ),
    Bad(
        "an unknown reset",
        rules("select: all\n        state: passthrough\n        reset_method: frl"),
        (
            f'7:23: {_RULE}: reset_method cannot be "frl"; use one of device_specific, acpi, '
            "flr, af_flr, pm, bus, cxl_bus"
        ),
    ),
    Bad(
        "an owner of three parts",
        rules("select: all\n        state: passthrough\n        owner: a:b:c"),
        (
            f'7:16: {_RULE}: owner cannot be "a:b:c"; use USER or USER:GROUP, names or quoted '
            "numbers, e.g. libvirt-qemu:kvm"
        ),
    ),
    Bad(
        "a number as owner",
        rules("select: all\n        state: passthrough\n        owner: 1000"),
        (
            f"7:16: {_RULE}: owner is 1000, which YAML reads as the number 1000; quote it: owner: "
            '"1000"'
        ),
    ),
    Bad(
        "a broken number",
        rules("select: all\n        state: host\n        at_least: 1.5"),
        (
            f"7:19: {_RULE}: at_least is 1.5, which is not a whole number; use a whole number "
            "from 0, e.g. at_least: 8"
        ),
    ),
    Bad(
        "what the moment decides",
        rules("select: all\n        state: host\n        allow: in-use"),
        (
            f"7:16: {_RULE}: a file cannot allow changes to devices in use: apply --allow "
            "in-use; remove it, and pass it when applying: --allow in-use"
        ),
    ),
    Bad(
        "an unknown guard",
        rules("select: all\n        state: host\n        allow: [boot_display]"),
        (
            f'7:17: {_RULE}: allow is "boot_display"; did you mean boot-display? use some of '
            "boot-display, mounted-disk, vgpu-function, default-route, reserved-region, "
            "host-peripheral"
        ),
    ),
    # selectors
    Bad(
        "a class that YAML reads as a number",
        rules("select: {class: 0302}\n        state: host"),
        (
            f"5:25: {_RULE}: class is 0302, which YAML reads as the number 302; quote it: "
            'class: "0302"'
        ),
    ),
    Bad(
        "an unknown class",
        rules("select: {class: dsplay}\n        state: host"),
        (
            f'5:25: {_RULE}: class is "dsplay"; did you mean display? use its first digits in '
            f'quotes, e.g. "0302", or one of {_CLASSES}'
        ),
    ),
    Bad(
        "a bad address",
        rules("select: {address: [0000:41:00.0, 0000:41:00.9]}\n        state: host"),
        f"5:42: {_RULE}: '0000:41:00.9' is not a PCI address: a function number is at most 7; "
        f"{_ADDRESS}",
    ),
    Bad(
        "a device number too high",
        rules("select: {address: 0000:41:20.0}\n        state: host"),
        (
            f"5:27: {_RULE}: '0000:41:20.0' is not a PCI address: a device number is at most 1f; "
            "use PCI addresses of the form domain:bus:device.function, e.g. 0000:41:00.0"
        ),
    ),
    Bad(
        "a bad identifier",
        rules("select: {id: 10de}\n        state: host"),
        (
            f'5:22: {_RULE}: id cannot be "10de"; use vendor:device with four hexadecimal '
            "digits each, e.g. 10de:2235 or 10de:*"
        ),
    ),
    Bad(
        "no criterion",
        rules("select: {}\n        state: host"),
        (
            f"5:17: {_RULE}: a selector needs a criterion, e.g. address, id, class, or all; "
            f"{_SELECT}"
        ),
    ),
    Bad(
        "an empty list",
        rules("select: {class: display, address: []}\n        state: host"),
        f"5:43: {_RULE}: address is an empty list, which selects nothing; {_ADDRESS}",
    ),
    Bad(
        "a parent with others",
        rules("select: {parent: mtty, class: display}\n        state: vgpu"),
        (
            f"5:17: {_RULE}: parent cannot be combined: its devices have no PCI address, class or "
            "model; remove parent, or all other criteria"
        ),
    ),
    Bad(
        "the name of the field",
        rules("select: {classes: display}\n        state: host"),
        f"5:18: {_RULE}: unknown key 'classes'; did you mean class?",
    ),
    Bad(
        "almost all",
        rules("select: alll\n        state: host"),
        f'5:17: {_RULE}: select is "alll"; did you mean all? {_SELECT}',
    ),
    # virtual functions and vGPUs
    Bad(
        "sriov without a count",
        rules("select: all\n        state: sriov"),
        f"5:9: {_RULE}: count is missing; use a whole number from 0, or max, e.g. count: 4",
    ),
    Bad(
        "a count that is none",
        rules("select: all\n        state: sriov\n        count: four"),
        (
            f'7:16: {_RULE}: count is "four", which is not a whole number; use a whole number '
            "from 0, or max, e.g. count: 4"
        ),
    ),
    Bad(
        "an owner of what no guest has",
        rules("select: all\n        state: sriov\n        count: 4\n        owner: kvm"),
        (
            f"5:9: {_RULE}: owner requires functions: passthrough; "
            "add functions: passthrough, or remove the key"
        ),
    ),
    Bad(
        "vectors of what a driver of the host has",
        rules("{select: all, state: sriov, count: 4, vf_msix: 8, functions: host}"),
        (
            f"5:9: {_RULE}: vf_msix requires virtual functions without a driver of the host; "
            "remove the key, or use functions: passthrough and a count from 1"
        ),
    ),
    Bad(
        "vectors of no functions",
        rules("{select: all, state: sriov, count: 0, vf_msix: 8}"),
        (
            f"5:9: {_RULE}: vf_msix requires virtual functions without a driver of the host; "
            "remove the key, or use functions: passthrough and a count from 1"
        ),
    ),
    Bad(
        "more vectors than MSI-X has",
        rules("{select: all, state: sriov, count: 4, vf_msix: 4096}"),
        (
            f"5:56: {_RULE}: vf_msix cannot be 4096; "
            "use a whole number from 1 to 2048, e.g. vf_msix: 64"
        ),
    ),
    Bad(
        "neither count nor per_gpu",
        wanted("type: A40-4Q"),
        (
            f"8:13: {_REQUEST}: give a number: either count (in total) or per_gpu (on each); "
            "e.g. {type: A40-4Q, per_gpu: 4}, or count: 8 for all together"
        ),
    ),
    Bad(
        "both count and per_gpu",
        wanted("{type: A40-4Q, count: 4, per_gpu: 4}"),
        (
            f"8:13: {_REQUEST}: give a number: either count (in total) or per_gpu (on each); "
            "e.g. {type: A40-4Q, per_gpu: 4}, or count: 8 for all together"
        ),
    ),
    Bad(
        "neither type nor need",
        wanted("count: 4"),
        (
            f"8:13: {_REQUEST}: give either type, or requirements: framebuffer, series, heads; "
            "e.g. {type: A40-4Q, per_gpu: 4} or {framebuffer: 6G, per_gpu: 4}"
        ),
    ),
    Bad(
        "a number as type",
        wanted("{type: 1148, count: 1}"),
        (
            f"8:20: {_REQUEST}: type is 1148, which YAML reads as the number 1148; quote it: "
            'type: "1148"'
        ),
    ),
    Bad(
        "a size without a unit that is known",
        wanted("{framebuffer: 6X, count: 1}"),
        (
            f'8:27: {_REQUEST}: framebuffer cannot be "6X"; use a size such as 512M, 6G or a '
            "number of MiB"
        ),
    ),
    Bad(
        "a size in text without a unit",
        wanted('{framebuffer: "6144", count: 1}'),
        (
            f'8:27: {_REQUEST}: framebuffer cannot be "6144"; use a size such as 512M, 6G or a '
            "number of MiB"
        ),
    ),
    Bad(
        "a size with a space before its unit",
        wanted("{framebuffer: 6 GiB, count: 1}"),
        (
            f'8:27: {_REQUEST}: framebuffer cannot be "6 GiB"; use a size such as 512M, 6G or a '
            "number of MiB"
        ),
    ),
    Bad(
        "more uuids than vGPUs",
        wanted(f"{{type: A, count: 2, uuids: [{_UUID}]}}"),
        f"8:13: {_REQUEST}: 1 uuids require a count of 1; use that count, or that many uuids",
        by_schema=False,
    ),
    Bad(
        "a uuid twice",
        wanted(f"{{type: A, count: 2, uuids: [{_UUID}, {_UUID.upper()}]}}"),
        (
            f"8:79: {_RULE}: a second vGPU has the UUID {_UUID.upper()}; line 8 already uses "
            "it: give each its own"
        ),
        by_schema=False,
    ),
    Bad(
        "a list for a mapping",
        wanted("{type: A, count: 1, parameters: [a]}"),
        (
            f"8:45: {_REQUEST}: parameters cannot be a list; write names and values, e.g. "
            "parameters: {frame_rate_limiter: 0}"
        ),
    ),
    # rules that have nothing
    Bad(
        "an address in two rules",
        rules(
            "{select: {address: 0000:41:00.0}, state: passthrough}",
            "{select: {address: [0000:42:00.0, '41:00.0']}, state: host}",
        ),
        (
            "6:43: layout gpus, rule 2: rule 1 already selects 0000:41:00.0, so this rule never "
            "gets it; keep the address in one of the two rules"
        ),
        by_schema=False,
    ),
    Bad(
        "an address twice in one rule",
        rules("{select: {address: [0000:41:00.0, 0000:41:00.0]}, state: host}"),
        f"5:43: {_RULE}: 0000:41:00.0 appears twice; remove one",
        by_schema=False,
    ),
    Bad(
        "a rule after one that has all",
        rules("{select: all, state: host}", "{select: {class: 3d}, state: passthrough}"),
        (
            "6:18: layout gpus, rule 2: this rule never applies: rule 1 (all GPUs and "
            "accelerators) selects all its devices; put the narrower rule first, or remove one of "
            "the two"
        ),
        by_schema=False,
    ),
    # JSON
    Bad(
        "JSON with a flaw",
        '{\n\t"version": "vfiomgr/v1",\n\t"layouts": {"gpus": {"devices": [\n\t\t{"select": "all", '
        '"state": "hots"}\n\t]}}\n}\n',
        f'4:30: {_RULE}: state is "hots"; did you mean host? {_STATES}',
    ),
    Bad(
        "JSON that is cut off",
        '{"version": "vfiomgr/v1",\n "layouts": {',
        (
            "2:14: not JSON or YAML: expecting property name enclosed in double quotes; correct "
            "it there or just before"
        ),
        by_schema=False,
    ),
    # all at once
    Bad(
        "several",
        rules(
            "select: {class: 0302, seriall: x}\n        state: passthrough\n        onyl: true",
            "select: {name: a}\n        state: vgpu\n        strategy: packed\n        vgpus:\n"
            "          - {type: A, count: 0}",
        ),
        (
            f"5:25: {_RULE}: class is 0302, which YAML reads as the number 302; quote it: class: "
            '"0302"\n'
            f"5:31: {_RULE}: unknown key 'seriall'; did you mean serial?\n"
            f"7:9: {_RULE}: unknown key 'onyl'; did you mean only?\n"
            '10:19: layout gpus, rule 2: strategy is "packed"; did you mean pack? use pack '
            "or spread\n"
            "12:30: layout gpus, rule 2, entry 1 of vgpus: count cannot be 0; use a whole number "
            "from 1, e.g. count: 4"
        ),
    ),
    # resources
    Bad(
        "a consumer of no resource",
        rules("{select: all, state: passthrough, consumer: kata}"),
        f"5:9: {_RULE}: consumer requires a resource; add resource: auto, or remove the key",
    ),
    Bad(
        "a reset of no resource",
        rules("{select: all, state: vgpu, reset: true}"),
        f"5:9: {_RULE}: reset requires a resource; add resource: auto, or remove the key",
    ),
    Bad(
        "a resource of functions of no guest",
        rules("{select: all, state: sriov, count: 4, resource: auto}"),
        f"5:9: {_RULE}: resource requires functions: passthrough; add functions: passthrough, or "
        "remove the key",
    ),
    Bad(
        "monitoring that does not exist",
        rules("{select: all, state: on-demand, stop: [service]}"),
        f'5:48: {_RULE}: stop is "service"; did you mean services? '
        "use some of services, gpu-operator",
    ),
    Bad(
        "a word for a truth",
        rules("{select: all, state: on-demand, sticky: yes}"),
        f'5:49: {_RULE}: sticky is "yes", which is not true or false; use true or false',
    ),
    Bad(
        "a resource of the host",
        rules("{select: all, state: host, resource: auto}"),
        f"5:36: {_RULE}: unknown key 'resource' here; resource belongs to state: passthrough or "
        "sriov or vgpu, but this rule has host",
    ),
    Bad(
        "a resource with spaces",
        rules("{select: all, state: passthrough, resource: my gpu}"),
        f'5:53: {_RULE}: resource cannot be "my gpu"; use auto, NAME or DOMAIN/NAME, e.g. '
        "resource: training",
    ),
    Bad(
        "an unknown consumer",
        rules("{select: all, state: passthrough, resource: auto, consumer: katta}"),
        f'5:69: {_RULE}: consumer is "katta"; did you mean kata? use default, kata, kubevirt or '
        "container",
    ),
)
