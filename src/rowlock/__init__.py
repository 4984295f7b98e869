"""Rowlock: an owner daemon that changes the weights of a live model as a transaction."""

__version__ = "0.1.0"
