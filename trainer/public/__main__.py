"""`python -m rolltap`: the `rolltap` command."""

from rolltap.trainer.cli.main import main

main()
