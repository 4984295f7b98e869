"""The OpenAI-compatible API: starlette on uvicorn, in the event loop of gRPC."""
