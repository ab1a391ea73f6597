"""The parts of a domain: devices and their places, memory and CPUs."""
