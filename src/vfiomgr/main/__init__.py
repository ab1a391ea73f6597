"""The command `vfiomgr`: its commands, its start and end, help, and completion in shells."""
