"""From a dataset to training batches: sources, augmentation, mixing, and random numbers by seed, epoch and sample.

Imports `data` and torch. `training` reads the batches.
"""
