"""The host threads that the programs of the CPU binding run on, and what runs on them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from rowlock.bindings.cpu.decode import NativeDecoder, supported
from rowlock.bindings.cpu.kernel_library import Kernels, load_kernels
from rowlock.bindings.cpu.linear import native_linear
from rowlock.bindings.device import Counters
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.model.decoder import Decoder, Programs
from rowlock.bindings.weights import host_free_bytes


class HostThreads:
    """The threads of one binding. Owner thread only.

    bfloat16 is computed by kernels of our own where they run: a prompt has the same bits in whatever pieces it is
    computed, which torch does not promise. (Models beyond their sizes have our products only, and no such promise.)
    torch's product of one row runs at a third of memory speed besides, on processors with bfloat16 instructions too,
    and its threads wait for each other at barriers: one that is set aside by the system holds up every operation.
    They give the bits of torch's products on AVX2; see ``kernels/``.
    """

    def __init__(self, threads: int, counters: Counters) -> None:
        self._threads = threads
        self._counters = counters
        library = load_kernels()
        self._kernels = Kernels(library, threads) if library is not None else None
        self._torch_threads = threads
        self.prepare()

    def create_decoder(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> Programs:
        """The decoder over these weights."""
        decoder = self.create_torch_decoder(config, weights)
        kernels = self._kernels_for(weights)
        if kernels is None or not supported(config):
            return decoder
        return NativeDecoder(decoder, weights, kernels, self._counters)

    def create_torch_decoder(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> Decoder:
        """The decoder in torch, which can be asked for single layers; its products are ours where they can be."""
        kernels = self._kernels_for(weights)
        self._torch_threads = self._threads if kernels is None else 1
        self.prepare()
        return Decoder(config, weights, F.linear if kernels is None else native_linear(kernels))

    def free_bytes(self) -> int:
        return host_free_bytes()

    def prepare(self) -> int:
        """Set the threads for one step; returns how many.

        With kernels of our own for what is large in a step, one thread of torch's is quicker
        for the rest than several that wait for each other.
        """
        if torch.get_num_threads() != self._torch_threads:
            torch.set_num_threads(self._torch_threads)
        return self._threads

    def _kernels_for(self, weights: Mapping[str, torch.Tensor]) -> Kernels | None:
        """Ours, which are for bfloat16 alone."""
        return self._kernels if weights["embed"].dtype == torch.bfloat16 else None
