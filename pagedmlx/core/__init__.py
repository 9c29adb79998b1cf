"""The pure core: blocks, tables, prefix cache and scheduling, with no MLX anywhere."""
