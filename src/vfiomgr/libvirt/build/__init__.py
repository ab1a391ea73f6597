"""The parts of a guest: devices and their places, memory and CPUs."""
