"""`python -m rolltap`: the `rolltap` command."""

from rolltap.trainer.cli import main

main()
