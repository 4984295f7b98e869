"""What gRPC and HTTP share: from a question to the pieces of its answer."""
