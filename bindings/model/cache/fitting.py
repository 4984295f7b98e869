"""Whether shapes to be ready for can fit the pages of a model, before there are any."""

from __future__ import annotations

import sys

from rowlock.bindings.device import DeviceError, DeviceFault, Variant
from rowlock.bindings.model.cache.geometry import CacheLimits, plan_geometry
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.model.layout import Layout
from rowlock.bindings.weights import weight_dtype


def refuse_unfit(config: ModelConfig, layout: Layout, limits: CacheLimits, variants: tuple[Variant, ...]) -> None:
    """Raise DeviceError(CAPACITY), with the numbers, for the first variant that could never run.

    How much memory will be free is not known yet: it is taken to be enough for what ``limits`` leave open.
    """
    geometry = plan_geometry(config, weight_dtype(layout.parents["embed"]).itemsize, limits, sys.maxsize)
    for variant in variants:
        for group in geometry.groups:
            needed = variant.batch * geometry.most_pages(group, variant.capacity)
            if needed > group.pages:
                raise DeviceError(
                    DeviceFault.CAPACITY,
                    f"serving.variants: {variant}: with up to {variant.capacity} tokens each it needs {needed} pages "
                    f"of {geometry.page_tokens} tokens, and serving.cache_bytes is enough for {group.pages}",
                )
