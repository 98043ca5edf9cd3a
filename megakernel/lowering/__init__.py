"""From a model, a bucket and the choices of a plan to the task graph of one whole decode step."""

from megakernel.lowering.step import lower

__all__ = ["lower"]
