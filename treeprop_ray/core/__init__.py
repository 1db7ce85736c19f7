"""The algorithm: readable without Ray."""
