"""What a model is: its sizes, the kind of each layer, and the counts that follow from them.

Owns the geometry and the choices of mathematics that lowering turns into tasks, whatever family the model
came from. Refuses weights, files and family quirks: those readers live in megakernel/families. Read by
lowering, the simulator's bounds, the tuner's reports and the runtime's buffers.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from megakernel.config import Frozen

BF16_BYTES = 2  # weights and KV cache are bfloat16 throughout

Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]


class Rope(Frozen):
    """Rotary position embedding over the whole head: its base, and which elements turn together.

    `interleaved` turns elements 2i and 2i+1; `half` turns i and i + head_dim / 2.
    """

    theta: PositiveFloat
    pairing: Literal["interleaved", "half"]


class DenseMlp(Frozen):
    """A gated SiLU MLP that every token runs through."""

    kind: Literal["dense"]
    width: Positive


class RoutedMlp(Frozen):
    """Gated SiLU experts, of which a router picks `top_k` a token.

    The score is the softmax over all experts or the sigmoid of each logit; with `renormalise` the scores of
    the picked experts are divided by their sum.
    """

    kind: Literal["routed"]
    num_experts: Positive
    top_k: Positive
    width: Positive
    score: Literal["sigmoid", "softmax"]
    renormalise: bool

    @model_validator(mode="after")
    def _enough_experts(self) -> Self:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} exceeds num_experts {self.num_experts}")
        return self


class LayerSpec(Frozen):
    """One decoder layer: which tokens attention sees, how it knows their positions, and what follows.

    `window_tokens` counts the current token: position p attends to p - window_tokens + 1 up to p. None
    means all of them. `rope` None means no position embedding.
    """

    window_tokens: Positive | None
    rope: Rope | None
    mlp: Annotated[DenseMlp | RoutedMlp, Field(discriminator="kind")]

    def attended_tokens(self, context_tokens: int) -> int:
        """Return how many cached tokens a row reads when its context, itself included, has this length."""
        return context_tokens if self.window_tokens is None else min(context_tokens, self.window_tokens)


class ModelSpec(Frozen):
    """A decoder-only model. All norms are RMS norms, no projection has a bias.

    A `parallel` block has one norm, whose output feeds attention and MLP side by side; a `sequential` block
    has one norm before each. `qk_norm` is an RMS norm over each head of q and k, before RoPE.
    """

    family: str
    block: Literal["parallel", "sequential"]
    hidden_size: Positive
    num_heads: Positive
    num_kv_heads: Positive
    head_dim: Positive
    qk_norm: bool
    norm_eps: PositiveFloat
    vocab_size: Positive
    tied_embeddings: bool
    logit_scale: PositiveFloat
    max_context_tokens: Positive
    eos_token_ids: tuple[Annotated[int, Field(ge=0)], ...]
    layers: Annotated[tuple[LayerSpec, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _heads_fit_together(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}")
        if self.head_dim % 2 and any(layer.rope for layer in self.layers):
            raise ValueError(f"head_dim {self.head_dim} is odd, but RoPE turns pairs of elements")
        return self

    @property
    def num_layers(self) -> int:
        """Return the number of decoder layers."""
        return len(self.layers)

    @property
    def q_size(self) -> int:
        """Return the width of all query heads together, which may differ from the hidden size."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Return the width of all key heads together; values have the same."""
        return self.num_kv_heads * self.head_dim

    @property
    def queries_per_kv(self) -> int:
        """Return how many query heads share one key and value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_parameters(self) -> int:
        """Return the exact number of weights; a tied vocabulary matrix counts once."""
        embedding = 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        experts = sum(mlp.num_experts * self._expert_parameters(mlp) for mlp in self._routed)
        return embedding + self._shared_parameters + experts

    @property
    def decode_active_parameters(self) -> int:
        """Return the number of weights that one token of decode reads, without its one row of embedding."""
        experts = sum(mlp.top_k * self._expert_parameters(mlp) for mlp in self._routed)
        return self._shared_parameters + experts

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights."""
        return self.num_parameters * BF16_BYTES

    @property
    def kv_bytes_per_token_per_layer(self) -> int:
        """Return the bytes that one token adds to one layer's KV cache."""
        return 2 * self.kv_size * BF16_BYTES

    def step_bytes(self, contexts: Sequence[int], distinct_experts: float) -> int:
        """Return the bytes that one decode step must read at least once: its roofline.

        One context length a row, the row's own token included. `distinct_experts` is how many experts of a
        routed layer the rows hit together; an expected value may have a fraction.
        """
        experts = sum(distinct_experts * self._expert_parameters(mlp) for mlp in self._routed)
        embedding_rows = len(contexts) * self.hidden_size
        weights = self._shared_parameters + embedding_rows + experts
        attended = sum(layer.attended_tokens(tokens) for layer in self.layers for tokens in contexts)
        return round(weights * BF16_BYTES) + attended * self.kv_bytes_per_token_per_layer

    @property
    def _routed(self) -> tuple[RoutedMlp, ...]:
        return tuple(layer.mlp for layer in self.layers if isinstance(layer.mlp, RoutedMlp))

    @property
    def _shared_parameters(self) -> int:
        """Return the weights that every step reads: all but the experts and the embedding's rows."""
        head_and_final_norm = self.vocab_size * self.hidden_size + self.hidden_size
        return head_and_final_norm + sum(self._layer_parameters(layer) for layer in self.layers)

    def _layer_parameters(self, layer: LayerSpec) -> int:
        """Return the weights of one layer without its experts: attention, norms, dense MLP or router."""
        attention = 2 * self.hidden_size * (self.q_size + self.kv_size)
        norms = self.hidden_size * (1 if self.block == "parallel" else 2)
        norms += 2 * self.head_dim if self.qk_norm else 0
        match layer.mlp:
            case DenseMlp(width=width):
                return attention + norms + 3 * self.hidden_size * width
            case RoutedMlp(num_experts=num_experts):
                return attention + norms + self.hidden_size * num_experts

    def _expert_parameters(self, mlp: RoutedMlp) -> int:
        return 3 * self.hidden_size * mlp.width  # gate, up and down
