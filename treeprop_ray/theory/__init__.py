"""The mathematics, on models with closed forms."""
