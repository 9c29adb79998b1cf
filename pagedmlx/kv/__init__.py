"""The pool's arrays: their shapes, their one owner, and how they are written and read."""
