"""TreeProp on Ray: train the blocks of a deep network as a binary tree, deploy the plain chain."""

__version__ = "0.1.0"
