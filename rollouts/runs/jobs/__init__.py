"""What a session runs: `train` (reinforcement or demonstrations) or `evaluate`."""
