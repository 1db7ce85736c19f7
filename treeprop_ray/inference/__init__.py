"""What a trained tree is used for."""
