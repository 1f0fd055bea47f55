"""The jobs of a session: `train` (reinforcement learning or demonstrations) and `evaluate`."""
