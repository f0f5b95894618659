"""What `train_mini.py` is made of: the K3 graph in PyTorch, its text, its quantisers and its checkpoint writer.

Nothing here is imported by the daemon, and PyTorch is imported only where it is needed: the package's other
modules run without it.
"""
