"""The engine: owns model, pool and scheduler, and turns requests into text step by step."""
