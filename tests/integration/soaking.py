"""An agent with shorter intervals than users can set; its argument are the settings as JSON."""

from __future__ import annotations

import sys

import msgspec

from vfiomgr.node.agent import run
from vfiomgr.node.messages import AgentSettings

if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=AgentSettings), lambda _: None)
