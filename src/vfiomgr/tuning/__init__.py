"""The host while a guest runs: CPUs that other work leaves, huge pages, interrupts, sleep."""
