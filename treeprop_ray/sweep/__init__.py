"""Sweeps: a space of settings (`space`), its trials (`plan`), Ray Tune (`runner`), their tables."""
