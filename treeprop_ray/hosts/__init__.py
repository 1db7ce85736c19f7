"""What runs in one process on one device. No Ray."""
