"""TreeProp through time (TreeProp-TT): recurrent networks whose steps form a binary tree.

cells.py        GRU and gateless Elman as plain matrix products
time_tree.py    one training step: all nodes of a depth at once, local losses, consistency sweeps
bptt.py         backpropagation through time on the same cell, unrolled here or in torch.nn.GRU
network.py      the cells and the readout; tree readout, deployed chain, export
engine.py       what the train command drives, in one process
distributed.py  on Ray: each depth is an actor that owns its cell
"""
