"""Who computes what in which order, as data. Pure Python: no torch, no Ray."""
