"""Models: loaded from local files and run over the blocks; the only place that imports mlx-lm's."""
