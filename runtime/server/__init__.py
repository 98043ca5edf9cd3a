"""The OpenAI-compatible HTTP server: text in and out of an engine that knows token ids only."""
