"""The ATOM binding: rows on torch-rbln device tensors."""
