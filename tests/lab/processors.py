"""How many guests at a time make the laboratory quicker.

Two threads of one core do little more work than one of them, and a virtual machine often has two
such threads as its two processors. Two emulated guests then take as long as one after the other,
and nearly twice the processor time. So the processors are asked: the same work is done by one
process, and by as many as there are processors.
"""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import median

_ROUNDS = 7
"""Of each measurement, in turns; the median counts, since other machines share the processors."""
_SHARE = 0.75
"""How much of a processor one more guest must bring."""
_WORK = """
import random, time
data = bytearray(1 << 24)
places = random.Random(1).choices(range(len(data)), k=1 << 14)
begun = time.process_time()
for _ in range(24):
    for place in places:
        data[place] = (data[place] + place) & 255
print(time.process_time() - begun)
"""
"""Small steps through more memory than a cache has, as an emulator takes them."""


def guests_at_a_time(processors: int, alone: float, together: float) -> int:
    """How many guests to run, by the processor time of the same work alone and side by side."""
    gained = processors * alone / together
    return max(1, min(processors, int(gained + 1 - _SHARE)))


def measured() -> int:
    """How many guests this machine should run at a time."""
    processors = os.cpu_count() or 1
    if processors == 1:
        return 1
    rounds = [(_seconds(1), _seconds(processors)) for _ in range(_ROUNDS)]
    alone, together = (median(times) for times in zip(*rounds, strict=True))
    return guests_at_a_time(processors, alone, together)


def _seconds(count: int) -> float:
    """The processor time that each of so many processes takes, on average."""
    running = [
        subprocess.Popen([sys.executable, "-I", "-c", _WORK], stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    return sum(float(process.communicate()[0]) for process in running) / count
