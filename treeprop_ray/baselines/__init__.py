"""What TreeProp is compared with, on the same models, data, run folders and actors."""
