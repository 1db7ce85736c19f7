"""Engines: the same algorithm in one process or on Ray actors."""
