"""Checkpoints, plans, the decoder and the device bindings."""
