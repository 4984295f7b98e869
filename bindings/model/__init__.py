"""The resident decoder: config, layout, forward pass, generation."""
