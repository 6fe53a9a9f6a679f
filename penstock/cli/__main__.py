"""`python -m penstock.cli`."""

from penstock.cli import main

main()
