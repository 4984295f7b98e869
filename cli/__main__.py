"""``python -m rowlock.cli``."""

from rowlock.cli.main import main

main()
