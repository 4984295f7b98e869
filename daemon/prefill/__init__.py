"""Prompts computed by another process, and their K/V imported: see docs/prefill.md."""
