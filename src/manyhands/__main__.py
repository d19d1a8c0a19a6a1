"""`python -m manyhands`: the program `manyhands`."""

from manyhands.cli import main

main()
