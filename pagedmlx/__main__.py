"""``python -m pagedmlx``: the command line, for where its script is not on the path."""

from pagedmlx.cli.app import main

main()
