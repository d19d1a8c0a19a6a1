"""`python -m manyhands`: the program `manyhands`."""

from manyhands.tools.cli import main

main()
