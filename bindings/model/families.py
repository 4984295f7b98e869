"""The model families that the decoder knows, and in what they differ beyond their sizes. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True)
class Family:
    """What a family does that its config does not say.

    Attributes:
        name: ``model_type`` of its configs.
        architecture: the one class of transformers that is meant.
        head_norms: queries and keys are normed, head by head, before they are rotated.
        product_norms: what ``o`` and ``down`` give is normed before it is added.
        norms_from_one: a norm's weights are stored less one, and are applied before its result is rounded.
        scaled_embeddings: embeddings are multiplied by the root of the hidden size, rounded to their dtype.
        activation: of the gate.
        activation_key: where its configs name it.
        activation_name: how they name it.

    """

    name: str
    architecture: str
    head_norms: bool = False
    product_norms: bool = False
    norms_from_one: bool = False
    scaled_embeddings: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    activation_key: str = "hidden_act"
    activation_name: str = "silu"


FAMILIES: Final = {
    family.name: family
    for family in (
        Family("llama", "LlamaForCausalLM"),
        Family("qwen3", "Qwen3ForCausalLM", head_norms=True),
        Family(
            "gemma3_text",
            "Gemma3ForCausalLM",
            head_norms=True,
            product_norms=True,
            norms_from_one=True,
            scaled_embeddings=True,
            activation="gelu_tanh",
            activation_key="hidden_activation",
            activation_name="gelu_pytorch_tanh",
        ),
    )
}
