"""Which node and devices the scheduler would choose for pods, on snapshots of hosts."""
