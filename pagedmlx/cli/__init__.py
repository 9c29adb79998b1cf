"""The command line: what is asked for, and how it is told."""
