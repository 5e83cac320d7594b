"""`python -m pie.cluster` is the `pie` command."""

from pie.cluster.cli import main

main()
