"""`python -m dsparkgen VERB`."""

from dsparkgen.cli import main

main()
