"""`python -m ling_local`."""

from ling_local.cli.main import main

main()
