"""python -m vfiomgr."""

from vfiomgr.cli.main import main

main()
