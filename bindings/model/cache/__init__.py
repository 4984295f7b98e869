"""Keys and values of running sequences, in pages that they share."""
