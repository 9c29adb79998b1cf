"""The terminal chat. Importing this package loads neither Textual nor MLX."""
