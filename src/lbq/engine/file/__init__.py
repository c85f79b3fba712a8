"""The file of a deployed network, `model.lbq`: written, read as if it were hostile, and mapped into memory. No torch."""
