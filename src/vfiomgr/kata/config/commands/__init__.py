"""`vfiomgr kata config`."""
