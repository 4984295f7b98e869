"""gRPC: thin services that unwrap a message, ask the core, and wrap the answer."""
