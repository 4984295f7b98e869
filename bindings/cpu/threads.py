"""How many host threads the programs of the CPU binding run on."""

from __future__ import annotations

import torch

from rowlock.bindings.cpu.linear import NativeLinear, choose_linear


class HostThreads:
    """The threads of one binding, and who else wants some. Owner thread only.

    Attributes:
        linear: multiplies rows with weights on them.

    """

    def __init__(self, threads: int) -> None:
        self.linear = choose_linear(threads)
        self._threads = threads
        self._left = 0
        torch.set_num_threads(threads)

    def leave(self, threads: int) -> None:
        """See :meth:`rowlock.bindings.device.Binding.leave`; one thread always stays."""
        self._left = threads

    def prepare(self, tokens: int) -> None:
        """Set the threads for a step whose longest span has so many tokens.

        torch's threads wait for each other in every operation: with kernels of our own for what is large in a
        step of single tokens, one thread is quicker for the rest.
        """
        width = max(self._threads - self._left, 1)
        if isinstance(self.linear, NativeLinear):
            self.linear.width = width
            width = width if tokens > 1 else 1
        if torch.get_num_threads() != width:
            torch.set_num_threads(width)
