"""What outputs are held to: grammars, schemas, calls of declared tools, and how long a model may think."""

from runtime.constraints.answer import ToolSpec, answer_grammar
from runtime.constraints.grammar import GrammarError, Grammars, Rule
from runtime.constraints.stages import Staged, ThinkingStage, mask_of, mask_without
from runtime.constraints.vetoes import Together, Vetoes

__all__ = [
    "GrammarError",
    "Grammars",
    "Rule",
    "Staged",
    "ThinkingStage",
    "Together",
    "ToolSpec",
    "Vetoes",
    "answer_grammar",
    "mask_of",
    "mask_without",
]
