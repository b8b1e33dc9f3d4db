"""Checkpoints written out of checkpoints: quantised, or a head taken out; all of it or nothing.

What is written grows in a folder beside the output and is renamed when it is complete. Tensors are made and written
one at a time; a run that was interrupted goes on after the last complete file.
"""
