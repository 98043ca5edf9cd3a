"""A tiny random model with a real tokenizer, so that every route of the server can be tried without a checkpoint."""

from runtime.demo.checkpoint import write_checkpoint

__all__ = ["write_checkpoint"]
