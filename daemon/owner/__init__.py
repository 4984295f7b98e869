"""The synchronous core: one thread that owns the device. No asyncio, no gRPC."""
