"""The owner daemon."""
