"""A source for `rowlock serve --prefill subprocess`, on top of transformers.

What one for another device looks like: load a model, announce it, compute a prompt, give its K/V away layer by layer.
To use it, from a file of configuration::

    [prefill]
    source = "subprocess"
    python = "/path/to/an/environment/bin/python"     # with transformers and rowlock; PYTHONPATH has this directory
    factory = "transformers_source:create"
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from rowlock.daemon.prefill.digests import checkpoint_digests
from rowlock.daemon.prefill.engine import Block, EngineError, EngineOptions, States, Work, widths_within
from rowlock.daemon.prefill.protocol.geometry import Geometry
from rowlock.daemon.prefill.protocol.hello import SourceFacts

DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def create(options: EngineOptions) -> TransformersEngine:
    """The factory that `--factory` names."""
    torch.set_num_threads(options.threads)
    return TransformersEngine(options)


class TransformersEngine:
    """See rowlock.daemon.prefill.engine.Engine: `facts`, and `prefill`."""

    def __init__(self, options: EngineOptions) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype="auto").to(options.device).eval()
        config = self.model.config
        program, weights = checkpoint_digests(options.checkpoint, options.threads)
        sliding = [kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ["full_attention"]]
        windows = [config.sliding_window if slides else None for slides in sliding]
        windows = windows if len(windows) == config.num_hidden_layers else windows * config.num_hidden_layers
        context = config.max_position_embeddings
        self.facts = SourceFacts(
            name=f"transformers on {options.device}",
            program=program,
            weights=weights,
            geometry=Geometry(
                dtype=DTYPES[self.model.dtype],
                kv_heads=config.num_key_value_heads,
                head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
                vocab=config.vocab_size,
                windows=tuple(None if window is None or window >= context else window for window in windows),
            ),
            heads=config.num_attention_heads,
            widths=widths_within(context, options.widths),
            streams=False,  # transformers gives nothing away before it has computed everything
            recurrent=False,
        )

    @torch.inference_mode()
    def prefill(self, work: Work) -> Generator[Block, None, States]:
        """All layers at once, then one block for each. Eager programs need no padding, so `work.width` is not used."""
        tokens, cache = torch.tensor([work.tokens], device=self.model.device), DynamicCache()
        try:
            answer = self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        except RuntimeError as error:
            raise EngineError(f"{len(work.tokens)} tokens: {error}") from error
        for layer, states in enumerate(cache.layers):
            keys_values = torch.stack((states.keys[0], states.values[0]))  # [2, kv_heads, tokens, head_dim]
            yield Block(layer, 0, plain(keys_values)[None])
        return plain(answer.logits[0, -1])


def plain(tensor: torch.Tensor) -> np.ndarray:
    """Its values as they lie in memory: numpy knows no bfloat16."""
    return tensor.cpu().contiguous().view({2: torch.int16, 4: torch.int32}[tensor.itemsize]).numpy()
