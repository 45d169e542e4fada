"""`python -m castor`: the command line."""

from castor.cli import main

main()
