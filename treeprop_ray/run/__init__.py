"""A run: its loop, its folder, its checkpoints, what it writes."""
