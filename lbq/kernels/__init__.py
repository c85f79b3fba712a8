"""How a burst sequence is computed: `reference` defines what is correct, `choose` says which kernel runs."""
