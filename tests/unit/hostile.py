"""Texts that are hard on a reader: too deep, too long, of numbers and characters that few take."""

from __future__ import annotations

_DEEP = 50_000
_MIDDLE = 400
"""Levels that Python's own readers take, and that what walks through them does not."""
_DIGITS = "9" * 5_000
_KEYS = (
    "devices",
    "kind",
    "cdiVersion",
    "linux",
    "version",
    "mdev_type",
    "attrs",
    "layouts",
    "spec",
)


def _as_members(value: str) -> str:
    """An object with a value in places where readers look for something."""
    members = ", ".join(f'"{key}": {value}' for key in _KEYS)
    return f'{{"apiVersion": "v1", {members}, "metadata": {{"annotations": {{"a": {value}}}}}}}'


_VALUES = {
    "a deep list": "[" * _DEEP + "]" * _DEEP,
    "a deep object": '{"a":' * _DEEP + "1" + "}" * _DEEP,
    "a list that is not so deep": "[" * _MIDDLE + "]" * _MIDDLE,
    "an object that is not so deep": '{"a":' * _MIDDLE + "1" + "}" * _MIDDLE,
    "digits": _DIGITS,
    "negative digits": f"-{_DIGITS}",
    "more than 128 bits": "9" * 40,
    "digits and a point": f"{_DIGITS}.5",
    "an exponent": "1e999",
    "a long exponent": f"1e{_DIGITS}",
    "a negative exponent": f"1e-{_DIGITS}",
    "not a number": "NaN",
    "infinity": "-Infinity",
    "a NUL": r'"a\u0000b"',
    "a real NUL": '"a\0b"',
    "half a pair": r'"\ud800"',
    "a long text": f'"{"x" * 100_000}"',
    "digits as a text": f'"{_DIGITS}"',
    "an exponent as a text": f'"1E{_DIGITS}"',
    "digits of Arabic": '"\u0663\u0663"',
    "a control sequence": r'"\u001b[31m"',
    "false": "false",
    "an empty list": "[]",
    "a list of lists": "[[[]]]",
    "a list of objects": "[{}]",
}
JSON = {
    **{f"JSON: {name}": _as_members(value) for name, value in _VALUES.items()},
    **{f"JSON alone: {name}": value for name, value in _VALUES.items()},
    "JSON: a key that is half a pair": r'{"\ud800": 1}',
    "JSON: a key twice": '{"version": 1, "version": 2}',
    "JSON: a byte order mark": "\ufeff{}",
    "JSON: characters that were replaced": '{"version": "\ufffd"}',
    "nothing": "",
    "JSON: cut off": '{"version": [1, ',
}
TOML = {
    "TOML: digits": f"a = {_DIGITS}\n",
    "TOML: more than 128 bits": f"a = {'9' * 40}\n",
    "TOML: hexadecimal digits": f"a = 0x{'f' * 50_000}\n",
    "TOML: a deep list": f"a = {'[' * _DEEP}{']' * _DEEP}\n",
    "TOML: a list that is not so deep": f"a = {'[' * _MIDDLE}{']' * _MIDDLE}\n",
    "TOML: deep tables": f"a = {'{a = ' * _DEEP}1{'}' * _DEEP}\n",
    "TOML: a key of many parts": f"{'.'.join('a' * 3_000)} = 1\n",
    "TOML: a header of many parts": f"[{'.'.join('a' * 3_000)}]\nb = 1\n",
    "TOML: floats": f"a = inf\nb = nan\nc = 1e999\nd = {_DIGITS}.0\n",
    "TOML: a NUL": 'version = "\\u0000"\n',
    "TOML: a real NUL": 'version = "\0"\n',
    "TOML: half a pair": 'version = "\\ud800"\n',
    "TOML: a byte order mark": "\ufeffversion = 2\n",
    "TOML: characters that were replaced": 'version = "\ufffd"\n',
    "TOML: a key twice": "a = 1\na = 2\n",
    "TOML: a day that is none": "a = 2001-02-31\n",
    "TOML: sections that are none": 'hypervisor = 1\nagent = [1]\nplugins = "x"\nimports = [1]\n',
    "TOML: digits of a version": f"version = {_DIGITS}\n",
}
_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
_TAGS = ("int", "float", "bool", "null", "timestamp", "binary", "set", "omap", "pairs", "python/x")
YAML = {
    "YAML: a billion laughs": _BOMB,
    "YAML: a billion laughs in a list": f"devices: [*a9]\n{_BOMB}",
    "YAML: an alias of itself": "a: &a [*a]\n",
    "YAML: a key twice": "a: 1\na: 2\n",
    "YAML: digits": f"version: {_DIGITS}\n",
    "YAML: hexadecimal digits": f"version: 0x{'f' * 50_000}\n",
    "YAML: a deep list": "- " * 1_500 + "x\n",
    "YAML: a deep list in brackets": "[" * 1_500 + "]" * 1_500,
    "YAML: a list that is not so deep": "[" * 150 + "]" * 150,
    "YAML: floats": "version: .inf\nkind: .nan\n",
    "YAML: a NUL": 'version: "\\0"\n',
    "YAML: a real NUL": "version: \0\n",
    "YAML: half a pair": 'version: "\\ud800"\n',
    "YAML: a byte order mark": "\ufeffversion: 1\n",
    "YAML: a day that is none": "version: 2001-02-31\n",
    "YAML: a merge": "a: &a {b: 1}\nversion:\n  <<: *a\n",
    "YAML: a merge of itself": "a: &a\n  <<: *a\n",
    "YAML: a key that is a list": "? [a]\n: 1\n",
    "YAML: a key that is a number": "1: 2\n2.5: 3\n",
    **{f"YAML: !!{tag} of a text": f"version: !!{tag} x\n" for tag in _TAGS},
    **{f"YAML: !!{tag} of nothing": f'version: !!{tag} ""\n' for tag in _TAGS},
}
_DOMAIN = """<domain type='kvm'>
<name>a</name><memory unit='KiB'>{0}</memory><vcpu current='{0}'>{0}</vcpu>
<memtune><hard_limit unit='{0}'>{0}</hard_limit></memtune>
<iothreads>{0}</iothreads><cputune><vcpupin vcpu='{0}' cpuset='{0}'/></cputune>
<numatune><memory mode='strict' nodeset='{0}'/></numatune>
<cpu><numa><cell id='{0}' cpus='{0}' memory='{0}'/></numa><maxphysaddr bits='{0}'/>
<topology sockets='{0}' cores='{0}' threads='{0}'/></cpu>
<devices><hostdev mode='subsystem' type='pci'><source>
<address domain='0x{0}' bus='{0}' slot='{0}' function='{0}'/></source><boot order='{0}'/>
<address type='pci' domain='{0}' bus='{0}' slot='{0}' function='{0}'/></hostdev>
<controller type='pci' index='{0}' model='pcie-root-port'><target chassis='{0}' port='{0}'/>
</controller></devices></domain>"""
XML = {
    "XML: deep": ("<a>" * _DEEP + "</a>" * _DEEP).encode(),
    "XML: entities": b'<!DOCTYPE a [<!ENTITY x "xx">]><a>&x;</a>',
    "XML: a NUL": b"<a>\0</a>",
    "XML: a reference to NUL": b"<a>&#0;</a>",
    "XML: half a pair": b"<a>&#xD800;</a>",
    "XML: digits": _DOMAIN.format(_DIGITS).encode(),
    "XML: nine and ten digits": _DOMAIN.format("9" * 10).encode(),
    "XML: negative digits": _DOMAIN.format("-1").encode(),
    "XML: no digits": _DOMAIN.format("\u0663").encode(),
    "XML: a byte order mark": "\ufeff<domain/>".encode(),
    "XML: attributes": b"<a " + b" ".join(b"a%d='x'" % n for n in range(9_000)) + b"/>",
    "XML: a prefix of nothing": b"<a:b/>",
    "XML: no UTF-8": b"<a>\xff</a>",
    "XML: nothing": b"",
}
