"""Checkpoints on disk: strict parsing, digests, manifests, identities. Free of torch."""
