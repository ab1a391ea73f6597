"""The rules of `vfiomgr check`, by topic."""
