"""The table of faults: what each one is, and the area that must find it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from . import faulty_attention as attention
from . import faulty_ops as ops
from . import faulty_platform as platform
from .platform import Parts

VALUES = ("shape (", "dtype ", "worst at [", "got ", "tolerance: rtol ")
"""What a failure says that compares values."""
TOKENS = ("prompt ", "position ", "got token ", "expected ")
"""What a failure says that compares tokens."""

HALF = ("bfloat16",)


@dataclass(frozen=True, slots=True)
class Fault:
    """area: where it must show first.  says: must be in the failure's text.  plugin: class in `planted`."""

    area: str
    parts: Parts = field(default_factory=Parts)
    says: tuple[str, ...] = VALUES
    plugin: str = "plugin.Plugin"


FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        "plugin-imports-torch": Fault(
            "plugin", says=("importing the plugin imports torch",), plugin="plugin_with_torch.PluginWithTorch"
        ),
        "probe-imports-torch": Fault(
            "plugin", says=("probing the platform imports torch",), plugin="plugin.ProbeWithTorch"
        ),
        "probe-raises": Fault("plugin", says=("probe failed", "OSError"), plugin="plugin.RaisingProbe"),
        "probe-changes": Fault("plugin", says=("two probes differ", "device_count=2"), plugin="plugin.ChangingProbe"),
        "probe-holds-a-device": Fault("plugin", says=("/dev/full", "must not hold"), plugin="plugin.HoldingProbe"),
        "unclaimed-misspelt": Fault("plugin", Parts(platform.MisspellsAnArea), ("atention", "attention, blocks")),
        "probe-lies": Fault("device", says=("the driver is too old",), plugin="plugin.LyingProbe"),
        "live-view": Fault("device", Parts(platform.GivesALiveView)),
        "used-memory": Fault("device", Parts(platform.GivesUsedMemory)),
        "memory-stands-still": Fault("device", Parts(platform.MemoryStandsStill), ("allocated does not move",)),
        "peak-is-never-reset": Fault("device", Parts(platform.PeakIsNeverReset), ("peak stays after reset_peak",)),
        "norm-in-half-precision": Fault("ops", Parts(ops={"rms_norm": ops.norm_that_sums_in_its_dtype}, dtypes=HALF)),
        "residual-lost": Fault("ops", Parts(ops={"fused_add_rms_norm": ops.add_norm_without_residual})),
        "rope-gptj": Fault("ops", Parts(ops={"rope": ops.rope_gptj})),
        "grid-too-small": Fault("ops", Parts(ops={"silu_and_mul": ops.silu_of_few_rows})),
        "wide-rows-cut-off": Fault("ops", Parts(ops={"silu_and_mul": ops.silu_of_narrow_rows})),
        "vocabulary-cut-off": Fault("ops", Parts(ops={"sample": ops.sample_of_few_tokens})),
        "seed-ignored": Fault("ops", Parts(ops={"sample": ops.sample_without_seeds})),
        "bias-dropped": Fault("ops", Parts(linear=ops.DropsTheBias)),
        "linear-keeps-the-last-weight": Fault("ops", Parts(linear=ops.KeepsTheLastWeight)),
        "linear-drops-a-tile": Fault("ops", Parts(linear=ops.MultipliesFewRows)),
        "mask-off-by-one": Fault("attention", Parts(attention=attention.SeesTheNextToken)),
        "scale-ignored": Fault("attention", Parts(attention=attention.ScaleIsTheUsual)),
        "window-dropped": Fault("attention", Parts(attention=attention.DropsTheWindow)),
        "soft-cap-dropped": Fault("attention", Parts(attention=attention.DropsTheSoftCap)),
        "kv-heads-in-turn": Fault("attention", Parts(attention=attention.TakesKvHeadsInTurn)),
        "keys-and-values-swapped": Fault("attention", Parts(attention=attention.SwapsKeysAndValues)),
        "padding-in-slot-zero": Fault("attention", Parts(attention=attention.WritesPaddingToSlotZero)),
        "stale-block-table": Fault("attention", Parts(attention=attention.KeepsTheTableOfTheStepBefore)),
        "row-taken-for-its-request": Fault("attention", Parts(attention=attention.FollowsRowsInsteadOfRequests)),
        "attention-in-half-precision": Fault("attention", Parts(attention=attention.SumsInHalfPrecision, dtypes=HALF)),
        "long-prompts-in-wrong-pieces": Fault("attention", Parts(attention=attention.RestartsLongPrompts)),
        "crowd-cut-off": Fault("attention", Parts(attention=attention.PlansForFewRequests)),
        "long-context-cut-off": Fault("attention", Parts(attention=attention.SeesFewKeys)),
        "reads-before-writes": Fault("attention", Parts(attention=attention.AttendsBeforeTheNextRequestWrites)),
        "metadata-moves": Fault(
            "attention", Parts(attention=attention.MovesItsMetadata), ("metadata.block_table from",)
        ),
        "copy-backwards": Fault("blocks", Parts(attention=attention.CopiesBackwards)),
        "copy-in-another-order": Fault("blocks", Parts(attention=attention.CopiesInAnotherOrder)),
        "swap-loses-a-block": Fault("blocks", Parts(attention=attention.SwapLosesABlock)),
        "layout-rounded-up": Fault("blocks", Parts(attention=attention.RoundsItsLayoutUp), ("must be 1", "shape=(")),
        "kinds-of-layers-share-state": Fault(
            "model", Parts(attention=attention.SharesStateBetweenKindsOfLayers), ("gemma3 in float32", *TOKENS)
        ),
        "replay-of-old-tokens": Fault("graph", Parts(graph=platform.ReplaysOldTokens)),
        "pads-down": Fault("graph", Parts(graph=platform.PadsDown), ("must be at least as large",)),
        "pads-beyond-the-limits": Fault("graph", Parts(graph=platform.PadsBeyondTheLimits), ("a step has room for",)),
        "gathered-in-another-order": Fault("comm", Parts(communicator=platform.GathersInAnotherOrder)),
        "reduce-averages": Fault("comm", Parts(communicator=platform.Averages)),
        "ring-never-refreshed": Fault("engine", Parts(attention=attention.NeverRefreshesItsRing), TOKENS),
        "norm-with-noise": Fault("determinism", Parts(ops={"rms_norm": ops.norm_with_noise})),
        "sums-in-random-order": Fault("determinism", Parts(attention=attention.SumsInRandomOrder)),
    }
)
"""Name -> fault, in the order of the areas."""

ABORT = "kernel-aborts"
ALL: Mapping[str, Fault] = MappingProxyType({**FAULTS, ABORT: Fault("attention", Parts(attention=attention.Aborts))})
"""With the one that leaves no report."""
