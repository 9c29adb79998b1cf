"""Measurements behind ``pagedmlx bench``: what is asked for, who answers, and the numbers of it."""
