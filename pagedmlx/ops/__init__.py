"""Attention over blocks, in several interchangeable backends."""
