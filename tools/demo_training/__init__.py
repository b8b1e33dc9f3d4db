"""What the training of the bundled pairs shares: text, layers, optimiser, processes."""
