"""`python -m refvl`: the command line of `refvl.tools.cli`."""

from refvl.tools.cli import main

main()
