"""`vfiomgr kata explain` and `check-image`."""
