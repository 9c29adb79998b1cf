"""The commands, one in a file."""
