"""One object per training method, and the registry."""
