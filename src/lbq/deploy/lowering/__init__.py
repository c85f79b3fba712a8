"""From a traced PyTorch network to `lbq.graph.Graph`: every operation is lowered exactly, or refused by name with a remedy."""
