"""The Triton kernels. Names in capitals are compile-time constants. Triton reads this source, so types are given to those
alone, and branches on constants stay statements: a branch that is not taken is not compiled."""
