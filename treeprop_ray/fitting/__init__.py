"""Training from Python, without a command: `fit`."""
